"""Flags of the commands that run a trained model: `megatronish generate`, `chat`, `serve` and `evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatronish.config.arguments import PluginNames
from megatronish.config.sections.data import DataConfig, StoreCacheSize

AdapterNames = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
"""Adapters, each a folder or NAME=FOLDER."""


@dataclass(frozen=True)
class ModelArguments:
    """A trained model in one process or over ranks of tp and pp, with adapters."""

    load: Path
    """A run folder, its checkpoints folder or one step's folder, or a Hugging Face folder."""
    plugin: PluginNames = ()
    """A plug-in (my.module or FILE.py) to import, which runs its code; several are allowed. See docs/PLUGINS.md."""
    ckpt_step: int | None = None
    """Load this step instead of the newest."""
    adapter: AdapterNames = ()
    """A folder with an adapter of the model, of PEFT or of a run with --adapter-type. Several are allowed, of which the
    first is applied until another is chosen: NAME=FOLDER names one, else its folder's name does."""
    tokenizer_model: Path | None = None
    """A SentencePiece .model, a tokenizer.json or its folder. Derived: what the model names or carries."""
    seq_length: int | None = None
    """Tokens that the model sees at a time. Derived: its length in training."""
    tensor_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """tp: ranks that share every layer."""
    pipeline_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = 1
    """pp: stages that the layers are cut into."""
    expert_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--ep"])] = 1
    """ep: ranks that share the experts of a layer out. They are taken from the ranks of tp."""
    expert_tensor_parallel_size: Annotated[int | None, tyro.conf.arg(aliases=["--etp"])] = None
    """etp: ranks that share every expert. Derived: tp."""
    bf16: bool = False
    """Compute in bf16 instead of fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""


@dataclass(frozen=True)
class SamplingArguments:
    """The choice of each token of a text."""

    temperature: float = 0.8
    """0 is greedy decoding: always the likeliest token."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 from all."""
    top_p: float = 0.95
    """Nucleus sampling: from the likeliest tokens that together have this probability."""
    seed: int = 0
    """The same seed and prompt give the same text, whatever the other prompts and the layout, except for rounding."""


@dataclass(frozen=True)
class GenerateArguments(SamplingArguments, ModelArguments):
    """Text generation with a trained model, in one process or over ranks of tp and pp."""

    use_adapter: str | None = None
    """Name of the adapter to apply; none: the base alone. Derived: the first --adapter."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text to continue; an empty one begins a document. Several are allowed. Default: one prompt, a newline."""
    add_special_tokens: bool = False
    """Read markup such as <|eot_id|> in prompts as special tokens, and add those that the tokenizer puts around a text,
    above all the first token, as converted models were trained. Without this flag a prompt is plain text."""
    prompts_file: Path | None = None
    """More prompts: a text file, one a line, or .jsonl with objects like {"text": ...}."""
    output: Path | None = None
    """A .jsonl file for the generated text, one object per prompt, instead of the terminal."""
    num_tokens: int = 200
    """Tokens to generate for each prompt, at most: an end of document or another stop token of the model ends it."""
    batch_size: int = 8
    """Prompts in one forward pass. With pp, a batch for each stage is generated at a time."""


@dataclass(frozen=True)
class ChatArguments(SamplingArguments, ModelArguments):
    """A chat with a trained model on the terminal. /reset forgets it, /adapter NAME changes the adapter, /quit ends."""

    chat_template: str | None = None
    """A template of the package (chatml, llama3, ...), a .jinja file, or a named one of the model. Derived: the one of
    the run, or the model's own."""
    chat_template_kwargs: str | None = None
    """Variables of the template, as JSON: '{"enable_thinking": false}' for Qwen 3. Derived: those of the run."""
    system: str | None = None
    """Message of the system, before all others."""
    num_tokens: int = 512
    """Tokens of an answer, at most: the end of its turn or another stop token of the model ends it."""


@dataclass(frozen=True)
class ServeArguments(ModelArguments):
    """A server of a trained model with OpenAI's interface, for one request at a time. It needs megatronish[serve]."""

    host: str = "127.0.0.1"
    """Address to listen at. Whoever reaches it can use the model: there are no keys."""
    port: int = 8000
    """Port to listen at; 0 for any that is free."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which requests may call this server, besides localhost and --host; * for any. See docs/SECURITY.md."""
    max_request_bytes: int = 2**21
    """Largest body of a request."""
    max_request_seconds: float = 30.0
    """Seconds in which the headers of a request must have arrived, then its body, and in which answers must be read."""
    max_connections: int = 200
    """Connections at a time."""
    max_queue: int = 64
    """Requests that wait for the one that is answered; more are refused, with status 429."""
    chat_template: str | None = None
    """A template of the package (chatml, llama3, ...), a .jinja file, or a named one of the model. Derived: the one of
    the run, or the model's own."""
    chat_template_kwargs: str | None = None
    """Variables of the template, as JSON: '{"enable_thinking": false}' for Qwen 3. Derived: those of the run."""


@dataclass(frozen=True)
class EvaluateArguments:
    """Perplexity of a model on a text, in any layout, over all tokens; or tasks of the lm-evaluation-harness."""

    load: Path
    """A run folder, its checkpoints folder or one step's folder, or a Hugging Face folder."""
    data_path: str | None = None
    """The prefix of a .bin/.idx pair, a .shards.json, or a file of JSON lines, plain or .gz; on object storage, too
    (s3://bucket/PREFIX)."""
    data_store_cache_path: str | None = None
    """Folder of this machine for what is read of a prefix on object storage. Derived: one in the user's cache."""
    data_store_cache_size: StoreCacheSize = DataConfig.data_store_cache_size
    """Gigabytes that its blocks may have together."""
    tasks: str | None = None
    """Tasks of the lm-evaluation-harness instead of a text: task1,task2. It needs megatronish[eval]."""
    include_path: Path | None = None
    """A folder with files of more tasks (.yaml)."""
    num_fewshot: int | None = None
    """Examples before each question. Derived: what the task says."""
    limit: int | None = None
    """Questions of each task, the first ones; the others are left out."""
    apply_chat_template: bool = False
    """Ask in the form of a chat."""
    chat_template: str | None = None
    """A template of the package (chatml, llama3, ...), a .jinja file, or a named one of the model. Derived: its own."""
    chat_template_kwargs: str | None = None
    """Variables of the template, as JSON: '{"enable_thinking": false}' for Qwen 3."""
    log_samples: bool = False
    """Write each question with its answer to the output, too."""
    json_key: str = "text"
    """Key of the text in each line's JSON object."""
    plugin: PluginNames = ()
    """A plug-in (my.module or FILE.py) to import, which runs its code; several are allowed. See docs/PLUGINS.md."""
    ckpt_step: int | None = None
    """Load this step instead of the newest."""
    adapter: Path | None = None
    """A folder with an adapter of the model: of PEFT, or of a run with --adapter-type."""
    tokenizer_model: Path | None = None
    """A SentencePiece .model, a tokenizer.json or its folder. Derived: what the checkpoint names or carries."""
    per_document: bool = False
    """Begin a window with each document, so that documents do not see each other; first tokens are not predicted."""
    seq_length: int | None = None
    """Tokens of a window, if the text has as many. Derived: the model's length in training, at most 4096."""
    stride: int | None = None
    """Tokens between the beginnings of two windows. Derived: --seq-length, windows without overlap."""
    micro_batch_size: int = 4
    """Windows in one forward pass."""
    tensor_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """tp: ranks that share every layer."""
    pipeline_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = 1
    """pp: stages that the layers are cut into."""
    context_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--cp"])] = 1
    """cp: ranks that share one sequence."""
    data_parallel_size: Annotated[int | None, tyro.conf.arg(aliases=["--dp"])] = None
    """dp: copies of the model. Derived: all ranks / (tp pp cp), or 1 on a plain start."""
    expert_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--ep"])] = 1
    """ep: ranks that share the experts of a layer out. They are taken from the ranks of dp, cp and tp."""
    expert_tensor_parallel_size: Annotated[int | None, tyro.conf.arg(aliases=["--etp"])] = None
    """etp: ranks that share every expert. Derived: tp."""
    sequence_parallel: bool = False
    """Norms and the residual stream hold 1/tp of the sequence."""
    zero_stage: Literal[0, 3] = 0
    """3: the ranks of dp and cp share the parameters."""
    bf16: bool = False
    """Compute in bf16 instead of fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    output: Path | None = None
    """A JSON file for the results. Derived: of tasks, tasks.json in the run folder."""
