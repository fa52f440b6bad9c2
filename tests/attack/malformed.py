r"""Malformed files, flags, environments and places, each in a real command, with a table.

Every input must end with a sentence and status 2 (a mistake) or 1 (the machine), or be read rightly; never with a
traceback, words of a library, another status, a signal, or not within 20 s. What is damaged beyond doubt may not be
accepted at all.

    PYTHONPATH=.:tests/support:tests/launch:tests/compat \
        python tests/attack/malformed.py --inputs 1000 --seed 1 [--minutes 4] [KIND ...]
"""

import argparse
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import inputs
from forked import Child, Ended, import_all
from hostile import HOSTILE
from hostile_files import HOSTILE_FILES
from hostile_values import CANARY, PASSWORD
from inputs import Good, Input
from results import Result, publish

from megatronish.train.folder import last_step

ALL_HOSTILE = {**HOSTILE, **HOSTILE_FILES}
KINDS = {**inputs.KINDS, **ALL_HOSTILE}
LIMIT = 20.0
CHILDREN = 2  # at a time
RAW = re.compile(
    r"Traceback \(most recent|^\w*(Error|Exception|Warning)\b: |terminate called|\[enforce fail|pybind11"
    r"|Segmentation fault|MemoryError|object has no attribute|unexpected keyword|rank \d+ failed: killed by",
    re.MULTILINE,
)
"""What only a library, or a bug of ours, says."""


def verdict(kind: str, case: Input, ended: Ended, logs: str) -> str:
    """Empty if the input ended as it should, else what is wrong."""
    if (case.command.folder / CANARY).exists():
        return "CODE ran"
    if PASSWORD in ended.errors + ended.output + logs + written(case.command.folder / "run"):
        return "PASSWORD shown"
    if case.check is not None and (wrong := case.check(ended)):
        return wrong
    if ended.status is None:
        # A changed number can make a sound run a long one.
        return "" if last_step(case.command.folder / "run" / "metrics.jsonl") > 3 else "HANG"
    if ended.status < 0 or ended.status > 2 or (ended.status == 1 and kind in ALL_HOSTILE):
        return f"STATUS {ended.status}"
    if match := RAW.search(ended.errors + ended.output + logs):
        return "TRACEBACK" if match[0].startswith("Traceback") else f"RAW {match[0]!r}"
    if ended.status == 0:
        return "ACCEPTED" if case.must_fail else ""
    said = ended.errors.strip()
    return "" if len(said.split()) >= 4 or (case.is_silent and not said) else "NO SENTENCE"


def written(run: Path) -> str:
    """Texts in a run folder that describe the run."""
    files = [path for end in ("*.toml", "*.json", "*.jsonl", "*.txt") for path in run.rglob(end) if path.is_file()]
    return "".join(path.read_bytes()[: 1 << 20].decode(errors="replace") for path in files if not path.is_symlink())


def main() -> int:
    """Run as many inputs as asked for, kind after kind; 1 if one ended wrongly."""
    parser = argparse.ArgumentParser(description="malformed inputs")
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--each", type=int, help="so many inputs of each kind, in the place of --inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="no input after that")
    parser.add_argument("--show", action="store_true", help="print what every input said")
    parser.add_argument("--only", type=int, help="the input of this number alone")
    parser.add_argument("--hostile", action="store_true", help="the kinds of hostile.py and hostile_files.py alone")
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}")
    args = parser.parse_args()
    wanted = args.kinds or (ALL_HOSTILE if args.hostile else inputs.KINDS)
    kinds = [kind for kind in KINDS if kind in wanted]
    until = time.monotonic() + 60 * args.minutes
    numbers = range(args.inputs if args.each is None else args.each * len(kinds))
    counts = {kind: Counter[str]() for kind in kinds}
    print(f"seed {args.seed}; an input is made again with --seed {args.seed} --only NUMBER KIND ...")
    with tempfile.TemporaryDirectory(prefix="malformed-") as name:
        folder = Path(name)
        import_all()
        good = inputs.make_good(folder / "good")
        running: dict[Child, tuple[Input, str, int]] = {}
        waiting = iter(numbers if args.only is None else [args.only])
        is_more = True
        while running or is_more:
            while is_more and len(running) < CHILDREN:
                number = next(waiting, None)
                is_more = number is not None and time.monotonic() < until
                if number is not None and is_more:
                    kind = kinds[number % len(kinds)]
                    case = _input(kind, good, folder / str(number), random.Random(f"{args.seed} {kind} {number}"))
                    running[Child(case.command, limit=LIMIT)] = case, kind, number
            time.sleep(0.005)
            for child in list(running):
                if (ended := child.ended()) is not None:
                    case, kind, number = running.pop(child)
                    _tell(case, kind, number, ended, counts, shows=args.show)
                    shutil.rmtree(case.command.folder, ignore_errors=True)
    return _end(counts, "malicious inputs" if args.hostile else "malformed inputs")


def _input(kind: str, good: Good, folder: Path, numbers: random.Random) -> Input:
    folder.mkdir()
    return KINDS[kind](good, folder, numbers)


def _tell(case: Input, kind: str, number: int, ended: Ended, counts: dict[str, Counter[str]], *, shows: bool) -> None:
    logs = "".join(log.read_text(errors="replace") for log in case.command.folder.rglob("logs/rank_*.log"))
    wrong = verdict(kind, case, ended, logs)
    counts[kind][wrong.split()[0] if wrong else "sentence" if ended.status else "read"] += 1
    if wrong or shows:
        argv = " ".join(map(repr, case.command.argv))[:1500]
        print(f"{wrong or 'ok'}: {kind} {number}: {case.what[:300]} ({ended.seconds:.1f} s, status {ended.status})")
        print(f"    {dict(case.command.environ)} {argv}\n    {(ended.errors + logs).strip()[-1500:]}", flush=True)


def _end(counts: dict[str, Counter[str]], attack: str) -> int:
    good, bad = (
        ("sentence", "read"),
        sorted({word for count in counts.values() for word in count} - {"sentence", "read"}),
    )
    print(f"{'kind':24}" + "".join(f"{word:>12}" for word in (*good, *bad)))
    for kind, count in counts.items():
        print(f"{kind:24}" + "".join(f"{count[word]:12}" for word in (*good, *bad)))
    total = sum(counts.values(), Counter())
    failed = sum(total[word] for word in bad)
    told = ", ".join(f"{total[word]} {word.lower()}" for word in bad)
    measured = f"{total['sentence']} ended with a sentence, {total['read']} were read{'; ' + told if told else ''}"
    return publish(Result(attack, total.total(), failed, measured))


if __name__ == "__main__":
    sys.exit(main())
