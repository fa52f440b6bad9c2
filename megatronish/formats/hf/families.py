"""Table of the Hugging Face families that can be read and written, by `model_type`."""

from megatronish.formats.hf.bloom import BLOOM
from megatronish.formats.hf.family import ModelFamily
from megatronish.formats.hf.gpt2 import GPT2
from megatronish.formats.hf.llama import LLAMA, MISTRAL
from megatronish.formats.hf.qwen import QWEN2, QWEN3

# In the order of preference for a model that several families can describe.
FAMILIES: dict[str, ModelFamily] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "bloom": BLOOM,
}
