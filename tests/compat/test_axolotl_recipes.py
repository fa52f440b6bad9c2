"""Tests of recipes of families in Axolotl's form: each is imported with few warnings, and trains two steps."""

from pathlib import Path
from typing import Any

import pytest
from axolotl_recipes import COMMON, RECIPES
from chat_models import write_chat_model
from chat_tokenizers import said, write_lines
from jobs import call_main, steps_of

from megatronish.commands.import_config import import_config
from megatronish.compat.importers.axolotl import from_axolotl
from megatronish.core.foreign import read_yaml

CONTROLS = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>"),
)
WARNED = {
    "GLM-4, QLoRA": {"loss_watchdog_threshold", "loss_watchdog_patience"},
    "Granite, alpaca": {"datasets.type"},
    "Cohere, chats with roles of their own": {"datasets[0].message_property_mappings", "datasets[0].roles"},
}
"""Keys by which a recipe trains otherwise than there."""


def files(folder: Path, recipe: str) -> Path:
    """A recipe with its model and its data."""
    write_chat_model(folder / "base", controls=CONTROLS, hidden=64, ffn=64)
    user, answer = ({"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b")))
    other = {"role": "assistant", "content": "c"}
    records: dict[str, Any] = {
        "DATA": said("a", "b", "c", "d"),
        "ALPACA": {"instruction": "a", "output": "b"},
        "OTHER": said("a", "b"),
        "TEXT": {"text": "a text"},
        "PAIRS": {"messages": [user], "chosen": answer, "rejected": other},
        "LABELLED": {"prompt": "a", "completion": "b", "label": True},
    }
    text = (COMMON + RECIPES[recipe]).replace("base_model: BASE", f"base_model: {folder}/base")
    for name, record in records.items():
        text = text.replace(f"path: {name}\n", f"path: {name}.jsonl\n")
        write_lines(folder / f"{name}.jsonl", [record] * 120)
    (folder / "config.yml").write_text(text)
    return folder / "config.yml"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_imported_with_few_warnings_and_trains_two_steps(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = files(tmp_path, recipe)
    imported = from_axolotl(read_yaml(path), folder=tmp_path)
    assert set(imported.otherwise) == WARNED.get(recipe, set())
    assert not [key for key, reason in imported.left_out.items() if "not known" in reason]
    (tmp_path / "mine.toml").write_text(import_config("axolotl", path))
    run = ["--config", str(tmp_path / "mine.toml"), "--run-dir", str(tmp_path / "run"), "--eval-iters", "0"]
    done = call_main(run)
    assert done.status == 0, done.errors
    assert len(steps_of(tmp_path / "run")) == 2
