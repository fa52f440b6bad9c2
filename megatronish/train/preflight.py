"""Comparison of a run's ranks before its first step: config and data, and what estimate/links/preflight.py compares."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from megatronish.checkpoint.folder import find_checkpoint
from megatronish.config.config import Config
from megatronish.config.dump import resolved
from megatronish.config.plugins import import_plugins
from megatronish.core.errors import UserError, without_passwords
from megatronish.core.layout import ExpertLayout, Layout
from megatronish.core.names import OPTIMIZER_NAMES
from megatronish.core.remote import is_url, location
from megatronish.estimate.costs.layout_costs import memory_of_stages
from megatronish.estimate.costs.parameters import num_parameters
from megatronish.estimate.links.facts import UNREADABLE, Facts, Needs, nested_facts
from megatronish.estimate.links.preflight import Subject, preflight
from megatronish.launch.device import choose_backend, choose_device, meeting_store
from megatronish.launch.place import Place
from megatronish.launch.rendezvous import refuse_addresses
from megatronish.ops.library import fuses_dropout
from megatronish.parallel.mesh import Mesh, leave
from megatronish.specs.costs import DeviceType
from megatronish.train.setup import TrainingJob


def preflight_run(config: Config, notes: Sequence[str], place: Place) -> int:
    """Compare the ranks of a run; rank 0 prints. The exit status: 0 if all are ready, 1 if one is not."""
    import_plugins(config.plugins.plugin)
    parallel = config.parallel
    refuse_addresses()
    store = meeting_store(place, timeout_minutes=parallel.distributed_timeout_minutes)
    device, note = choose_device(parallel.device, place, store=store)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = choose_backend(parallel.distributed_backend, device)
    # No axis of the layout yet: ranks may disagree about it.
    mesh = Mesh.start(
        Layout(dp=place.world_size),
        rank=place.rank,
        init_method=place.rendezvous,
        store=store,
        device=device,
        backend=backend,
        timeout_minutes=parallel.distributed_timeout_minutes,
        lines=(),
    )
    if mesh.is_main:
        for each in [*notes, *([] if note is None else [note])]:
            print(f"note: {each}")
    data, needs = _opened(config, mesh)
    experts = ExpertLayout() if config.model.num_experts is None else parallel.expert_layout
    facts = nested_facts(resolved(config), "config") | data
    disk = config.run_dir if is_url(config.save_place) else Path(config.save_place)
    status = preflight(Subject(facts, config.layout, experts, disk, needs), mesh, backend=backend)
    leave()
    return status


def _opened(config: Config, mesh: Mesh) -> tuple[Facts, Needs]:
    """Facts of the data as this rank sees them, and what the run needs. What cannot be read is a fact, too."""
    facts: Facts = {}
    try:
        newest = find_checkpoint(location(config.save_place))
        facts["data newest checkpoint"] = newest.name if newest else "none"
        job = TrainingJob.open(config, mesh)
    except (UserError, OSError) as error:
        return facts | {"data train": f"{UNREADABLE} ({without_passwords(str(error))})"}, Needs()
    splits = job.datasets
    sets = {"train": splits.train, **splits.valid, **({} if splits.test is None else {"test": splits.test})}
    # An identity is a checksum of lengths, contents and order.
    facts |= {f"data {name}": hashlib.sha256(each.identity.encode()).hexdigest()[:16] for name, each in sets.items()}
    facts |= {f"data {name}": str(job.facts[name]) for name in ("vocab_size", "eod")}
    return facts, _needs(config, job.vocab_size, mesh.device)


def _needs(config: Config, vocab_size: int, device: torch.device) -> Needs:
    """Bytes of a checkpoint (fp32 values and their moments), and of the fullest stage."""
    model, training = config.model, config.training
    moments = 0 if config.checkpoint.no_save_optim else OPTIMIZER_NAMES[config.optimizer.optimizer].moments
    number = num_parameters(model, vocab_size=vocab_size, seq_length=training.seq_length)
    device_type: DeviceType = "cpu" if device.type == "cpu" else "cuda"
    expected = memory_of_stages(config, vocab_size=vocab_size, device=device_type, kernels=fuses_dropout(device_type))
    disk = 0 if config.adapter.is_used else 4 * number * (1 + moments)
    memory = max(each.total + (each.host if device.type == "cpu" else 0) for each in expected)
    return Needs(disk, memory)
