"""Preprocessing in tasks for tests: inputs of each kind, plans, runs, what one process writes, and kills."""

import gzip
import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatronish.core.remote import Location
from megatronish.data.indexed import bin_path, idx_path
from megatronish.data.preprocess import preprocess
from megatronish.data.shards import join_shards
from megatronish.data.tasks import Plan, TaskRun, make_plan, shards_of, tokenizer_digest, whole_result
from megatronish.tokenizer.plain import BytesTokenizer

SETTINGS = {
    "json_keys": ["text"],
    "append_eod": True,
    "split_sentences": False,
    "strict": False,
    "max_bad_fraction": 0.9,
    "plugin": [],
}
DIGEST = tokenizer_digest(BytesTokenizer(), [])


def lines_of(seed: int, number: int) -> list[str]:
    """Lines as they are found: documents short and long, empty ones, blank lines, bad ones."""
    draw = random.Random(seed)
    made = []
    for place in range(number):
        kind = draw.random()
        text = "é" * draw.randrange(3) + f"{seed} {place} " * draw.choice([0, 1, 5, 200])
        made.append("" if kind < 0.1 else '{"txt": 1}' if kind < 0.2 else json.dumps({"text": text, "n": place}))
    return made


def inputs_of(folder: Path) -> list[Path]:
    """Files of each kind, among them one that holds nearly all bytes, one without a last newline, and an empty one."""
    folder.mkdir()
    files = {
        "a.jsonl": "\n".join(lines_of(1, 400)).encode(),
        "b.jsonl.gz": gzip.compress("\n".join(lines_of(2, 300)).encode(), mtime=0),
        "c.jsonl": ("\ufeff" + "\r\n".join(lines_of(3, 30))).encode(),
        "d.json": json.dumps([{"text": f"element {number}"} for number in range(50)]).encode(),
        "e.jsonl": b"",
        "f.jsonl": b'{"text": "' + b"long " * 2000 + b'"}\n\n\n',
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


def run_of(**changes: Any) -> TaskRun:
    settings = {"tokenizer": BytesTokenizer, "digest": DIGEST, "workers": 1, "on_bad_line": lambda _line: None}
    return TaskRun(**{**settings, "on_progress": lambda _summary, _num_bytes: None, **changes})


def plan_of(prefix: Path, files: Sequence[Location], num_tasks: int, **changes: Any) -> Plan:
    return make_plan(str(prefix), files, num_tasks=num_tasks, settings={**SETTINGS, **changes}, tokenizer=DIGEST)


def joined(plan: Plan) -> tuple[bytes, bytes]:
    shards = [shards_of(plan, record)[0] for record in whole_result(plan)]
    (name,) = plan.names(plan.prefix)
    join_shards(shards, name, on_bytes=lambda _number: None)
    return bin_path(name).read_bytes(), idx_path(name).read_bytes()


def in_one(prefix: Path, files: list[Path], bad: list[str] | None = None) -> tuple[bytes, bytes]:
    """What one process writes of all files."""
    told = [] if bad is None else bad
    preprocess(files, str(prefix), tokenizer=BytesTokenizer, append_eod=True, on_bad_line=told.append)
    name = f"{prefix}_text_document"
    return bin_path(name).read_bytes(), idx_path(name).read_bytes()


def in_child(work: Callable[[], object]) -> int:
    """Status of a copy of this process that does the work: 0, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Whether a child was killed before its `step`-th call that changes files; else it has done all of the work."""

    left = [step]

    def before(of: Callable[..., Any], *args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return of(*args, **options)

    def planted() -> None:
        for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, partial(before, getattr(os, name)))
        work()

    return in_child(planted) == signal.SIGKILL
