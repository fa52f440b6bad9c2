"""Chats as tokens against transformers: the same ids for public formats, and the same mask of generation blocks."""

from pathlib import Path

import pytest
from chat_formats import SMOLLM_3, VERIFIED, ChatForm
from chat_tokenizers import DATE, byte_level, encode, encoder, said

from megatronish.data.chat.template import ChatTemplate
from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer

pytestmark = pytest.mark.peers("transformers")

RECORD = said("first question é", "first answer", " second ", "second answer\n")
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]


def both(folder: Path, form: ChatForm) -> tuple[HuggingFaceTokenizer, object]:
    """Our tokenizer of the files, and that of transformers."""
    import transformers

    model = byte_level(form.controls)
    model.save(str(folder / "tokenizer.json"))
    peer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    return HuggingFaceTokenizer(model, eod=model.token_to_id("</s>")), peer


@pytest.mark.parametrize("form", VERIFIED, ids=lambda form: form.models)
def test_tokens_are_those_of_transformers(form: ChatForm, tmp_path: Path) -> None:
    tokenizer, peer = both(tmp_path, form)
    template = form.template
    if "strftime_now" in template:  # transformers writes the date of today
        template = template.replace("strftime_now('%d %b %Y')", f"'{DATE}'")
    (sample,) = encode(encoder(tokenizer, template), RECORD)
    found = peer.apply_chat_template(RECORD["messages"], chat_template=template, tokenize=True, return_dict=True)  # type: ignore[attr-defined]
    assert sample.tokens.tolist() == list(found["input_ids"])


def test_generation_blocks_have_the_mask_of_transformers(tmp_path: Path) -> None:
    form = next(each for each in VERIFIED if each.template == SMOLLM_3)
    tokenizer, peer = both(tmp_path, form)
    (sample,) = encode(encoder(tokenizer, SMOLLM_3), RECORD)
    found = peer.apply_chat_template(  # type: ignore[attr-defined]
        RECORD["messages"], chat_template=SMOLLM_3, return_dict=True, return_assistant_tokens_mask=True
    )
    assert sample.mask.tolist() == [bool(each) for each in found["assistant_masks"]]


@pytest.mark.parametrize("expression", ["tools | tojson", "tools | tojson(indent=2)", "messages[0] | tojson"])
def test_json_in_templates_is_that_of_transformers(expression: str, tmp_path: Path) -> None:
    _, peer = both(tmp_path, VERIFIED[0])
    source = f"{{{{ {expression} }}}}"
    ours = ChatTemplate(source, name="mine", controls=[], variables={}, date=DATE)
    theirs = peer.apply_chat_template(RECORD["messages"], tools=TOOLS, chat_template=source, tokenize=False)  # type: ignore[attr-defined]
    assert ours.render(RECORD["messages"], TOOLS) == theirs
