"""Text of tokens as they are generated: whole characters alone, and nothing of a stop string."""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what the bytes of an incomplete character are decoded to


class TextStream:
    """Text of a growing list of tokens, in pieces. `stop_strings` end it, and are no part of it.

    What may yet become another text is held back: an incomplete character, and a beginning of a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, stop_strings: Sequence[str] = ()) -> None:
        self.tokens: list[int] = []
        self.text = ""
        """Text so far, without what is held back."""
        self.has_stopped = False
        """Whether a stop string came."""
        self._decode, self._stop_strings = decode, [each for each in stop_strings if each]

    def add(self, token: int) -> str:
        """New text after one more token, empty for none yet."""
        self.tokens.append(token)
        return "" if self.has_stopped else self._grown(self._decode(self.tokens))

    def finish(self) -> str:
        """Text that was held back, now that no token follows."""
        return "" if self.has_stopped else self._grown(self._decode(self.tokens), is_whole=True)

    def _grown(self, text: str, *, is_whole: bool = False) -> str:
        """New part of the whole text so far."""
        searched = max(0, len(self.text) - max(map(len, self._stop_strings), default=0))
        places = [place for each in self._stop_strings if (place := text.find(each, searched)) >= 0]
        if places:
            self.has_stopped = True
            text = text[: min(places)]
        elif not is_whole:
            text = text.rstrip(UNFINISHED) if text.endswith(UNFINISHED) else text
            text = text[: len(text) - self._held(text)]
        before, self.text = len(self.text), text if len(text) > len(self.text) else self.text
        return self.text[before:]

    def _held(self, text: str) -> int:
        """Characters at the end that may begin a stop string."""
        longest = 0
        for each in self._stop_strings:
            for size in range(min(len(each) - 1, len(text)), longest, -1):
                if text.endswith(each[:size]):
                    longest = size
                    break
        return longest
