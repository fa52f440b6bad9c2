"""Tests of the public API: the exact list of names and parameters, its page, and that it loads nothing early."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chat_models import write_chat_model
from paths import GOLDEN, ROOT
from public_api import MODULES, public_api
from scripts import run_code

import megatronish

PAGE = (ROOT / "docs" / "API.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SMALLER = (
    '"--mock-data", "--num-layers", "2", "--hidden-size", "32", "--micro-batch-size", "4", "--global-batch-size", "4"'
)
"""Flags in the place of --mock-data, which takes the model of the page's config at its size."""


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_the_public_api_is_the_one_that_was_agreed_on() -> None:
    assert public_api() == (GOLDEN / "public_api.txt").read_text(), (
        "the public API has changed; if on purpose: python tests/support/public_api.py > tests/golden/public_api.txt"
    )


def test_every_public_name_is_on_its_page() -> None:
    missing = [name for name in megatronish.__all__ if not re.search(rf"`{name}\b", PAGE)]
    assert not missing
    assert not [module for module in MODULES if f"`{module}" not in PAGE]


def test_no_public_name_is_that_of_a_module() -> None:
    """The module would take its place as soon as it is imported."""
    modules = {path.stem for path in Path(megatronish.__file__).parent.iterdir()}
    assert not modules & set(megatronish.__all__)


def test_names_are_loaded_when_they_are_used(tmp_path: Path) -> None:
    code = "import sys, megatronish; print(*(name for name in ('torch', 'numpy', 'tyro') if name in sys.modules))"
    assert python(code, tmp_path).stdout.strip() == ""
    early = "import sys; from megatronish import Config, Layout, SCHEDULES, read_config; print('torch' in sys.modules)"
    assert python(early, tmp_path).stdout.strip() == "False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'megatronish' has no attribute 'Confg'"):
        megatronish.__getattr__("Confg")
    assert {"Config", "pretrain", "__version__"} <= set(dir(megatronish))


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    assert len(EXAMPLES) == len(re.findall("^## ", PAGE, re.MULTILINE)), "each group has an example"
    write_chat_model(tmp_path / "models" / "base")
    # Each in names of its own, and one after the other: one reads what another has written.
    smaller = [example.replace('"--mock-data"', SMALLER) for example in EXAMPLES]
    code = "".join(f"exec({example!r}, {{'__name__': '__main__'}})\n" for example in smaller)
    done = run_code(code, tmp_path)
    assert done.status == 0, done.errors
    assert "num_attention_heads=4 must be divisible by tensor_model_parallel_size=3" in done.output
    assert re.findall(r"^step (\d): ", done.output, re.MULTILINE) == ["1", "2", "3"]
