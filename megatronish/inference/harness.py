"""Model for the lm-evaluation-harness: its requests become orders of a session, which all ranks execute."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatronish.data.chat.conversation import Message
from megatronish.data.chat.setup import ChatSetup
from megatronish.inference.generate import Sampling
from megatronish.inference.scoring import Scoring, TokenPair, Writing
from megatronish.inference.session import Session
from megatronish.tokenizer.tokenizer import Tokenizer

NEW_TOKENS = 256
"""Tokens of a text whose task names no number, as in the harness."""


class HarnessTokens(NamedTuple):
    """Tokens as the harness wants them: the tokenizer, those that end a text, and the chats' setup for `bos` and all.

    `name` tells models apart in its caches.
    """

    tokenizer: Tokenizer
    stops: frozenset[int]
    chats: ChatSetup
    name: str


class HarnessModel(TemplateLM):
    """Model on the main rank; other ranks follow its session."""

    def __init__(self, session: Session, tokens: HarnessTokens) -> None:
        super().__init__()
        self._session, self._tokens = session, tokens
        bos = tokens.chats.bos
        self._beginning = tokens.chats.beginning
        self._bos = tokens.chats.controls.names.get(bos) if bos else None

    @property
    def max_length(self) -> int:
        """Tokens that the model sees."""
        return self._session.seq_length

    @property
    def eot_token_id(self) -> int:
        """Token that ends a document."""
        return self._tokens.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context: the one that begins a text, if there is one."""
        return self.eot_token_id if self._bos is None else self._bos

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness's caches."""
        return self._tokens.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Name of the template, which the harness records."""
        return self._tokens.chats.template().name if chat_template else ""

    def apply_chat_template(self, chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Text of a chat; without the generation prompt it ends within the last message, which is continued."""
        template = self._tokens.chats.template()
        text = template.render(template.shield(list(chat_history)), generation_prompt=add_generation_prompt)
        text = template.unshield(text)
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"])
        return text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_others: Any) -> list[int]:
        """Tokens of a text, in which special tokens are read, with what the tokenizer puts before a text.

        A text that begins with the first token itself gets no second one.
        """
        marked = self._tokens.tokenizer.encode_marked(string)
        begin = self._beginning
        has_begun = begin and marked[len(begin) : 2 * len(begin)] == begin
        if begin and marked[: len(begin)] == begin and (add_special_tokens is False or has_begun):
            return marked[len(begin) :]
        return marked

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_others: Any) -> list[tuple[float, bool]]:
        pairs = tuple(TokenPair(tuple(context), tuple(continuation)) for _, context, continuation in requests)
        return [(likelihood.value, likelihood.is_greedy) for likelihood in self._session.do(Scoring(pairs))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows that predict each token once."""
        windows: list[list[Any]] = []
        for (text,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows.append([(None, *make_disjoint_window(window)) for window in rolling])
        likelihoods = iter(self._loglikelihood_tokens([window for each in windows for window in each]))
        return [sum(next(likelihoods)[0] for _ in each) for each in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts after the contexts, each until one of its stop strings; those with equal settings go together."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            order = self._writing([requests[number].args[0] for number in numbers], requests[numbers[0]].args[1])
            for number, text in zip(numbers, self._session.do(order), strict=True):
                texts[number] = text
        return texts

    def _writing(self, contexts: Sequence[str], settings: dict[str, Any]) -> Writing:
        settings = dict(normalize_gen_kwargs(settings, NEW_TOKENS))
        num_tokens = min(int(settings["max_gen_toks"]), self.max_length - 1)
        until = settings.get("until") or []
        temperature = float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0
        return Writing(
            [self.tok_encode(context)[-(self.max_length - num_tokens) :] for context in contexts],
            num_tokens,
            self._tokens.stops,
            [until] if isinstance(until, str) else list(until),
            Sampling(temperature, int(settings.get("top_k") or 0), float(settings.get("top_p") or 1.0)),
        )
