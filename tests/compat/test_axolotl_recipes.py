"""Tests of recipes in Axolotl's form: each is imported with few warnings, and trains a tiny model of its own family."""

from pathlib import Path
from typing import Any

import pytest
from axolotl_recipes import COMMON, RECIPES
from chat_formats import chatml
from chat_tokenizers import byte_level, said, save_tokenizer, write_lines
from family_models import write_family_model
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

SIZES: dict[str, Any] = {
    "vocab_size": byte_level(CONTROLS).get_vocab_size(),
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "group_limited_greedy",
}
FACTORS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7, "logits_scaling": 3.0}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3": {"model_type": "llama"},
    "Qwen 3": {"model_type": "qwen3", "head_dim": 16},
    "Gemma 3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "Mistral": {"model_type": "mistral", "sliding_window": 16},
    "Phi 3": {"model_type": "phi3"},
    "DeepSeek": {"model_type": "deepseek_v2", **LATENT},
    "GLM-4": {"model_type": "glm4", "head_dim": 16},
    "Granite": {"model_type": "granite", **FACTORS},
    "Cohere": {"model_type": "cohere", "tie_word_embeddings": True},
    "Falcon": {"model_type": "falcon", "tie_word_embeddings": True},
    "Qwen 2.5": {"model_type": "qwen2"},
}
"""What the config.json of a recipe's family has in addition to sizes; a recipe is called after its family."""


def files(folder: Path, recipe: str) -> Path:
    """A recipe with its model and its data."""
    save_tokenizer(folder / "base", CONTROLS, template=chatml())
    write_family_model(folder / "base", SIZES | MODELS[recipe.partition(",")[0]])
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
    trained = (tmp_path / "run" / "checkpoints" / "step_00000002" / "state.json").read_text()
    assert f'"model_type": "{MODELS[recipe.partition(",")[0]]["model_type"]}"' in trained
