"""What PEFT's adapter_config.json may ask for and is not done here: refused by name, so that nothing is left out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.core.errors import UserError
from megatronish.formats.peft.config import our_config
from megatronish.formats.peft.folder import Module, our_parts

PATH = Path("adapter_config.json")
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "init_lora_weights": True}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "peft_type=PREFIX_TUNING is not supported; LORA and IA3 are"),
        ({"use_dora": True}, "use_dora asks for DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save asks for whole modules that learn"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices asks for"),
        ({"layer_replication": [[0, 2]]}, "layer_replication asks for repeated layers"),
        ({"lora_bias": True}, "lora_bias asks for biases"),
        ({"bias": "all"}, "bias=all trains biases"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens asks for adapters that begin at a token"),
        ({"use_qalora": True}, "use_qalora asks for"),
        ({"rank_pattern": {"q_proj": 8}}, "q_proj is scaled by 1 and others by 2"),
        ({"r": "4"}, 'r="4" must be a whole number from 1 on'),
        ({"r": 0}, "r=0 must be a whole number from 1 on"),
        ({"lora_alpha": None}, "lora_alpha=null must be a number"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern of q_proj=1.5 must be a whole number"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern=['q_proj'] is no JSON object"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa changes the weights of the base"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the weights of the base"),
        ({"init_lora_weights": "OLoRA"}, "changes the weights of the base"),
        ({"init_lora_weights": "corda"}, "changes the weights of the base"),
        ({"init_lora_weights": "loftq"}, "path_initial_model_for_weight_conversion"),
    ],
)
def test_what_is_not_done_is_refused_by_name(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as told:
        our_config(PATH, LORA | changed)
    assert words in str(told.value) and str(told.value).startswith("adapter_config.json: ")


@pytest.mark.parametrize("initial", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_initial_values_that_leave_the_base_alone_are_read(initial: object) -> None:
    assert our_config(PATH, LORA | {"init_lora_weights": initial}).lora_rank == 4


@pytest.mark.parametrize(
    ("section", "shape", "words"),
    [
        ("up", (1, 8), "multiplies the inputs of mlp.up (feedforward_modules), and here the outputs"),
        ("down", (8, 1), "multiplies the outputs of mlp.down (feedforward_modules), and here the inputs"),
    ],
)
def test_ia3_of_the_other_side_of_a_square_layer_is_refused(section: str, shape: tuple[int, int], words: str) -> None:
    """Both sides have as many features, so no shape would tell."""
    module = Module(f"mlp.{section}", "layers.0.mlp", (section,), (8,))
    ia3 = AdapterConfig(adapter_type="ia3")
    with pytest.raises(UserError) as told:
        our_parts(module, [torch.ones(shape)], ia3, Path("adapter/adapter_model.safetensors"))
    assert words in str(told.value) and str(told.value).startswith("adapter: IA3 ")
    assert our_parts(module, [torch.ones(shape).T], ia3, Path("adapter/x"))[section]["l"].shape == (8,)
