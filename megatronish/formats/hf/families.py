"""Table of the Hugging Face families that can be read and written, by `model_type`."""

from megatronish.formats.hf.bert import BERT
from megatronish.formats.hf.bloom import BLOOM
from megatronish.formats.hf.family import ModelFamily
from megatronish.formats.hf.gpt2 import GPT2
from megatronish.formats.hf.llama import LLAMA
from megatronish.formats.hf.mistral import MISTRAL
from megatronish.formats.hf.mixtral import MIXTRAL
from megatronish.formats.hf.olmoe import OLMOE
from megatronish.formats.hf.qwen2 import QWEN2
from megatronish.formats.hf.qwen2_moe import QWEN2_MOE
from megatronish.formats.hf.qwen3 import QWEN3
from megatronish.formats.hf.qwen3_moe import QWEN3_MOE
from megatronish.formats.hf.t5 import T5

# In the order of preference for a model that several families can describe.
FAMILIES: dict[str, ModelFamily] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "bloom": BLOOM,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "bert": BERT,
    "t5": T5,
}
