"""Hosts that come and go under torchrun, as network namespaces.

Three hosts train with dp 3; one is cut off (its link goes down), and the run continues with dp 2; the host comes back,
and the run continues with dp 3. The losses must be those of an undisturbed run, to 1e-5. The store of the agents is on
the first host, which stays.

    PYTHONPATH=.:tests/support python tests/attack/elastic_hosts.py (Linux, root)
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jobs import steps_of, tiny, train_on_ranks
from results import Result, publish

from megatronish.train.folder import last_step

ROOT = Path(__file__).parents[2]
NET, PORT, STEPS = "10.211.77", 29411, 60
PREFIX = "megatronish"
FLAGS = f"--global-batch-size 12 --save-interval 2 --keep-last 3 --train-iters {STEPS} --num-workers 0"


def run(*words: str) -> None:
    subprocess.run(words, check=True)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Network namespaces on one bridge."""
    names = [f"{PREFIX}{number}" for number in range(1, count + 1)]
    run("ip", "link", "add", PREFIX, "type", "bridge")
    try:
        run("ip", "link", "set", PREFIX, "up")
        for number, name in enumerate(names, start=1):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"v{name}"[:15], "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", f"v{name}"[:15], "master", PREFIX)
            run("ip", "link", "set", f"v{name}"[:15], "up")
            for words in (("addr", "add", f"{NET}.{number}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                run("ip", "-n", name, *words)
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
        subprocess.run(["ip", "link", "del", PREFIX], check=False)


def agent(number: int, name: str, folder: Path) -> subprocess.Popen[bytes]:
    """torchrun on a host."""
    conf = f"is_host={int(number == 1)},last_call_timeout=3"
    torchrun = ["-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=5"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={NET}.1:{PORT}", f"--rdzv-conf={conf}", "--rdzv-id=elastic"]
    torchrun += [f"--local-addr={NET}.{number}", "--monitor-interval=0.5"]
    flags = tiny(folder / "run", f"{FLAGS} --hang-seconds 8 --hang-seconds-start 60")
    plugin = ["--plugin", str(ROOT / "tests/attack/slow_steps.py"), "--hook", "slow_steps"]
    command = ["ip", "netns", "exec", name, sys.executable, *torchrun, str(ROOT / "pretrain_gpt.py"), *flags, *plugin]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    # torch 2.13: else an agent that joins a later round waits for an address that is written in the first one alone.
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    log = (folder / f"host_{number}_{time.monotonic():.0f}").open("w")
    return subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)


def wait_for_step(metrics: Path, step: int, agents: list[subprocess.Popen[bytes]], *, seconds: float = 90.0) -> float:
    """Seconds until the run has made this step; AssertionError if it does not."""
    start = time.monotonic()
    while last_step(metrics) < step:
        assert time.monotonic() - start < seconds, f"step {step} was not made within {seconds:g} s"
        assert agents[0].poll() is None or last_step(metrics) >= step, "the first agent has ended"
        time.sleep(0.1)
    return time.monotonic() - start


def main() -> int:
    """Run it; 0 if the losses are those of the undisturbed run."""
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    metrics = folder / "run" / "metrics.jsonl"
    with hosts(3) as names:
        agents = [agent(number, name, folder) for number, name in enumerate(names, start=1)]
        try:
            print(f"three hosts: step 6 after {wait_for_step(metrics, 6, agents):.1f} s", flush=True)
            run("ip", "-n", names[2], "link", "set", "eth0", "down")
            at = last_step(metrics)
            print(
                f"host 3 cut off after step {at}: {wait_for_step(metrics, at + 3, agents):.1f} s to 3 more", flush=True
            )
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agents[2].pid, signal.SIGKILL)
            run("ip", "-n", names[2], "link", "set", "eth0", "up")
            at, agents[2] = last_step(metrics), agent(3, names[2], folder)
            start = time.monotonic()
            while "dp 3" not in (folder / "run" / "logs" / "rank_0.log").read_text().rpartition("megatronish on")[2]:
                assert time.monotonic() - start < 90, "host 3 did not come back"
                time.sleep(0.2)
            print(f"host 3 came back: dp 3 after {time.monotonic() - start:.1f} s, at step {last_step(metrics)}")
            wait_for_step(metrics, STEPS, agents, seconds=120)
        except AssertionError as error:
            return publish(Result("hosts cut off and back", 2, 1, f"{error}; logs are in {folder}"))
        finally:
            for each in agents:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
    train_on_ranks(tiny(folder / "calm", FLAGS))
    seen, calm = steps_of(folder / "run"), steps_of(folder / "calm")
    worst = max(abs(seen[step].loss - calm[step].loss) / calm[step].loss for step in calm)
    measured = f"{len(calm)} steps with dp 3, 2, 3; losses differ by {worst:.1e} at most"
    return publish(Result("hosts cut off and back", 2, int(worst > 1e-5), measured))


if __name__ == "__main__":
    sys.exit(main())
