"""Splitting of a text into sentences, for BERT: by marks that end one, and what follows them.

A sentence ends at a full stop, a question or an exclamation mark, with the quotes and brackets that close after it,
where white space and then a capital, a digit, an opening quote or a letter of a script without capitals follows; at a
mark of Chinese or Japanese; and at an empty line. A full stop after an initial, or after one of a few abbreviations,
ends none. The rules are for texts in Latin, Cyrillic, Greek, Chinese and Japanese script; a splitter that was trained
on a language finds more. Megatron-LM calls NLTK's; here nothing is downloaded, and a text is always split alike.
"""

import re

ABBREVIATIONS = {
    *("mr", "mrs", "ms", "dr", "prof", "rev", "sen", "rep", "gov", "gen", "col", "lt", "sgt", "capt", "st", "jr", "sr"),
    *("vs", "etc", "inc", "ltd", "co", "corp", "dept", "univ", "fig", "figs", "eq", "eqs", "no", "nos", "vol", "vols"),
    *("pp", "ed", "eds", "al", "cf", "ca", "approx", "e.g", "i.e", "a.m", "p.m", "u.s", "u.k", "z.b", "bzw", "usw"),
    *("jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "ggf", "nr", "bd", "hrsg"),
}
"""Words before a full stop that does not end a sentence, in lower case."""

# Possessive, and from the first of several marks alone: thousands of full stops in a row are read once.
_END = re.compile(
    r"""(?<![.!?…])(?P<mark>[.!?…]++)["'”’»)\]]*+"""  # a mark, what closes, and what follows
    r"""(?=\s+["'“‘«(\[]*[^\W_a-zà-öø-ÿα-ωа-я])"""
    r"|(?P<wide>[。！？]+[”’」』）]*)"
    r"|(?P<line>\n\s*\n)"
)
_LAST_WORD = re.compile(r"[\w.]*$")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, without the white space around them; none is empty."""
    sentences, begin = [], 0
    for end in _END.finditer(text):
        if end["mark"] != "." or not _is_abbreviation(text[max(begin, end.start() - 20) : end.start()]):
            sentences.append(text[begin : end.end()])
            begin = end.end()
    return [sentence for each in [*sentences, text[begin:]] if (sentence := each.strip())]


def _is_abbreviation(before: str) -> bool:
    """Whether the full stop after this text belongs to its last word: an initial, or an abbreviation."""
    match = _LAST_WORD.search(before)
    word = "" if match is None else match[0]
    return word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper() and word.isalpha())
