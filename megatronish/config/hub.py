"""Names of Hugging Face's hub in the place of folders and files: org/name, org/name@revision, org/name:FILE.

What a name stands for is downloaded through `huggingface_hub` into its cache, at one commit, and from there on is a
folder like any other. Only files that are read here are fetched: config.json, the tokenizer's files, safetensors; JSON
lines of a data set. No pickle and no code is. Of the ranks on a machine one downloads and the others wait: a file in
the cache is locked meanwhile, and a record next to it says which commit it was, so that all of them read the same.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from megatronish.core.errors import UserError
from megatronish.core.files import AtomicFile
from megatronish.core.foreign import parse_json, read_json
from megatronish.core.private import locked, read_own
from megatronish.tokenizer.names import NAMES, TEMPLATES

RepoType = Literal["model", "dataset"]
Choose = Callable[[Sequence[str]], list[str]]
"""Names of all files of a repository -> those to download."""

COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]*\w)(?:@([\w./-]+))?(?::(\S+))?")
_FILES = (
    ".model",
    ".json",
    ".jsonl",
    ".gz",
    ".zst",
    ".bin",
    ".idx",
    ".tiktoken",
    ".txt",
    ".jinja",
    ".parquet",
    ".safetensors",
)
_FOLDERS = {
    *("models", "model", "runs", "run", "data", "datasets", "dataset", "checkpoints", "checkpoint", "ckpt", "ckpts"),
    *("weights", "output", "outputs", "results", "tmp", "home", "mnt", "scratch", "workspace", "tutorial", "demo"),
}
"""Usual first folders of paths: what lies in them is on no hub."""
_SNAPSHOT = re.compile(r"/(models|datasets)--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})(?:/(.+))?$")
LAUNCHED = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
_TIMEOUT = 10.0  # seconds for an answer about a repository
_CONFIG, _INDEX, _WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
_LARGEST_INDEX = 2**28  # bytes: one with experts has hundreds of thousands of names
_LARGEST_RECORD = 2**24  # bytes
_SHARD = re.compile(r"model[\w.-]*-\d+-of-\d+\.safetensors")
DATA = (".jsonl", ".json")
SPLITS = {"valid_data_path": ("valid", "dev", "eval"), "test_data_path": ("test",)}


class HubName(NamedTuple):
    """Name of a repository, with the revision and the file that it asks for."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @property
    def download(self) -> str:
        """Command that downloads it on a machine with a network."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repo}{revision} --local-dir {self.repo.partition('/')[2]}"


class Hub(NamedTuple):
    """The library, its constants and its errors, with the server and the cache that the environment names now."""

    library: Any
    constants: Any
    errors: Any

    @property
    def url(self) -> str:
        """Address of the hub."""
        return os.environ.get("HF_ENDPOINT") or self.constants.ENDPOINT

    @property
    def cache(self) -> Path:
        """Folder of what was downloaded, by any program."""
        home = os.environ.get("HF_HOME")
        return Path(os.environ.get("HF_HUB_CACHE") or (f"{home}/hub" if home else self.constants.HF_HUB_CACHE))


def hub_name(text: str) -> HubName | None:
    """The name that a text is; None for a path: something or its first folder is there, or it ends like a file."""
    # 1. What exists here is a path, whatever its name looks like: a run must not change because a repository is
    # published.
    match = _NAME.fullmatch(text)
    if match is None or os.path.lexists(text) or ".." in text:
        return None
    # 2. What does not exist may be a misspelled path; the complaint about a missing file is then better than one of the
    # hub.
    first = text.partition("/")[0]
    if os.path.isdir(first) or first.lower() in _FOLDERS or match[1].endswith(_FILES):
        return None
    return HubName(*match.groups())


def name_of(path: str) -> str:
    """Name with its commit of what lies in the hub's cache: any machine can fetch that; of anything else the path."""
    match = _SNAPSHOT.search(path)
    if match is None:
        return path
    return f"{match[2]}/{match[3]}@{match[4]}" + (f":{match[5]}" if match[5] else "")


def from_hub(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of a config in which names of the hub are replaced by what was downloaded, and a note for each.

    Of a model to start from, only its description and its tokenizer: `fetch_weights` has the rest.
    """
    # 1. The model's description and the tokenizer, which the config is read from; weights, which are large, are fetched
    # once the config is known to be right.
    changed: dict[str, Any] = {}
    notes: list[str] = []
    # Made-up tokens need no tokenizer: a dry run of a config that names one works without a network.
    described_by = {"load_hf": described} | ({} if given.get("mock_data") else {"tokenizer_model": tokenizer})
    for field, choose in described_by.items():
        if (name := hub_name(given.get(field) or "")) is not None:
            folder = fetch(name, "model", choose, flag=f"--{field.replace('_', '-')}")
            changed[field] = str(folder)
            notes.append(f"{field}: {name_of(str(folder))}, in {folder}")
    # 2. Data sets, of chats alone: .bin and .idx files are not read from the hub.
    if given.get("dataset_type") == "chat":
        for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            words = given.get(field) or ()
            if any(map(hub_name, words)):
                changed[field] = tuple(
                    path for word in words for path in data_files(word, field, is_alone=len(words) == 1)
                )
                notes.append(f"{field}: {' '.join(map(name_of, changed[field]))}")
    return changed, notes


def local_model(text: str | Path, *, flag: str) -> Path:
    """Folder of a model, downloaded if it is a name of the hub."""
    name = hub_name(str(text))
    return Path(text) if name is None else fetch(name, "model", whole, flag=flag)


def local_tokenizer(text: str | Path, *, flag: str = "--tokenizer-model") -> Path:
    """Path of a tokenizer, downloaded if it is a name of the hub."""
    name = hub_name(str(text))
    return Path(text) if name is None else fetch(name, "model", tokenizer, flag=flag)


def fetch_weights(load_hf: str | None) -> None:
    """Download the weights of a model whose description is in the hub's cache already."""
    # The path is that of a snapshot, which has the commit in it: the weights come from the same commit as the
    # description, also when the repository has changed since.
    name = None if load_hf is None else _NAME.fullmatch(name_of(load_hf))
    if name is not None and load_hf is not None and not _has_weights(Path(load_hf)):
        fetch(HubName(*name.groups()), "model", whole, flag="--load-hf")


def _has_weights(folder: Path) -> bool:
    """Whether a folder has all files of weights. The index of several is there before them, with the description."""
    try:
        files = {_WEIGHTS}
        if (folder / _INDEX).exists():
            files = set(read_json(folder / _INDEX, largest=_LARGEST_INDEX)["weight_map"].values())
        return all((folder / file).exists() for file in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # its reader says what is wrong with an index
        return True


def data_files(word: str, field: str, *, is_alone: bool) -> list[str]:
    """Files of a data set that the word of a data path names; UserError if it is not plain which."""
    name, flag = hub_name(word), f"--{field.replace('_', '-')}"
    if name is None:
        return [word]
    chosen: list[str] = []

    # Called with all names of the repository, in which the split or the file must be found. Where several paths are
    # given, each must be one file.
    def choose(files: Sequence[str]) -> list[str]:
        wanted = _of_split(files, field) if name.file is None else [file for file in files if file == name.file]
        if not wanted or (len(wanted) > 1 and not is_alone):
            candidates = [file for file in files if file.endswith(DATA)] or sorted(files)
            raise UserError(
                f"{flag} {word}: it is not plain which of its files is meant; name one of chats in JSON lines as "
                f"{name.repo}:FILE. It has {', '.join(candidates[:10])}{' and others' if len(candidates) > 10 else ''}"
            )
        chosen.extend(wanted)
        return wanted

    folder = fetch(name, "dataset", choose, flag=flag)
    return [str(folder / file) for file in sorted(set(chosen))]


def _of_split(files: Sequence[str], field: str) -> list[str]:
    """Files of JSON lines of one split, by their names; all, where no name says of which split it is."""
    lines = [file for file in files if file.endswith(DATA) and PurePosixPath(file).name != "dataset_infos.json"]
    by_split = {
        split: [file for file in lines if any(word in file.lower() for word in words)]
        for split, words in (("train", ("train",)), *SPLITS.items())
    }
    # Without any name of a split, all files are taken: none of them is meant for something else.
    if not any(by_split.values()):
        return lines
    return by_split.get(field, by_split["train"])


def tokenizer(files: Sequence[str]) -> list[str]:
    """Files of a tokenizer."""
    return [file for file in files if file in NAMES or re.fullmatch(rf"{TEMPLATES}/[^/]+\.jinja", file)]


def described(files: Sequence[str]) -> list[str]:
    """Files that describe a model, and those of its tokenizer; UserError without weights that can be read."""
    if _INDEX not in files and _WEIGHTS not in files:
        raise UserError(
            f"has no {_WEIGHTS}, and weights of other forms (.bin, .gguf) are not fetched, as a pickle runs code; "
            "take a repository with safetensors"
        )
    return [*tokenizer(files), *(name for name in (_CONFIG, _INDEX) if name in files)]


def whole(files: Sequence[str]) -> list[str]:
    """Files of a model with its weights."""
    weights = [file for file in files if _SHARD.fullmatch(file)] if _INDEX in files else [_WEIGHTS]
    return [*described(files), *weights]


def fetch(name: HubName, kind: RepoType, choose: Choose, *, flag: str) -> Path:
    """Folder of one commit of a repository in the hub's cache, with the chosen files. UserError with a way on."""
    # 1. The library, which only runs that name a repository need.
    spelled = "@".join(filter(None, (name.repo, name.revision)))
    try:
        import huggingface_hub as library  # only where a name asks for it
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise UserError(
            f"{flag} {spelled} does not exist here, and huggingface_hub, which would download it, is not installed: "
            f"pip install huggingface_hub, or {name.download} where it is, and name that folder"
        ) from error
    hub = Hub(library, constants, errors)
    # 2. Under the lock of the repository's record: the first rank asks and downloads, those that wait for it find the
    # answer in the record and the files in the cache.
    try:
        with _record(hub.cache / f".megatronish-{kind}--{name.repo.replace('/', '--')}.{os.getuid()}.json") as record:
            commit, files = _known(record, name) or _asked(hub, record, name, kind)
            try:
                wanted = choose(files)
            # `choose` either names the flag itself, or only says what is wrong with the repository.
            except UserError as error:
                raise UserError(str(error) if str(error).startswith("--") else f"{flag} {spelled} {error}") from error
            return _downloaded(hub, name, kind, commit, wanted)
    except UserError:
        raise
    # 3. Anything else is an error of the network, the hub or the disk, and becomes one sentence.
    except Exception as error:  # of the library, of the one that it sends requests with, and of the disk
        raise UserError(f"{flag} {spelled} {_why(error, hub, name, kind)}") from error


def _known(record: dict[str, Any], name: HubName) -> tuple[str, list[str]] | None:
    """Commit and files that need no question: of a pinned commit, or what another rank has asked."""
    # A commit never changes. A branch does: its answer counts only within one start, whose ranks must read the same
    # commit, and the next start asks again.
    answer, start = record.get(name.revision or ""), _start()
    if answer is None or not (COMMIT.fullmatch(name.revision or "") or (start and answer["start"] == start)):
        return None
    return answer["commit"], answer["files"]


def _start() -> list[str]:
    """What the ranks of one start on this machine have in common; nothing for a process that is no rank of several."""
    if not LAUNCHED & os.environ.keys():
        return []
    return [str(os.getppid()), *(os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))]


def _asked(hub: Hub, record: dict[str, Any], name: HubName, kind: RepoType) -> tuple[str, list[str]]:
    """Commit and files as the hub says them now; those that it said before if it cannot be reached."""
    key = name.revision or ""
    try:
        info = hub.library.HfApi(endpoint=hub.url).repo_info(
            name.repo, revision=name.revision, repo_type=kind, timeout=_TIMEOUT
        )
    except Exception as error:
        # Without a network a run continues with what an earlier one has seen. A refusal by the hub is not overruled in
        # this way.
        if not _is_outage(error, hub) or key not in record:
            raise
        return record[key]["commit"], record[key]["files"]
    answer = {"commit": info.sha, "files": _plain(file.rfilename for file in info.siblings or ()), "start": _start()}
    # Under the commit, too: whoever pins it later needs no question.
    record[key] = record[info.sha] = answer
    return info.sha, answer["files"]


def _plain(files: Iterable[str]) -> list[str]:
    """Names of files inside the repository."""
    return [file for file in files if not file.startswith("/") and ".." not in PurePosixPath(file).parts]


def _downloaded(hub: Hub, name: HubName, kind: RepoType, commit: str, files: Iterable[str]) -> Path:
    """The folder of a commit, with these files: those that are in the cache need no network."""
    wanted = sorted(set(files))
    if not wanted:
        raise UserError(f"{name.repo} has none of the files that are read here; name another repository")
    fetched_from = {"revision": commit, "repo_type": kind, "endpoint": hub.url, "cache_dir": hub.cache}
    with ThreadPoolExecutor(4) as threads:
        # Each file lies in the folder of the snapshot, as many levels below it as its name has slashes.
        paths = threads.map(lambda file: hub.library.hf_hub_download(name.repo, file, **fetched_from), wanted)
        for file, path in zip(wanted, paths, strict=True):
            folder = Path(path).parents[file.count("/")]
    return folder


@contextmanager
def _record(path: Path) -> Iterator[dict[str, Any]]:
    """What this user knows of a repository, {revision: commit and files}; other processes wait meanwhile.

    Users may share the cache. A record of another one, or a link to anything, is none, and costs a question.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The lock is a file of its own, as the record is replaced. It ends when the file is closed, after the download. A
    # file system without locks: the library has locks of its own.
    with locked(path.with_suffix(".lock")):
        try:
            record = parse_json(read_own(path, largest=_LARGEST_RECORD).decode())
        except (OSError, ValueError):
            record = None
        record = record if isinstance(record, dict) else {}
        before = json.dumps(record)
        yield record
        # Only reached without an error: nothing is kept of a question that failed.
        if json.dumps(record) != before:
            with suppress(OSError), AtomicFile(path) as file:
                file.file.write(json.dumps(record).encode())


def _is_outage(error: Exception, hub: Hub) -> bool:
    """Whether the hub did not answer, or not with sense."""
    # A ValueError is the library's for what cannot be a name, which no network changes. Any other error may pass.
    if isinstance(error, hub.errors.HfHubHTTPError):
        return _status(error) >= 500 or _status(error) == 429
    return not isinstance(error, ValueError)


def _status(error: Exception) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _why(error: Exception, hub: Hub, name: HubName, kind: RepoType) -> str:
    """What went wrong, and what to do, in half a sentence."""
    # The order counts: a gated repository is a RepositoryNotFoundError to the library, errors of HTTP are OSErrors, and
    # the hub says 401 for what does not exist and for what is private.
    errors, there = hub.errors, hub.url
    other = f"or download it elsewhere with: {name.download}, and name that folder"
    if isinstance(error, errors.GatedRepoError) or _status(error) == 403:
        return (
            f"may not be read without its owner's consent ({there}): accept its terms there, and set HF_TOKEN; {other}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"is not on {there}: {name.repo} has no revision {name.revision}; name another, or leave it out"
    if _status(error) == 401:
        return (
            f"does not exist here, and {there} has it not, or not for everyone; correct the name, or set HF_TOKEN to a "
            f"token that may read it; {other}"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.EntryNotFoundError) and _status(error):
        return f"does not exist here and is no {kind} of {there}; correct the name, or name a folder"
    if isinstance(error, errors.HFValidationError):
        return "does not exist here, and cannot be the name of a repository; correct it"
    if isinstance(error, OSError) and error.errno is not None and error.strerror and not _status(error):
        return f"cannot be kept in {hub.cache}: {error.strerror}; name another folder with HF_HOME"
    reason = f"status {_status(error)}" if _status(error) else type(error).__name__
    return f"does not exist here, and {there} cannot be asked for it ({reason}); {other.removeprefix('or ')}"
