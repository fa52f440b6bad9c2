"""Tests of --plugin: what may be named, what is registered, and the sentence for everything that is wrong."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import tiny, train_on_ranks
from plugged import EXAMPLES, TABLES, forgotten, plug

from megatronish import plugins
from megatronish.config.check import problems
from megatronish.config.dump import to_toml
from megatronish.config.read import ConfigError, ReadConfig, read_config
from megatronish.core.errors import UserError
from megatronish.core.names import OPTIMIZER_NAMES, Choice, options_of, options_of_each
from megatronish.data.datasets import build_datasets
from megatronish.data.mock import MockSamples
from megatronish.formats.hf.llama import LLAMA, LLAMA_TENSORS
from megatronish.optim.fused import SGD

LION = EXAMPLES / "lion.py"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    with forgotten():
        yield


def read(flags: str) -> ReadConfig:
    return read_config(tiny(Path("never-written"), flags))


def told(flags: str) -> str:
    """All complaints about a command line."""
    with pytest.raises(ConfigError) as caught:
        read(flags)
    return "\n".join(caught.value.problems)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# what may be named


def test_a_plug_in_is_named_by_its_file_and_its_names_are_valid_values() -> None:
    config, notes = read(f"{plug('lion', 'z_loss')} --optimizer lion --objective z_loss")
    assert (config.optimizer.optimizer, config.training.objective) == ("lion", "z_loss")
    assert f"plug-in {LION}: {LION}" in notes


def test_a_plug_in_is_named_by_its_module_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "mine/own_optimizer.py", LION.read_text().replace('"lion"', '"tiger"'))
    monkeypatch.chdir(tmp_path)
    assert read("--plugin mine.own_optimizer --optimizer tiger").config.plugins.plugin == ("mine.own_optimizer",)


def test_a_plug_in_finds_modules_beside_its_file(tmp_path: Path) -> None:
    write(tmp_path, "beside_it.py", "NAME = 'beside'")
    text = "from beside_it import NAME\nfrom megatronish.plugins import register_hook\nregister_hook(NAME, print)"
    assert read(f"--plugin {write(tmp_path, 'uses_it.py', text)} --hook beside").config.log.hook == ("beside",)


@pytest.mark.parametrize(
    "text", [f'plugin = ["{LION}"]\n', f'plugin = "{LION}"\n', f'[plugins]\nplugin = ["{LION}"]\n'], ids=repr
)
def test_a_file_names_plug_ins_and_flags_add_to_them(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, "run.toml", f'{text}\n[optimizer]\noptimizer = "lion"\n')
    z_loss = EXAMPLES / "z_loss.py"
    config = read(f"--config {file} --plugin {z_loss} --plugin {z_loss} {LION} --objective z_loss").config
    assert config.plugins.plugin == (str(LION), str(z_loss))
    again = write(tmp_path, "again.toml", to_toml(config))
    assert read_config(["--config", str(again)]).config == config


def test_hooks_of_several_flags_are_called_in_their_order(tmp_path: Path) -> None:
    text = "from megatronish.plugins import register_hook\nfor name in 'abc': register_hook(name, print)"
    plugin = write(tmp_path, "three_hooks.py", text)
    assert read(f"--plugin {plugin} --hook c a --hook b").config.log.hook == ("c", "a", "b")


def test_without_plug_ins_nothing_becomes_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    read("")
    assert sys.path == before


# what is wrong


@pytest.mark.parametrize(
    ("plugin", "sentence"),
    [
        ("no.such_module", "--plugin no.such_module is not found, neither in .* nor among the installed modules"),
        ("no/such_file.py", "--plugin no/such_file.py does not exist; correct the path"),
        ("some/folder", "--plugin some/folder is no module; write my.module, or the path of a file that ends in .py"),
        (".relative", "--plugin .relative is no module"),
    ],
)
def test_a_plug_in_that_is_not_there_is_a_sentence(plugin: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(f"--plugin {plugin} --optimizer lion")


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("x = 1\ny = = 2\n", 2, "SyntaxError: invalid syntax"),
        ("x = 1\n\ndef f():\n    return nothing\n\nf()\n", 4, "NameError: name 'nothing' is not defined"),
        ("import no_such_library\n", 1, "ModuleNotFoundError: No module named 'no_such_library'"),
        ("import sys\nsys.exit(0)\n", 2, "SystemExit: 0"),
        ("import json\n\njson.loads('{')\n", 3, "JSONDecodeError: Expecting property name"),
        (
            "from megatronish.plugins import register_objective\n\n\nregister_objective('causal_lm', object)\n",
            4,
            "--objective causal_lm is registered already; choose another name",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_plug_in_that_fails_is_a_sentence_with_file_and_line(
    tmp_path: Path, text: str, line: int, sentence: str
) -> None:
    path = write(tmp_path, "wrong_plugin.py", text)
    complaint = told(f"--plugin {path} --optimizer lion --no-such-flag")
    assert f"--plugin {path} cannot be imported: {path}:{line}: {sentence}" in complaint
    assert "--no-such-flag is not a flag" in complaint
    assert "optimizer must be" not in complaint  # the plug-in might have registered it


def test_a_file_whose_name_another_module_has_is_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path, "json.py", "")
    assert f"--plugin {path}: the name json is taken by" in told(f"--plugin {path}")
    path = write(tmp_path, "a.b.py", "")
    assert f"--plugin {path} has a dot in its name" in told(f"--plugin {path}")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--optimizer lion", "--optimizer lion: optimizer must be one of adam, sgd or muon; others are those of plug-"),
        ("--block parallel", "--block parallel: block must be one of transformer; others are those of plug-ins"),
        (
            "--objective z",
            "--objective z: objective must be one of causal_lm, masked_lm, dpo, ipo, simpo, cpo, orpo or kto; others",
        ),
        ("--dataset-type t", "--dataset-type t: dataset_type must be one of pretrain, chat or sentences; others"),
        ("--hook h", "--hook h: hook must be a name that a plug-in registers (--plugin)"),
        ("--tokenizer-type t", "--tokenizer-type t: tokenizer_type must be one of sentencepiece, "),
        ("--pipeline-schedule s", "--pipeline-schedule s: pipeline_schedule must be one of gpipe, "),
    ],
)
def test_a_name_that_no_plug_in_registers_is_a_sentence(flags: str, sentence: str) -> None:
    assert told(flags).startswith(sentence)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("beta3=1", "optimizer_args: beta3=1 is no option of lion; there are beta1, beta2, written option=value"),
        ("beta1", "optimizer_args: beta1 is no option of lion; there are beta1, beta2, written option=value"),
        ("beta1=x", "optimizer_args: beta1=x must be a number, such as 0.9"),
        ("beta1=nan", "optimizer_args: beta1=nan must be a number, such as 0.9"),
    ],
)
def test_a_wrong_option_is_a_sentence(flags: str, sentence: str) -> None:
    assert told(f"{plug('lion')} --optimizer lion --optimizer-args {flags}") == sentence


def test_options_of_what_has_none_are_a_sentence() -> None:
    assert told("--optimizer-args beta1=0.5") == "optimizer_args: beta1=0.5 is no option of adam; leave it out"
    assert told("--hook-args every=5") == "hook_args: every=5 is no option of any name; leave it out"


def test_an_option_has_the_type_of_its_default(tmp_path: Path) -> None:
    options = {"rate": 0.5, "every": 10, "on": True, "word": "a"}
    table = {"mine": Choice(options), "other": Choice({"every": 1})}
    words = ["rate=1e-3", "on=false", "word=x=y"]
    assert options_of(table, "mine", words) == {"rate": 1e-3, "every": 10, "on": False, "word": "x=y"}
    each = options_of_each(table, ["other", "mine"], ["every=7"])
    assert each == {"other": {"every": 7}, "mine": {**options, "every": 7}}
    for word, wanted in (("every=1.5", "a whole number, such as 10"), ("on=1", "true or false, such as true")):
        with pytest.raises(UserError, match=f"{word} must be {wanted}"):
            options_of(table, "mine", [word])
    assert options == {"rate": 0.5, "every": 10, "on": True, "word": "a"}


def test_a_kind_of_data_may_need_no_path_and_gives_every_split(tmp_path: Path) -> None:
    text = """
from megatronish.data.mock import MockSamples
from megatronish.plugins import register_dataset

def open_counted(source, settings, *, seed):
    assert source.path == "" and source.part == (0.0, 1.0)
    return MockSamples(name=source.name, seq_length=settings.seq_length, seed=seed, vocab_size=9, eod=8)

register_dataset("counted", open_counted, needs_path=False, options={"seed": 1})
"""
    plugin = write(tmp_path, "counted_data.py", text)
    flags = f"--plugin {plugin} --dataset-type counted --dataset-args seed=5 --tokenizer-type null --vocab-size 9"
    data = read_config(tiny(tmp_path, "", data=flags)).config.data
    found = build_datasets(data, seq_length=4, seed=3, vocab_size=9, eod=8)
    names = [each.name for each in (found.train, *found.valid.values(), found.test) if each is not None]
    assert names == ["training", "validation", "test"]
    assert found.train.identity == MockSamples(name="training", seq_length=4, seed=5, vocab_size=9, eod=8).identity
    assert read_config(tiny(tmp_path, "", data=f"{flags} --mock-data")).config.data.dataset_type != "counted"


# registration


NOT_BY_NAME = {"mock", "t5"}
"""A data set without a flag of that name, and layers of which the kind of model has told."""


def test_the_tables_of_each_kind_have_the_same_names() -> None:
    for first, *others in TABLES:
        for other in others:
            assert other.keys() - NOT_BY_NAME == first.keys()


def register(kind: str, name: str) -> None:
    """Register anything under a name."""
    calls: dict[str, Callable[[], None]] = {
        "block": lambda: plugins.register_block(name, print, layers=list),
        "optimizer": lambda: plugins.register_optimizer(name, SGD, moments=1),
        "schedule": lambda: plugins.register_schedule(name, list),
        "objective": lambda: plugins.register_objective(name, print),  # type: ignore[arg-type]
        "dataset": lambda: plugins.register_dataset(name, print),  # type: ignore[arg-type]
        "hook": lambda: plugins.register_hook(name, print),  # type: ignore[arg-type]
        "tokenizer": lambda: plugins.register_tokenizer(name, print),  # type: ignore[arg-type]
        "family": lambda: plugins.register_model_family(name, LLAMA, LLAMA_TENSORS),
    }
    calls[kind]()


@pytest.mark.parametrize(
    ("kind", "built_in"),
    [
        ("block", "transformer"),
        ("optimizer", "adam"),
        ("schedule", "1f1b"),
        ("objective", "causal_lm"),
        ("dataset", "mock"),
        ("hook", "twice"),
        ("tokenizer", "bytes"),
        ("family", "llama"),
    ],
)
def test_a_name_is_registered_once_and_can_be_written_as_a_flag(kind: str, built_in: str) -> None:
    before = [dict(table) for tables in TABLES for table in tables]
    if built_in != "twice":
        with pytest.raises(UserError, match=f"{built_in} is registered already; choose another name"):
            register(kind, built_in)
    for name in ("", "two words", "--flag", "a,b"):
        with pytest.raises(UserError, match="is no name; use letters, digits"):
            register(kind, name)
    assert [dict(table) for tables in TABLES for table in tables] == before
    register(kind, "mine-2.0")
    with pytest.raises(UserError, match=r"mine-2.0 is registered already"):
        register(kind, "mine-2.0")
    for first, *others in TABLES:
        for other in others:
            assert other.keys() - NOT_BY_NAME == first.keys()


def test_the_memory_of_an_optimizer_is_what_it_says() -> None:
    read(plug("lion"))
    assert OPTIMIZER_NAMES["lion"].num_moments(count=10, in_matrices=4) == 10
    assert OPTIMIZER_NAMES["muon"].num_moments(count=10, in_matrices=4) == 16
    plugins.register_optimizer("reads-adam", SGD, moments=2, matrix_moments=3, reads=("adam_",))
    assert OPTIMIZER_NAMES["reads-adam"].num_moments(count=10, in_matrices=4) == 24
    config, notes = read("--optimizer reads-adam --adam-beta1 0.8 --sgd-momentum 0.5")
    assert not problems(config)
    assert [note for note in notes if "idle" in note] == ["sgd_momentum=0.5: idle with optimizer=reads-adam"]


def test_the_momentum_of_an_optimizer_that_says_it_has_one_may_cycle() -> None:
    cycle = "--cycle-min-momentum 0.8 --cycle-max-momentum 0.9"
    plugins.register_optimizer("still", SGD, moments=1)
    plugins.register_optimizer("moving", SGD, moments=1, has_momentum=True)
    assert not problems(read(f"--optimizer moving {cycle}")[0])
    with pytest.raises(UserError, match="needs an optimizer whose momentum can be set; --optimizer has adam, sgd"):
        read(f"--optimizer still {cycle}")


def test_an_optimizer_may_be_a_function(tmp_path: Path) -> None:
    """A function has no `described`: the first lines of the run have the name of --optimizer then."""
    text = (
        "from megatronish.optim.fused import SGD\n"
        "from megatronish.plugins import register_optimizer\n"
        "register_optimizer('plain', lambda masters, config: SGD(masters, config), moments=1)\n"
    )
    plugin = write(tmp_path, "plain.py", text)
    output = train_on_ranks(tiny(tmp_path / "run", f"--plugin {plugin} --optimizer plain --train-iters 2"))
    assert "plain" in output
