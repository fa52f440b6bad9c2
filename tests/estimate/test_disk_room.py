"""Tests of room on a local disk: a folder that cannot hold what is offloaded is refused before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import tiny
from machine_speed import units_of
from paths import ROOT

from megatronish.config.config import Config
from megatronish.config.read import read_config
from megatronish.core.errors import UserError
from megatronish.estimate import disk_room
from megatronish.estimate.costs.layout_costs import LayoutCosts, memory_of_stages
from megatronish.estimate.disk_room import (
    IN_MEMORY,
    bytes_on_this_machine,
    disk_lines,
    file_system_of,
    refuse_offload_folder,
)
from megatronish.launch.place import Place

ZERO = "--dp 2 --zero-stage 1 --optimizer-cpu-offload"


@pytest.fixture(autouse=True)
def local_disk(tmp_path: Path) -> None:
    """A reason to skip where temporary files lie in memory: the folder would be refused."""
    if (kind := file_system_of(tmp_path.resolve())) in IN_MEMORY:
        pytest.skip(f"{tmp_path} is on {kind}, which is no disk")


def refusal(folder: Path | str, flags: str = ZERO) -> str:
    config, _ = read_config(tiny(Path("never-written"), f"{flags} --offload-folder {folder}"))
    with pytest.raises(UserError) as error:
        refuse_offload_folder(config)
    return str(error.value)


def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """From now on tmp_path is a mount of this kind."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n")
    monkeypatch.setattr(disk_room, "file_system_of", lambda folder: file_system_of(folder, mounts))


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    on(monkeypatch, tmp_path, kind)
    said = refusal(tmp_path / "new" / "folder")
    assert f"is on {kind}, which is memory and no disk; name a folder on a local disk (NVMe)" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "lustre", "fuse.sshfs", "fuse.s3fs", "ceph", "9p"])
def test_a_file_system_over_a_network_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    on(monkeypatch, tmp_path, kind)
    assert f"is on {kind}, a file system over a network or of a program" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "overlay", "btrfs"])
def test_a_local_disk_is_taken_and_its_folder_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    on(monkeypatch, tmp_path, kind)
    folder = tmp_path / "new" / "folder"
    config, _ = read_config(tiny(tmp_path / "run", f"{ZERO} --offload-folder {folder}"))
    refuse_offload_folder(config)
    assert folder.is_dir() and not list(folder.iterdir())


def test_the_last_and_longest_mount_counts(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw\nb /data xfs rw\nbroken\nc /data/my\\040disk nfs rw\nd /data tmpfs rw\n")
    kinds = {"/etc": "ext4", "/database": "ext4", "/data/x": "tmpfs", "/data/my disk/y": "nfs"}
    assert {path: file_system_of(Path(path), mounts) for path in kinds} == kinds
    assert file_system_of(Path("/etc"), tmp_path / "absent") == ""


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert f"--offload-folder {file} is a file, and no folder; name another folder" in refusal(file)
    assert "cannot be written: Not a directory; make it writable, or name another folder" in refusal(file / "folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into every folder")
def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written: Permission denied" in refusal(tmp_path)


LARGE = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --ffn-hidden-size 49152"


def test_a_disk_without_room_is_refused_at_once(tmp_path: Path) -> None:
    """174 billion parameters of 12 bytes."""
    found: list[str] = []
    assert units_of(lambda: found.append(refusal(tmp_path, f"{ZERO} {LARGE}"))) < 3  # half a second of a slow core
    assert "free, and the 2 ranks of this machine keep 1.9 TiB of masters and optimizer states there; free " in found[0]
    assert found[0].endswith("name a larger disk, or use more machines")


def test_copies_for_saves_in_the_background_need_room_too(tmp_path: Path) -> None:
    said = refusal(tmp_path, f"{ZERO} {LARGE} --async-save --save-replicated-interval 5")
    assert "keep 5.7 TiB of masters and optimizer states with their copies for saves in the background there" in said


def test_a_start_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "run", f"{ZERO} {LARGE} --offload-folder {tmp_path}")
    code = (
        "import sys\nfrom megatronish.commands.pretrain import main\n"
        f"status = main({argv!r})\nprint(status, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["2", "False"], ended.stderr
    assert "of masters and optimizer states there" in ended.stderr


def test_ranks_of_this_machine_alone_count() -> None:
    """Stages 0 and 1 of two machines with two ranks each; the second has the head, whose table is a copy."""
    config, _ = read_config(tiny(Path("x"), f"{ZERO} --pp 2 --offload-folder /x --num-layers 4"))
    memory, layout = memory_of_stages(config, vocab_size=101), config.layout
    everyone, ranks = bytes_on_this_machine(memory, layout, None)
    first, of_first = bytes_on_this_machine(memory, layout, Place(1, 4, 1, 2))
    second, of_second = bytes_on_this_machine(memory, layout, Place(2, 4, 0, 2))
    assert (ranks, of_first, of_second) == (4, 2, 2)
    assert first + second == everyone and first > 0 and second > 0


def lines_of(config: Config, vocab_size: int) -> list[str]:
    costs = LayoutCosts.of(config, vocab_size=vocab_size, device="cuda", kernels=True)
    return disk_lines(costs, config.parallel, num_microbatches=config.num_microbatches, device="cpu", place=None)


def test_the_first_lines_say_what_lies_on_the_disk_and_what_a_step_costs() -> None:
    flags = f"{ZERO} {LARGE} --offload-folder /data --vocab-size 50257 --seq-length 2048"
    config, _ = read_config(tiny(Path("x"), flags))
    (line,) = lines_of(config, 50257)
    assert line == (
        "on the disk of /data: 1.9 TiB of 2 ranks of this machine; a step reads and writes 4.4 TiB, 8.1e+02 s at 6 GB/s"
    )
    alone, _ = read_config(tiny(Path("x"), ZERO))
    assert lines_of(alone, 101) == []
