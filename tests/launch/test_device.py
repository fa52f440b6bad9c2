"""Tests of the device of a rank: its index among the devices that its process sees, under each launcher."""

import pytest
import torch

from megatronish.errors import UserError
from megatronish.launch.device import choose_backend, choose_device, device_index
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
    assert choose_device("cpu", LOCAL) == torch.device("cpu")


def test_a_gpu_is_joined_by_nccl_and_its_tensors_on_the_cpu_by_gloo() -> None:
    assert choose_backend("auto", torch.device("cpu")) == "gloo"
    assert choose_backend("auto", torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert choose_backend("gloo", torch.device("cuda", 0)) == "gloo"
