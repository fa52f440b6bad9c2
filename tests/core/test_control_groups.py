"""Tests of the memory that control groups leave to a process, of both versions."""

import math
from pathlib import Path

from megatronish.core.control_groups import bytes_within_limits


def test_the_first_limit_of_a_group_or_of_one_around_it_counts(tmp_path: Path) -> None:
    own_groups, groups = tmp_path / "own", tmp_path / "groups"
    assert bytes_within_limits(groups, own_groups) == math.inf
    inner = groups / "memory" / "job" / "step"
    inner.mkdir(parents=True)
    own_groups.write_text("3:cpu,memory:/job/step\n2:freezer:/\n0::/pod\n")
    (inner / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (inner / "memory.usage_in_bytes").write_text("10\n")
    (inner / "memory.stat").write_text("total_inactive_file 5\n")
    for name, text in (("limit_in_bytes", "300"), ("usage_in_bytes", "120"), ("stat", "total_inactive_file 20")):
        (inner.parent / f"memory.{name}").write_text(text)
    assert bytes_within_limits(groups, own_groups) == 200
    (groups / "pod").mkdir()
    for name, text in (("max", "max"), ("current", "120"), ("stat", "inactive_file 20\nfile 90")):
        (groups / "pod" / f"memory.{name}").write_text(text)
    assert bytes_within_limits(groups, own_groups) == 200
    (groups / "pod" / "memory.max").write_text("150\n")
    assert bytes_within_limits(groups, own_groups) == 50
    (groups / "pod" / "memory.max").write_text("60\n")
    assert bytes_within_limits(groups, own_groups) == 0
