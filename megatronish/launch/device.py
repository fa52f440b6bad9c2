"""The device of a rank and the torch.distributed backend that goes with it."""

import torch
import torch.distributed as dist

from megatronish.errors import UserError
from megatronish.launch.place import Place


def choose_device(wanted: str, place: Place) -> torch.device:
    """The CPU, or a CUDA device of this rank's own, made current; `wanted` is "auto", "cpu" or "cuda"."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", device_index(wanted, place, device_count=count))
    torch.cuda.set_device(device)
    return device


def device_index(wanted: str, place: Place, *, device_count: int) -> int:
    """The index, among the `device_count` devices that this process sees, of the rank's own device.

    Ranks that see the same devices take them in order. SLURM can also show each task one device of its own
    (`--gpus-per-task=1`, `--gpu-bind=single:1`), which every task then calls number 0. UserError for too few devices.
    """
    if place.local_world_size <= device_count:
        return place.local_rank
    if device_count == 1 and place.may_see_own_device:
        return 0
    remedy = "use fewer ranks, or --device cpu"
    if place.may_see_own_device:
        number = place.local_world_size
        remedy = (
            f"ask for {number} GPUs a node, all of them shown to every task (srun --gpus-per-node={number}) or one "
            f"to each (srun --gpus-per-task=1), {remedy}"
        )
    raise UserError(
        f"device={wanted} with {place.local_world_size} ranks on this machine needs as many GPUs, and torch sees "
        f"{device_count}; {remedy}"
    )


def choose_backend(wanted: str, device: torch.device) -> str:
    """The backend argument of `init_process_group`: a device's own backend, and gloo for tensors on the CPU.

    UserError for a name that neither torch nor a plug-in knows.
    """
    name = wanted
    if wanted == "auto":
        name = "nccl" if device.type == "cuda" else "gloo"
    if name not in dist.Backend.backend_list:
        known = ", ".join(sorted(set(dist.Backend.backend_list) - {"undefined"}))
        raise UserError(f"distributed_backend={wanted} is none that this torch knows; it knows {known}")
    return name if name == "gloo" or device.type == "cpu" else f"cpu:gloo,{device.type}:{name}"
