"""The `fields` of a rule are all fields that it reads: only then is a rule never asked about an invalid value."""

import dataclasses
from typing import Any

import pytest

from megatronish.config.check import RULES
from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import ConfigRule

VALUES: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 2,
    "lr": 1e-3,
    "train_iters": 10,
    "data_parallel_size": 2,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "data_path": ("prefix",),
}
OTHERS: list[dict[str, Any]] = [
    {},
    {"fp16": True, "grad_reduce_in_bf16": True, "zero_stage": 2, "num_distributed_optimizer_instances": 2},
    {"recompute_granularity": "full", "distribute_saved_activations": True, "sequence_parallel": True},
    {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2, "train_samples": 100},
    {"num_layers_per_virtual_pipeline_stage": 1, "rampup_batch_size": (4, 4, 100), "global_batch_size": 16},
    {"context_parallel_size": 2, "cp_comm_type": "a2a", "position_embedding_type": "rope", "window_size": 8},
    {"attention_backend": "flash", "swiglu": True, "num_query_groups": 2, "group_query_attention": True},
    {"tokenizer_type": "huggingface", "vocab_file": "a", "load_hf": "b", "finetune": True, "keep_every": 3},
    {"multiple_validation_sets": True, "data_path": (), "train_data_path": ("a",), "save_interval": 2},
    {"num_experts": 8, "expert_model_parallel_size": 2, "num_distributed_optimizer_instances": 2},
    {"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_layer_freq": "([0]*1+[1]*7)"},
    {"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_scores_per_group": 1},
    {"position_embedding_type": "rope", "qk_l2_norm": True, "attn_temperature_scale": 0.1},
    {"num_experts": 8, "moe_apply_probs_on_input": True},
    {"num_experts": 8, "moe_add_bias_linear": True},
    {"num_experts": 8, "moe_router_score_function": "sparsemixer", "moe_router_num_groups": 4},
    {"num_experts": 8, "zero_stage": 3, "data_parallel_size": 8, "zero_hpz_partition_size": 2},
    {"zero_stage": 3, "data_parallel_size": 8, "zero_hpz_partition_size": 3},
    {"zero_stage": 2, "zero_quantized_gradients": "int8"},
    {"zero_quantized_weights": "int8", "objective": "dpo", "load_hf": "b", "train_data_path": ("a",)},
    {"outer_optimizer": "nesterov", "num_experts": 8, "num_distributed_optimizer_instances": 2},
    {"outer_lr": 0.5},
    {
        **{"model_type": "t5", "position_embedding_type": "relative", "encoder_seq_length": 8, "vocab_extra_ids": 9},
        **{"decoder_seq_length": 8, "encoder_num_layers": 2, "decoder_num_layers": 2, "tokenizer_type": "bytes"},
    },
    {"model_type": "t5", "position_embedding_type": "relative", "dataset_type": "chat", "vocab_extra_ids": 9},
    {"packing": "best-fit"},
    {"blend_schedule": "0: 1", "train_data_path": ("a",)},
    {"fim_data": True},
    {"fim_data": True, "fim_fragment_rate": 0.5},
    {
        **{"recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe_act", "shared_experts")},
        **{"num_experts": 8, "moe_shared_expert_intermediate_size": 8},
    },
    {"multi_latent_attention": True},
    {"xielu": True, "num_experts": 4},
    {"position_embedding_type": "rope", "rope_scaling_type": "longrope", "rope_short_factor": (1.0,) * 8},
    {
        **{"position_embedding_type": "rope", "rope_scaling_type": "longrope", "rope_short_factor": (1.0,)},
        **{"multi_latent_attention": True},
    },
    {"qk_layernorm": True, "qk_layernorm_after_rope": True},
    {"use_mup": True, "mup_width_mult": 2.0},
    {"use_mup": True, "mup_base_hidden_size": 16, "multi_latent_attention": True, "model_type": "gpt"},
    {"mtp_num_layers": 1},
    {"mtp_num_layers": 1, "position_embedding_type": "rope", "objective": "dpo"},
    {"multi_latent_attention": True, "position_embedding_type": "rope", "rope_mscale": 2.0},
    {"param_cpu_offload": True, "optimizer_cpu_offload": True, "profile_schedule": True, "keep_every": 4},
]


def reading(config: Config, names: set[str]) -> Config:
    """The same config, which notes in `names` every field that is read of its sections."""

    def watched(section: Any) -> Any:
        kind = type(section)

        def get(self: Any, name: str) -> Any:
            if name in FIELDS:
                names.add(name)
            return object.__getattribute__(self, name)

        watching = type(kind.__name__, (kind,), {"__getattribute__": get})
        return watching(**{field.name: getattr(section, field.name) for field in dataclasses.fields(section)})

    sections = {field.name: watched(getattr(config, field.name)) for field in dataclasses.fields(config)}
    names.clear()
    return Config(**sections)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.complaint.__name__)
def test_a_rule_names_every_field_that_it_reads(rule: ConfigRule) -> None:
    read: set[str] = set()
    for other in OTHERS:
        names: set[str] = set()
        rule.complaint(reading(Config().with_fields(**(VALUES | other)), names))
        read |= names
    assert not read - set(rule.fields)
