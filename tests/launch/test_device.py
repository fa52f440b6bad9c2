"""Tests of the device of a rank: its index among the devices that its process sees, under each launcher."""

import contextlib
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import run_job, started, tiny
from sweeps import some_of

from megatronish.core.errors import UserError
from megatronish.launch.device import (
    ChosenDevice,
    VisibleDevices,
    allocator_note,
    choose_backend,
    choose_device,
    device_index,
)
from megatronish.launch.place import Place, place_from_environment

LOCAL = Place(rank=3, world_size=4, local_rank=3, local_world_size=4, rendezvous="file:///meet")
SLURM = {
    "SLURM_PROCID": "7",
    "SLURM_LOCALID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "a[1-2]",
    "SLURM_JOB_ID": "11",
}
TORCHRUN = {
    "RANK": "7",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a1",
    "MASTER_PORT": "4000",
}
BY_TORCHRUN = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}


def place_of(environ: dict[str, str]) -> Place:
    place = place_from_environment(environ)
    assert place is not None
    return place


@pytest.mark.parametrize("place", [LOCAL, place_of(SLURM), place_of(TORCHRUN), place_of(BY_TORCHRUN)])
@pytest.mark.parametrize("device_count", [4, 8])
def test_ranks_that_see_the_same_devices_take_them_in_order(place: Place, device_count: int) -> None:
    assert device_index("auto", place, device_count=device_count) == 3


@pytest.mark.parametrize("environ", [SLURM, TORCHRUN])
def test_a_task_that_is_shown_one_device_of_its_own_takes_that(environ: dict[str, str]) -> None:
    assert device_index("cuda", place_of(environ), device_count=1) == 0


@pytest.mark.parametrize("place", [LOCAL, place_of(BY_TORCHRUN)])
@pytest.mark.parametrize("device_count", [0, 1, 3])
def test_more_local_ranks_than_devices_are_refused(place: Place, device_count: int) -> None:
    sentence = f"with 4 ranks on this machine needs as many GPUs, and torch sees {device_count}; use fewer ranks, or "
    with pytest.raises(UserError, match=sentence):
        device_index("cuda", place, device_count=device_count)


@pytest.mark.parametrize("device_count", [0, 2, 3])
def test_tasks_of_slurm_with_too_few_devices_are_told_to_ask_for_them(device_count: int) -> None:
    sentence = (
        rf"torch sees {device_count}; ask for 4 GPUs a node, .*--gpus-per-task=1\), use fewer ranks, or --device cpu"
    )
    with pytest.raises(UserError, match=sentence):
        device_index("cuda", place_of(SLURM), device_count=device_count)


def test_the_cpu_is_shared_by_any_number_of_ranks() -> None:
    assert choose_device("cpu", LOCAL).device == torch.device("cpu")
    assert choose_device("auto", LOCAL, visible=sees(0)) == (torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("count", "gpus"), [(1, "1 GPU; for the GPU, use a layout of 1 rank "), (3, "3 GPUs; for .* of 3 ranks ")]
)
def test_auto_with_more_ranks_than_gpus_is_the_cpu_and_says_so(count: int, gpus: str) -> None:
    device, note = choose_device("auto", LOCAL, visible=sees(count))
    assert device == torch.device("cpu")
    assert re.match(f"device: the CPU, because 4 ranks need as many GPUs and this machine has {gpus}", note or "")
    with pytest.raises(UserError, match="device=cuda with 4 ranks on this machine needs as many GPUs"):
        choose_device("cuda", LOCAL, visible=sees(count))


def test_auto_with_a_gpu_for_each_rank_takes_them() -> None:
    assert choose_device("auto", LOCAL, visible=sees(4)) == (torch.device("cuda", 3), None)
    assert choose_device("auto", Place(), visible=sees(1)) == (torch.device("cuda", 0), None)


def agreed(places: list[Place], visible: list[VisibleDevices]) -> list[ChosenDevice | UserError]:
    """What ranks choose that agree in one store, each in a thread."""
    store = dist.HashStore()

    def choose(place: Place, sees: VisibleDevices) -> ChosenDevice | UserError:
        try:
            return choose_device("auto", place, store=store, visible=sees)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(choose, places, visible))


def on_one_machine(number: int) -> list[Place]:
    return [Place(rank, number, rank, number, "tcp://h:1", may_see_own_device=True) for rank in range(number)]


def test_ranks_that_see_different_devices_agree_on_one_kind() -> None:
    own = [sees(1, f"GPU-{rank}") for rank in range(4)]
    assert [each.device for each in chosen(agreed(on_one_machine(4), own))] == [torch.device("cuda", 0)] * 4
    cpu = chosen(agreed(on_one_machine(4), [*own[:3], sees(0)]))
    assert [each.device for each in cpu] == [torch.device("cpu")] * 4
    assert all(each.note for each in cpu)
    assert chosen(agreed(on_one_machine(2), [sees(0), sees(0)])) == [(torch.device("cpu"), None)] * 2


def test_ranks_that_are_shown_the_same_single_device_do_not_share_it() -> None:
    cpu = chosen(agreed(on_one_machine(2), [sees(1, "GPU-0"), sees(1, "GPU-0")]))
    assert [each.device for each in cpu] == [torch.device("cpu")] * 2


def test_on_several_machines_too_few_gpus_are_an_error_on_every_rank() -> None:
    places = [Place(rank, 4, rank % 2, 2, "tcp://h:1", may_see_own_device=True) for rank in range(4)]
    sights = [sees(2, "A"), sees(2, "B"), sees(2, "C"), sees(0)]
    sights = [
        VisibleDevices(each.count, lambda index, rank=rank: f"GPU-{rank}-{index}") for rank, each in enumerate(sights)
    ]
    for answer in agreed(places, sights):
        assert isinstance(answer, UserError)
        assert "device=auto: 1 of 4 ranks have no GPU of their own" in str(answer)


def chosen(answers: list[ChosenDevice | UserError]) -> list[ChosenDevice]:
    assert not any(isinstance(answer, UserError) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, ChosenDevice)]


def sees(count: int, identity: str | None = None) -> VisibleDevices:
    """A process that sees `count` devices."""
    return VisibleDevices(count, lambda _index: identity)


def show_devices(count: int, environ: dict[str, str]) -> None:
    """Plant: torch sees `count` devices. None of them can be used, so a run that tries fails."""
    torch.cuda.is_available = lambda: count > 0
    torch.cuda.device_count = lambda: count
    torch.cuda.get_device_properties = lambda _index: None  # type: ignore[assignment,return-value]
    os.environ.update(environ)


@pytest.mark.parametrize("count", some_of([1, 3], [1]))
def test_a_run_on_a_machine_with_too_few_gpus_goes_to_the_cpu_with_a_line(tmp_path: Path, count: int) -> None:
    argv = tiny(tmp_path / "run", "--tp 2 --pp 2 --device auto --exit-interval 2")
    for more in (["--dry-run"], []):
        done = run_job([*argv, *more], tmp_path, plant=show_devices, plant_args=(count, {}))
        assert done.status == 0, done.errors
        assert done.output.count("note: device: the CPU, because 4 ranks need as many GPUs and this machine has") == 1
        assert ", device cpu, " in done.output


def test_ranks_of_another_launcher_agree_on_the_cpu(tmp_path: Path) -> None:
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "31399"}
    argv = tiny(tmp_path / "run", "--tp 2 --device auto --exit-interval 2")
    with contextlib.ExitStack() as stack:
        jobs = []
        for rank, count in enumerate((2, 0)):
            own = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            jobs.append(stack.enter_context(started(argv, tmp_path, plant=show_devices, plant_args=(count, own))))
        assert [job.wait() for job in jobs] == [0, 0], [job.told for job in jobs]
        assert "note: device: the CPU, because 2 ranks need as many GPUs" in jobs[0].output


def test_a_port_that_is_in_use_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = run_job(tiny(tmp_path / "run", "--tp 2"), tmp_path, plant=show_devices, plant_args=(0, own))
    assert done.status == 1
    sentence = f"rank 0 failed: the ranks cannot meet at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: "
    assert sentence in done.errors
    assert "if the port is in use, export another MASTER_PORT" in done.errors
    assert "Traceback" not in done.errors


def test_cuda_with_too_few_gpus_stays_an_error(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "run", "--tp 2 --device cuda")
    done = run_job(argv, tmp_path, plant=show_devices, plant_args=(1, {}))
    assert done.status == 2
    assert "device=cuda with 2 ranks on this machine needs as many GPUs, and torch sees 1" in done.errors


def test_a_gpu_is_joined_by_nccl_and_its_tensors_on_the_cpu_by_gloo() -> None:
    assert choose_backend("auto", torch.device("cpu")) == "gloo"
    assert choose_backend("auto", torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert choose_backend("gloo", torch.device("cuda", 0)) == "gloo"
    with pytest.raises(UserError, match=r"distributed_backend=nccl needs a GPU for every rank, .*; leave it out"):
        choose_backend("nccl", torch.device("cpu"))


def test_expandable_segments_are_advised_where_the_allocator_is_as_torch_sets_it() -> None:
    assert "expandable_segments:True" in (allocator_note({}) or "")
    assert allocator_note({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}) is None
    assert allocator_note({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) is None
