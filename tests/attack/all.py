"""All attacks, one after the other, and one table of what they found at the end.

Sizes are environment variables: ATTACK_KILLS (200), ATTACK_INPUTS (1000), ATTACK_HOSTILE (571),
ATTACK_HOSTS (6, lost in each layout with
copies nearby), ATTACK_WORKERS (20, killed under torchrun), ATTACK_STEPS (1000, without a slow rank), ATTACK_SEED (1).
ATTACK_ONLY names scripts of this folder, separated by blanks; without it all of them run.

    make attack
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import RESULTS, Result, published, table

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SCRIPTS = {"malicious": "malformed"}
PATH = os.pathsep.join(map(str, [ROOT, *(ROOT / "tests" / name for name in ("support", "attack", "launch", "compat"))]))
"""Where the scripts find the package, and the helpers and tables of the tests."""


def size(name: str, usual: int) -> str:
    """The value of a variable, or the usual one."""
    return os.environ.get(f"ATTACK_{name}", str(usual))


def commands() -> dict[str, list[str]]:
    """The scripts with their arguments."""
    seed = ["--seed", size("SEED", 1)]
    found = {
        "kills": ["--kills", size("KILLS", 200), *seed],
        "malformed": ["--inputs", size("INPUTS", 1000), *seed],
        "malicious": ["--hostile", "--inputs", size("HOSTILE", 571), *seed],
        "hangs_sweep": [],
        "flips": seed,
        "nearby_kills": [size("HOSTS", 6)],
        "torchrun_kills": [size("WORKERS", 20)],
        "slow_ranks": ["--steps", size("STEPS", 1000), *seed],
        "overhead": [],
    }
    if os.getuid() == 0 and subprocess.run(["ip", "netns", "list"], capture_output=True, check=False).returncode == 0:
        found["elastic_hosts"] = []
    wanted = os.environ.get("ATTACK_ONLY", "").split()
    return {name: words for name, words in found.items() if not wanted or name in wanted}


def environment(results: Path) -> dict[str, str]:
    """The environment of a script: it finds the package and the helpers of the tests."""
    return os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", RESULTS: str(results)}


def main() -> int:
    """Run them; 1 if one of them failed."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        results, failed = Path(folder) / "results", []
        for name, words in commands().items():
            start, before = time.monotonic(), len(published(results))
            print(f"\n==== {name} {' '.join(words)}", flush=True)
            command = [sys.executable, str(FOLDER / f"{SCRIPTS.get(name, name)}.py"), *words]
            status = subprocess.run(command, env=environment(results), check=False).returncode
            print(f"==== {name}: status {status} after {time.monotonic() - start:.0f} s", flush=True)
            if status:
                failed.append(name)
            if len(published(results)) == before:
                lost = Result(name, 1, int(status != 0), f"status {status}")
                print(lost.line)
        print(f"\n{table(published(results))}")
        if failed:
            print(f"failed: {', '.join(failed)}")
        return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
