"""The run folder: its lock, its last step, and the check that a run continues the same model, data and seed.

With --run-dir s3://... it is written on a disk and copied to the store. Logs grow line by line, and objects are
replaced as a whole. So the files of a run lie in a local folder, whose name is made of the URL, and those that have
changed are copied before each checkpoint is written and when the run ends: what a store says of a run is never older
than the checkpoint from which it resumes. A start on any machine begins with the files that the store has. Checkpoints
are not part of this: ranks write them into the store directly.
"""

import fcntl
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from megatronish.checkpoint.checksums import DamagedError
from megatronish.config.config import Config
from megatronish.config.dump import resolved, section_of
from megatronish.config.fields import FIELDS
from megatronish.config.model_source import function_of
from megatronish.config.plugins import module_name
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.core.files import naming
from megatronish.core.foreign import shown
from megatronish.core.private import NO_LINK
from megatronish.core.remote import Location, RemotePath, error_of_start

# Fields outside [model] that a run and its continuation must share. All other fields may differ.
FIXED = (
    "training.seq_length",
    "training.seed",
    "data.reset_position_ids",
    "data.reset_attention_mask",
    "data.eod_mask_loss",
    "adapter.adapter_type",
    "adapter.adapter_targets",
    "adapter.lora_rank",
    "adapter.lora_alpha",
    "adapter.use_rslora",
    "adapter.quantize_base",
    "adapter.double_quantization",
)
TOLD_BY_SHAPES = ("num_layers", "hidden_size", "ffn_hidden_size")
NAMES_OF_DATA = (
    *("data.data_path", "data.train_data_path", "data.split", "data.mock_data", "data.dataset_type"),
    *("data.blend_schedule", "data.packing"),
    *("fim.fim_data", "fim.fim_rate", "fim.fim_spm_rate", "fim.fim_split_sample", "fim.fim_fragment_rate"),
    *("fim.fim_no_prefix", "fim.fim_prefix_token", "fim.fim_middle_token", "fim.fim_suffix_token"),
    *("fim.fim_pad_token", "fim.fim_eod_token"),
    *("chat.chat_format", "chat.chat_template", "chat.chat_date", "chat.train_on", "chat.pack_samples"),
    "chat.chat_template_kwargs",
)
LOCK = ".lock"
FILES = (
    LOCK,
    *("config.toml", "config.new"),
    "metrics.jsonl",
    "evaluations.jsonl",
    "experts.jsonl",
    *("ranks.jsonl", "report.html"),
    *("goodput.json", "goodput.new", "health.json", "health.new", "forecast.json", "report.md"),
    "loss.png",
    "latest",
    ".copies",
)
"""Files of a run folder or of its checkpoints that a run writes under one name."""


def make_writable(folder: Path, *, flag: str) -> None:
    """Make the folder if it is missing; UserError now, and not at the first checkpoint, if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not os.access: network file systems and those of the kernel refuse what its modes allow.
        with tempfile.TemporaryFile(dir=folder):
            problem = None
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise UserError(f"{flag} {folder} cannot be written: {problem}; choose another")


def refuse_odd_files(folder: Path) -> None:
    """UserError if something other than a file that can be written has the name of a file of the run."""
    for name in FILES:
        path = folder / name
        is_file = path.is_file()
        empties_another = is_file and name == LOCK and path.is_symlink()  # the file that the link leads to
        if not os.path.lexists(path) or (is_file and os.access(path, os.W_OK) and not empties_another):
            continue
        what = "is a folder" if path.is_dir() else "is no ordinary file"
        if is_file:
            what = "is a link" if empties_another else "cannot be written"
        raise UserError(f"{path} {what}, and the run writes its {name} there; move it away, or choose another folder")


@contextmanager
def locked(folder: Path, *, flag: str) -> Iterator[None]:
    """Lock of a folder for the time of a run, which the system releases however the process ends.

    UserError if another run has the lock.
    """
    make_writable(folder, flag=flag)
    refuse_odd_files(folder)
    with os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{flag} {folder} is in use by {_holder(file)}; wait for that run or end it, or choose another {flag}"
            ) from None
        with naming(folder / LOCK):
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {os.uname().nodename}".encode())
        yield


def _holder(file: TextIO) -> str:
    """Name of the process that has the lock. It is written after the lock is taken: an empty file is read again."""
    for _ in range(20):
        file.seek(0)
        if name := file.read().strip():
            return name
        time.sleep(0.05)
    return "another process"


def last_step(file: Path) -> int:
    """Number of the step of the last whole line of a file of JSON lines; 0 if there is none."""
    try:
        with file.open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - 2**16))
            last_lines = lines.read().splitlines()
    except OSError:
        return 0
    for line in reversed(last_lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # infinity is no step
            continue
    return 0


NONE_IS_ZERO = ("mtp_num_layers",)
"""Fields of which none and 0 mean the same."""


def differences(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields in which two resolved configs differ, {section.field: (saved, now)}.

    A field that the saved config lacks is None, or newer than the checkpoint: its default is what the run had.
    """
    fields, defaults = {}, resolved(Config())
    for section in sorted(saved.keys() | now.keys()):
        before, after = (defaults.get(section, {}) | config.get(section, {}) for config in (saved, now))
        for name in sorted(before.keys() | after.keys()):
            was, is_now = before.get(name), after.get(name)
            if was != is_now and not (name in NONE_IS_ZERO and not was and not is_now):
                fields[f"{section}.{name}"] = (was, is_now)
    return fields


def refuse_other_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """UserError unless the resumed run has the model, the data and the seed of its checkpoint."""
    changed = differences(saved["config"], now["config"])
    problems = [
        f"{name} was {before} and is {after}"
        for name, (before, after) in changed.items()
        if name.startswith("model.") or name in FIXED
    ]
    problems += _missing_plugins(saved["config"], now["config"])
    if saved["vocab_size"] != now["vocab_size"]:
        problems.append(f"the vocabulary was {saved['vocab_size']} and is {now['vocab_size']}")
    if saved["eod"] != now["eod"]:
        problems.append(f"the token that ends a document was {saved['eod']} and is {now['eod']}")
    if saved["data"] != now["data"]:
        named = [f"{name} was {a} and is {b}" for name, (a, b) in changed.items() if name in NAMES_OF_DATA]
        # What the data are depends on the sequence length, the seed and the vocabulary too.
        problems += named or ([] if problems else ["the training data's files were changed under the same name"])
    if problems:
        raise UserError(
            f"the run in this folder was started with other settings: {'; '.join(problems)}. Resume it with its own "
            "settings, or choose another --run-dir; with --load and --finetune a new run takes the weights of this one"
        )


def _missing_plugins(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Complaints about plug-ins that the run had and has not; one that lies elsewhere now is the same by its name."""
    before, after = (config.get("plugins", {}).get("plugin", []) for config in (saved, now))
    present = set(map(module_name, after))
    missing = [each for each in before if module_name(each) not in present]
    return [f"it had --plugin {shlex.quote(shown(each))}, which is missing" for each in missing]


def refuse_other_function(saved: dict[str, Any], now: dict[str, Any], *, source: Location) -> None:
    """UserError if the config computes with the weights of `source` something else than they were trained for.

    Models of other sizes are left to `load_tensors`, which names the tensors whose shapes differ.
    """
    try:
        before, after = (
            function_of(section_of(ModelConfig, config["model"]), seq_length=config["training"]["seq_length"])
            for config in (saved, now)
        )
    except TypeError as error:
        raise DamagedError(source, f"its config is not one of this version ({error})") from error
    if any(before[name] != after[name] for name in TOLD_BY_SHAPES):
        return
    problems = [
        f"{name}={before.get(name)} there and {after.get(name)} here ({FIELDS[name].flag})"
        for name in (before | after)
        if before.get(name) != after.get(name) and name != "max_position_embeddings"
    ]
    if problems:
        raise UserError(
            f"the weights of {source} are of a model that computes something else: {'; '.join(problems)}. Set these "
            "to what they were, or add --use-checkpoint-args, which takes them from there"
        )


CHECKPOINTS = "checkpoints"
LINES = (".jsonl", ".log")


class RunMirror:
    """The copy of a local run folder in a store. One rank of each machine calls its methods."""

    def __init__(self, folder: Path, place: RemotePath) -> None:
        self.folder, self.place = folder, place
        self._copied: dict[str, tuple[int, int]] = {}  # change time and size of the files as they were copied

    def fetch(self) -> None:
        """Replace local files by those of the store; UserError if they cannot be read, RunError in an outage.

        A local file that continues that of the store stays: a run that was killed here has written it, and may
        resume from a copy nearby of a step after the last checkpoint.
        """
        try:
            for name, size in self.place.sizes().items():
                if name.partition("/")[0] != CHECKPOINTS and not self._is_ahead(name, size):
                    (self.place / name).download_file(self.folder / name)
                    self._copied[name] = _state(self.folder / name)
        except OSError as error:
            what = f"--run-dir {self.place} cannot be copied to {self.folder}"
            raise error_of_start(what, error, remedy="correct that or choose another run folder") from error

    def _is_ahead(self, name: str, size: int) -> bool:
        """Whether a local file is a longer version of the store's: for lines by their bytes, else by its time."""
        local, remote = self.folder / name, self.place / name
        if not local.is_file():
            return False
        if local.suffix not in LINES:
            return local.stat().st_mtime > remote.stat().st_mtime
        with tempfile.TemporaryDirectory() as aside:
            if local.stat().st_size <= size:
                return False
            remote.download_file(Path(aside) / local.name)
            return _begins_with(local, Path(aside) / local.name)

    def keep_back(self) -> None:
        """Leave what an earlier start has left here as it is: another machine has the files of rank 0 now."""
        for path in self.folder.rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    self._copied[path.relative_to(self.folder).as_posix()] = _state(path)

    def copy(self) -> None:
        """Copy the files that have changed. What fails is printed, and tried again the next time."""
        try:
            for path in sorted(self.folder.rglob("*")):
                self._copy(path)
        except OSError as error:
            told = f"files of {self.folder} were not copied to {self.place}: {error.strerror or error}"
            tqdm.write(f"{told}; it is tried again before the next checkpoint", file=sys.stderr)

    def _copy(self, path: Path) -> None:
        name = path.relative_to(self.folder).as_posix()
        if name.partition("/")[0] == CHECKPOINTS or path.name.startswith("."):
            return
        try:
            if not path.is_file() or self._copied.get(name) == (state := _state(path)):
                return
            (self.place / name).upload(path)
        except FileNotFoundError:
            if path.exists():  # or it was replaced meanwhile
                raise
            return
        self._copied[name] = state


def _begins_with(longer: Path, shorter: Path) -> bool:
    """Whether a file begins with the bytes of another."""
    with longer.open("rb") as one, shorter.open("rb") as other:
        while expected := other.read(2**20):
            if one.read(len(expected)) != expected:
                return False
    return True


def _state(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size
