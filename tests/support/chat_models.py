"""Tiny models that can chat, as Hugging Face folders with a tokenizer and a template, and adapters of them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from chat_formats import chatml
from chat_tokenizers import save_tokenizer
from safetensors.torch import save_file

IM = ("<|im_start|>", "<|im_end|>")
VOCABULARY = 260  # bytes, <s>, </s> and the two of IM
HIDDEN, FFN, LENGTH, LAYERS = 24, 32, 2048, 2
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def modules(hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }


def write_chat_model(
    folder: Path,
    *,
    template: str | None = "chatml",
    seed: int = 0,
    controls: Sequence[str] = IM,
    hidden: int = HIDDEN,
    ffn: int = FFN,
) -> Path:
    """A random model of two layers whose tokens are bytes; without a `template` it cannot chat."""
    save_tokenizer(folder, controls, template=chatml() if template == "chatml" else template)
    size = VOCABULARY - len(IM) + len(controls)
    sizes = {"vocab_size": size, "hidden_size": hidden, "intermediate_size": ffn}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
    table = (size, hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": table, "model.norm": (hidden,), "lm_head": table}
    for layer in range(LAYERS):
        norms = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in {**modules(hidden, ffn), **norms}.items()}
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=numbers)
        tensors[f"{name}.weight"] = values * 0.3 if len(shape) > 1 else 1 + 0.1 * values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_adapter(folder: Path, *, seed: int, rank: int = 2, hidden: int = HIDDEN) -> Path:
    """A random LoRA of the model's queries and values, as PEFT writes it; with another `hidden` it is of another."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", hidden), ("v_proj", hidden // 2)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, hidden, generator=numbers)
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, rank, generator=numbers)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
