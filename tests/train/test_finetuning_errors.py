"""Everything that a user of fine-tuning may do wrong is one sentence with the remedy, and exit status 2.

Rows are read from the top: what is done, and what the sentence must say. A tokenizer without a padding token is no
error: rows are packed, and what is left over of a row is filled with the end-of-document token and never trained on.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from chat_formats import chatml
from chat_tokenizers import byte_level, said, save_tokenizer, write_lines
from jobs import call_main, tiny, train_on_ranks
from test_bad_input import assert_told
from test_load_hf import LLAMA, llama_tensors, run_of, write_model

IM = ("<|im_start|>", "<|im_end|>")
LORA = "--adapter-type lora --lora-rank 2"


class Wrong(NamedTuple):
    """Flags that are wrong, with names of files in braces, and patterns of the sentence."""

    flags: str
    patterns: tuple[str, ...]


CHATS = "--dataset-type chat --tokenizer-type huggingface --tokenizer-model {tokenizer} --seq-length 64"
TABLE = {
    "no such module": Wrong(
        f"--load-hf {{model}} {LORA} --adapter-targets W_pack --mock-data",
        (r"W_pack matches no linear layer", r"q k v o"),
    ),
    "4-bit blocks that are cut": Wrong(
        f"--load-hf {{model}} {LORA} --quantize-base nf4 --mock-data", (r"needs whole blocks of 64 inputs",)
    ),
    "adapter without a base": Wrong(
        f"{LORA} --mock-data --seq-length 16 {{sizes}}", (r"is for a trained model", r"--load-hf DIR")
    ),
    "template without roles": Wrong(
        f"{CHATS} {{sizes}} --data-path {{chats}} --chat-template {{no_roles}}",
        (r"no_roles\.jinja", r"--chat-template"),
    ),
    "no template": Wrong(
        f"{CHATS.replace('{tokenizer}', '{bare}')} {{sizes}} --data-path {{chats}}",
        (r"has no chat template; name one with --chat-template",),
    ),
    "every answer beyond the sequence": Wrong(
        f"{CHATS} {{sizes}} --data-path {{long}}", (r"long\.jsonl", r"give a longer --seq-length")
    ),
    "vocabulary larger than the model's": Wrong(
        f"{CHATS} --load-hf {{model}} --data-path {{chats}} {LORA}", (r"vocab",)
    ),
    "tokenizer of another model": Wrong(
        f"{CHATS} --load-hf {{same_size}} --data-path {{chats}}",
        (r"writes text in other tokens than .*same_size, that of the model to start from", r"--tokenizer-model"),
    ),
    "empty file": Wrong(f"{CHATS} {{sizes}} --data-path {{empty}}", (r"empty\.jsonl",)),
    "chats without their type": Wrong(
        f"--load-hf {{model}} {LORA} --data-path {{chats}}", (r"chats\.jsonl\.idx do not exist; .* dataset_type=chat",)
    ),
    "no such file": Wrong(f"{CHATS} {{sizes}} --data-path missing.jsonl", (r"missing\.jsonl",)),
    "unknown role": Wrong(f"{CHATS} {{sizes}} --data-path {{roles}}", (r"roles\.jsonl:1",)),
    "no answer": Wrong(f"{CHATS} {{sizes}} --data-path {{mute}}", (r"mute\.jsonl",)),
}

SIZES = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of the rows by name."""
    folder = tmp_path_factory.mktemp("wrong")
    save_tokenizer(folder / "tokenizer", IM, template=chatml())
    save_tokenizer(folder / "bare", IM, template=None)
    write_model(folder / "model", LLAMA, llama_tensors())
    # A model with as many tokens as the tokenizer of the chats has, which are other ones.
    size = byte_level(IM).get_vocab_size()
    table = {name: torch.zeros(size, 24) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    write_model(folder / "same_size", {**LLAMA, "vocab_size": size}, llama_tensors() | table)
    (folder / "no_roles.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (folder / "empty.jsonl").write_text("")
    write_lines(folder / "chats.jsonl", [said("hello there", "good day")] * 40)
    write_lines(folder / "long.jsonl", [said("a" * 200, "b")] * 40)
    write_lines(folder / "roles.jsonl", [{"messages": [{"role": "poet", "content": "a"}]}] * 5)
    write_lines(folder / "mute.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 5)
    named = {path.stem: str(path) for path in folder.iterdir()}
    return named | {"sizes": SIZES}


@pytest.mark.parametrize("row", TABLE)
def test_what_is_done_wrong_is_one_sentence(tmp_path: Path, files: dict[str, str], row: str) -> None:
    wrong = TABLE[row]
    seen = call_main(run_of(tmp_path / "run", wrong.flags.format(**files), data=""))
    assert seen.status == 2, seen
    assert_told(seen, *(f"(?s){pattern}.*" for pattern in wrong.patterns))
    assert len(seen.errors.strip().splitlines()) <= 2, seen.errors  # a heading, and the sentence


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    for name, seed in (("base", 1), ("other", 2)):
        train_on_ranks(tiny(tmp_path / name, f"--train-iters 1 --seed {seed}"))
    train_on_ranks(tiny(tmp_path / "lora", f"{LORA} --train-iters 1 --load {tmp_path / 'base'}"))
    seen = call_main(tiny(tmp_path / "lora", f"{LORA} --train-iters 2 --load {tmp_path / 'other'}"))
    assert_told(seen, "were trained with", "name that model with --load-hf or --load")
