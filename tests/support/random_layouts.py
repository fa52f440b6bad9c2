"""Random layouts, models and features: expected peaks of memory and bytes by axis against dry runs.

    PYTHONPATH=.:tests/support python tests/support/random_layouts.py --cases 100 --seed 1

What the cases of dry_cases.py are made of, dealt at random over layouts of up to 32 ranks and models of other depths,
widths, lengths and vocabularies. A line for each case that is more than 5 % from the expected peak or has other bytes
than the formulas, and the shares at the end. MEGATRONISH_KERNELS=0 is for models without fused operators.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from itertools import product
from typing import Any

from dry_cases import CHUNKS, Case, choices
from paths import ROOT, TESTS

from megatronish.core.layout import Layout

LAYOUTS = [
    Layout(dp=dp, tp=tp, pp=pp, cp=cp)
    for dp, tp, pp, cp in product((1, 2, 3, 4, 8), (1, 2, 4), (1, 2, 3, 4), (1, 2, 4))
    if dp * tp * pp * cp <= 32
]
NEAR, MOST = 0.05, 0.10
SECONDS = 300.0


def random_case(numbers: random.Random) -> tuple[Case, list[str]]:
    """A case and flags that its command line has last."""
    layout = numbers.choice(LAYOUTS)
    chosen = {feature: numbers.choice(values) for feature, values in choices(layout).items()}
    chosen["kernels"] = os.environ.get("MEGATRONISH_KERNELS", "assumed")
    case = Case(layout, chosen)
    layers = layout.pp * CHUNKS.get(chosen["schedule"] or "", 1) * numbers.choice((1, 2, 3, 5))
    width = 1040 if chosen["state"] == "padded" else numbers.choice((512, 1024, 2048))
    flags = (
        f"--num-layers {layers} --hidden-size {width} --kv-channels 64 --seq-length {numbers.choice((256, 1024, 2048))}"
    )
    return case, f"{flags} --vocab-size {numbers.choice((2000, 32000, 64000))}".split()


def dry_run(case: Case, flags: list[str]) -> dict[str, Any]:
    """What the dry run of the case's rank reports, or how it failed."""
    path = os.pathsep.join([str(ROOT), str(TESTS / "support")])
    environment = {"MEGATRONISH_KERNELS": "assumed"} | os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(TESTS / "support" / "dry_runs.py"), "argv", str(case.rank), *case.argv, *flags]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {SECONDS:g} s"}
    lines = ended.stdout.splitlines()
    report: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": ended.stderr[-400:]}
    return report


def main() -> int:
    """Run the cases; 1 if fewer are near than there should be."""
    parser = argparse.ArgumentParser(description="random layouts against dry runs")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    numbers, errors, refused, num_other = random.Random(arguments.seed), [], 0, 0
    while len(errors) < arguments.cases:
        case, flags = random_case(numbers)
        name, report = f"{case.name} {' '.join(flags)}", dry_run(case, flags)
        if "error" in report:
            refused += 1
            if "ConfigError" not in report["error"]:
                print(f"FAILED {name}: {report['error'].strip().splitlines()[-1:]}", flush=True)
            continue
        errors.append(report["peak_bytes"] / report["expected_memory"]["total"] - 1)
        sent, wanted = (
            {f"{each['axis']} {each['collective']}": each[key] for each in report["traffic"]}
            for key in ("bytes", "expected")
        )
        other = ", OTHER BYTES" if sent != wanted | report["expected_only"] else ""
        num_other += bool(other)
        if abs(errors[-1]) > NEAR or other:
            print(f"{errors[-1]:+.1%} of {report['peak_bytes'] / 2**20:,.0f} MiB{other}: {name}", flush=True)
    near, within = (sum(abs(error) <= bound for error in errors) for bound in (NEAR, MOST))
    found = f"{near} within 5 %, {within} within 10 %, {num_other} with other bytes"
    print(f"{len(errors)} layouts: {found}; {refused} refused by a rule of the config")
    return int(near < 0.95 * len(errors) or within < len(errors) or num_other > 0)


if __name__ == "__main__":
    sys.exit(main())
