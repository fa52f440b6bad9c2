"""Dry run of one rank: the real engine is built, and takes a real step, on tensors without memory."""

import time
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatronish.config.config import Config
from megatronish.data.collate import Collator
from megatronish.data.loader import BatchShare, micro_batches
from megatronish.data.mock import MockSamples
from megatronish.dry_run.cuda_calls import answered_for
from megatronish.dry_run.ledger import Ledger
from megatronish.dry_run.recorder import Recorder
from megatronish.launch.place import Place
from megatronish.mesh import Axis, Mesh, leave
from megatronish.train.build import build_engine


def run_rank(config: Config, rank: int, *, vocab_size: int, eod: int, device_type: str) -> Recorder:
    start = time.perf_counter()
    size = config.layout.world_size
    ledger = Ledger(device_type)
    recorder = Recorder(ledger, number=2, references={})
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with answered_for(device_type, recorder.wait):
        mesh = Mesh.of(config.parallel, Place(rank, size, 0, 1), device=device, backend="fake",
            has_experts=config.model.num_experts is not None, store=FakeStore())
        mesh = replace(mesh, checkpoint_axis=Axis("checkpoint"))
        print("mesh", time.perf_counter() - start)
        share = BatchShare(mesh.dp.rank, mesh.dp.size, config.training.micro_batch_size)
        samples = MockSamples(name="mock", seq_length=config.training.seq_length, seed=1, vocab_size=vocab_size, eod=eod)
        batches = micro_batches(samples, consumed_samples=0, global_batch_size=config.global_batch_size, share=share,
            collate=Collator.of(config.data, eod=eod))
        with fake, recorder.watching():
            ledger.begin("build")
            engine = build_engine(config, mesh, vocab_size=vocab_size, initialises=False)
            print("build", time.perf_counter() - start, ledger.held, ledger.peak)
            recorder.begin_part("step")
            ledger.begin("step")
            engine.step([each.pinned() for each in batches], num_steps_done=0, learning_rate=1e-3, weight_decay=0.1)
        print("step", time.perf_counter() - start, ledger.peak)
    leave()
    return recorder
