"""Table of the Hugging Face families that can be read and written, by `model_type`."""

from megatronish.formats.hf.apertus import APERTUS
from megatronish.formats.hf.arcee import ARCEE
from megatronish.formats.hf.baichuan import BAICHUAN
from megatronish.formats.hf.bert import BERT
from megatronish.formats.hf.bloom import BLOOM
from megatronish.formats.hf.cohere import COHERE, COHERE2
from megatronish.formats.hf.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from megatronish.formats.hf.ernie4_5 import ERNIE4_5
from megatronish.formats.hf.exaone4 import EXAONE4
from megatronish.formats.hf.falcon import FALCON
from megatronish.formats.hf.family import ModelFamily
from megatronish.formats.hf.gemma import GEMMA, GEMMA2, GEMMA3
from megatronish.formats.hf.glm4 import GLM4, GLM4_MOE
from megatronish.formats.hf.gpt2 import GPT2
from megatronish.formats.hf.gpt_neox import GPT_NEOX
from megatronish.formats.hf.gpt_oss import GPT_OSS
from megatronish.formats.hf.gptj import GPTJ
from megatronish.formats.hf.granite import GRANITE, GRANITEMOE, GRANITEMOESHARED
from megatronish.formats.hf.helium import HELIUM
from megatronish.formats.hf.hunyuan import HUNYUAN
from megatronish.formats.hf.llama import LLAMA
from megatronish.formats.hf.llama4 import LLAMA4
from megatronish.formats.hf.minimax_m2 import MINIMAX_M2
from megatronish.formats.hf.mistral import MISTRAL, MIXTRAL
from megatronish.formats.hf.mpt import MPT
from megatronish.formats.hf.nemotron import NEMOTRON
from megatronish.formats.hf.olmo import OLMO, OLMO2, OLMO3, OLMOE
from megatronish.formats.hf.opt import OPT
from megatronish.formats.hf.phi import PHI, PHI3, PHIMOE
from megatronish.formats.hf.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from megatronish.formats.hf.seed_oss import SEED_OSS
from megatronish.formats.hf.smollm3 import SMOLLM3
from megatronish.formats.hf.stablelm import STABLELM
from megatronish.formats.hf.starcoder2 import STARCODER2
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
    "gemma": GEMMA,
    "gpt_neox": GPT_NEOX,
    "olmo2": OLMO2,
    "granite": GRANITE,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "glm4": GLM4,
    "starcoder2": STARCODER2,
    "smollm3": SMOLLM3,
    "phi": PHI,
    "phi3": PHI3,
    "olmo": OLMO,
    "stablelm": STABLELM,
    "cohere": COHERE,
    "gptj": GPTJ,
    "opt": OPT,
    "nemotron": NEMOTRON,
    "helium": HELIUM,
    "seed_oss": SEED_OSS,
    "exaone4": EXAONE4,
    "ernie4_5": ERNIE4_5,
    "cohere2": COHERE2,
    "olmo3": OLMO3,
    "arcee": ARCEE,
    "hunyuan_v1_dense": HUNYUAN,
    "apertus": APERTUS,
    "baichuan": BAICHUAN,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": KIMI_K2,
    "deepseek_v2": DEEPSEEK_V2,
    "falcon": FALCON,
    "mpt": MPT,
    "glm4_moe": GLM4_MOE,
    "minimax_m2": MINIMAX_M2,
    "granitemoe": GRANITEMOE,
    "granitemoeshared": GRANITEMOESHARED,
    "phimoe": PHIMOE,
    "llama4_text": LLAMA4,
    "gpt_oss": GPT_OSS,
}
