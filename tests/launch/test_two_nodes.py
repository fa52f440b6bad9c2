"""Tests of two nodes: two torchrun agents, on loopback addresses of their own, train as one job."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import SECONDS, steps_of, tiny, train_on_ranks
from paths import ROOT

PRETRAIN = ROOT / "pretrain_gpt.py"
ADDRESSES = ("127.0.0.2", "127.0.0.3")


def _can_bind(address: str) -> bool:
    with socket.socket() as try_it:
        try:
            try_it.bind((address, 0))
        except OSError:
            return False
    return True


def _free_port(address: str) -> str:
    with socket.socket() as listener:
        listener.bind((address, 0))
        return str(listener.getsockname()[1])


@pytest.mark.sweep
@pytest.mark.skipif(not all(map(_can_bind, ADDRESSES)), reason="needs two loopback addresses; macOS has one")
def test_two_nodes_train_as_one_and_rank_zero_speaks_for_all(tmp_path: Path) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    environ = os.environ | {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two"]
    meeting.append(f"--rdzv-endpoint={ADDRESSES[0]}:{_free_port(ADDRESSES[0])}")
    # The folder is what the nodes share.
    argv = tiny(tmp_path / "run", "--pp 2 --exit-interval 3")
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *meeting, f"--local-addr={address}", str(PRETRAIN), *argv],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for address in ADDRESSES
    ]
    try:
        output, errors = zip(*(node.communicate(timeout=SECONDS) for node in nodes), strict=True)
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert [text.count("megatronish on 2 ranks") for text in output].count(1) == 1
    # A plain start on the same folder goes on, and both parts together are a run in one process.
    train_on_ranks(tiny(tmp_path / "run", "--pp 2"), world_size=2)
    train_on_ranks(tiny(tmp_path / "one"))
    one, two = steps_of(tmp_path / "one"), steps_of(tmp_path / "run")
    assert sorted(two) == [1, 2, 3, 4, 5, 6]
    for step, seen in one.items():
        assert two[step] == pytest.approx(seen, rel=1e-5)
