"""Data sets of Axolotl's config.yml: chats as flags of chat data, texts as what is to be done with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.config.importers.axolotl_keys import EVERY_TOKEN
from megatronish.config.importers.imported import Imported

FORMATS = {"chat_template": "auto", "alpaca": "alpaca", "sharegpt": "sharegpt", "alpaca_chat": "alpaca"}
"""Types of data sets that are chats, and the format of their files."""
TEMPLATES = {
    **{name: name for name in ("chatml", "llama3", "gemma", "alpaca")},
    **{"phi_3": "phi3", "mistral_v1": "mistral", "tokenizer_default": None},
}
"""Names of templates; None is the model's own."""
TEXTS = (None, "", "completion", "pretrain")


def data_sets(found: Imported, values: Mapping[str, Any], folder: Path) -> bool:
    """Settings of the data sets; whether they are chats. What has no counterpart is listed."""
    sets = _list(values.get("datasets"))
    types = [_type(each) for each in sets]
    has_chats = any(kind in FORMATS for kind in types)
    _list_unknown(found, values)
    if not has_chats:
        if values.get("train_on_inputs") is False:
            found.leave_out("train_on_inputs", EVERY_TOKEN)
        return False
    for key in ("datasets", "chat_template", "chat_template_jinja", "train_on_inputs"):
        found.left_out.pop(key, None)
    found.set("dataset_type", "chat")
    found.set("train_on", "all" if values.get("train_on_inputs") else "assistant")
    found.set("pack_samples", bool(values.get("sample_packing")))
    formats = {FORMATS.get(kind or "", "text") for kind in types}
    if len(formats) == 1 and formats != {"auto"}:
        found.set("chat_format", formats.pop())
    _template(found, values, "alpaca" if "alpaca" in types else None)
    _files(found, sets, folder)
    return True


def _list(sets: Any) -> list[Any]:
    return sets if isinstance(sets, list) else [] if sets is None else [sets]


WRITTEN = "written in the file"


def _type(each: Any) -> str | None:
    """Type of a data set, such as chat_template; WRITTEN for one that the file itself describes."""
    kind = each.get("type") if isinstance(each, dict) else None
    return kind.split(".")[0] if isinstance(kind, str) else None if kind is None else WRITTEN


def _list_unknown(found: Imported, values: Mapping[str, Any]) -> None:
    """List the types that are not there. Sets for tests and for pretraining are not read as chats."""
    for key in ("datasets", "test_datasets", "pretraining_dataset"):
        for index, each in enumerate(_list(values.get(key))):
            kind = _type(each)
            if kind not in TEXTS and not (kind in FORMATS and key == "datasets"):
                reason = f"{kind}: a prompt template is not applied; text is trained on as it is"
                found.leave_out(f"{key}[{index}].type", reason)


def _template(found: Imported, values: Mapping[str, Any], of_data: str | None) -> None:
    """The template that is named, that of the type of the data, or the model's own."""
    name, text = values.get("chat_template"), values.get("chat_template_jinja")
    if text is not None:
        if str(text).endswith(".jinja"):
            found.set("chat_template", str(text))
        else:
            found.leave_out("chat_template_jinja", "write it into a file, and name it: --chat-template FILE.jinja")
    elif name is None:
        if of_data is not None:
            found.set("chat_template", of_data)
            found.leave_out("datasets.type", f"the opening sentence of {of_data} is not added: put it in the data")
    elif name not in TEMPLATES:
        found.leave_out("chat_template", f"{name} is not there; name the model's own or a file with --chat-template")
    elif (ours := TEMPLATES[name]) is not None:
        found.set("chat_template", ours)


def _files(found: Imported, sets: list[Any], folder: Path) -> None:
    """Paths of files of JSON lines; nothing is downloaded."""
    paths = []
    for index, each in enumerate(sets):
        name = each.get("path") if isinstance(each, dict) else each
        if isinstance(each, dict) and name in ("json", "jsonl"):  # a reader of the Hub's library, and its files
            name = next(iter(_list(each.get("data_files"))), name)
        here = next((path for path in (Path(str(name)), folder / str(name)) if path.is_file()), None)
        if here is None:
            reason = f"{name} is not a file here; save it as JSON lines, and name it with --data-path"
            found.leave_out(f"datasets[{index}].path", reason)
        else:
            paths.append(str(here))
    if paths:
        found.set("data_path", tuple(paths))
