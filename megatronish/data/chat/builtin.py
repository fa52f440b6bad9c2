"""Built-in chat templates, for models without one of their own: the files of the folder templates/.

A format that ends a turn with a control token of its own needs a tokenizer that has it. Those that end a turn with
`eos_token` fit every tokenizer: alpaca, llama2, mistral, plain, vicuna and zephyr.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "templates"
BUILT_IN = (
    *("chatml", "llama3", "llama2", "mistral", "gemma", "phi3", "zephyr", "alpaca", "vicuna", "plain"),
    *("qwen25", "qwen3"),
)
"""Names for --chat-template."""
WITH_TOOLS = ("chatml", "qwen25", "qwen3")
"""Templates that have a place for tools and their calls; the others are put behind templates/prelude.jinja."""


def built_in_template(name: str) -> str:
    """Source of the template of this name."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return source if name in WITH_TOOLS else (FOLDER / "prelude.jinja").read_text(encoding="utf-8") + source


def is_built_in(source: str) -> bool:
    """Whether this is the text of a template that is known here, so that it needs no bounds."""
    return any(source == built_in_template(name) for name in BUILT_IN)
