"""Time of a step of a pipeline in closed form, for the search; the simulator has the exact one for a few layouts."""

from typing import NamedTuple


class StageTimes(NamedTuple):
    """Seconds of F, B and W of a micro-batch: of the slowest stage, of all stages together, and of a mean one."""

    slowest: float
    together: float
    forward: float
    backward: float
    weight: float


class PipelineSeconds(NamedTuple):
    """Seconds that the slowest stage computes, that it waits in fill and drain, and that it waits for transfers."""

    compute: float
    bubble: float
    transfers: float

    @property
    def total(self) -> float:
        """Seconds of all three together."""
        return self.compute + self.bubble + self.transfers


EXPOSED_INTERLEAVED = 0.25  # of the transfers of chunks
ZERO_BUBBLE_REST = 0.3  # of what cannot be filled in a zero-bubble schedule with twice the activations


def pipeline_seconds(
    times: StageTimes, *, schedule: str, stages: int, chunks: int, microbatches: int, hop: float
) -> PipelineSeconds:
    """Seconds of all micro-batches through all stages."""
    p, v, m = stages, chunks, microbatches
    compute = m * times.slowest
    if p == 1:
        return PipelineSeconds(compute, 0.0, 0.0)
    spread = times.together - times.slowest
    fill_hops = 2 * (p - 1) * hop
    steady_hops = 2 * hop * m * (p - 1) / p
    if schedule == "interleaved":
        bubble, transfers = spread / v, v * EXPOSED_INTERLEAVED * steady_hops + fill_hops
        missing = -m % p  # the last group of micro-batches is not full: its chunks wait for each other
        bubble += missing * (v - 1) / v * times.together / p
    elif schedule in ("zb-h1", "zb-1p"):
        mean = times.forward + times.backward - times.weight
        bubble, transfers = (p - 1) * max(0.0, mean), fill_hops
    elif schedule == "zb-v":  # half a stage's forward or backward a stage, by the simulator
        bubble, transfers = (p - 1) * max(times.forward, times.backward) / 2, fill_hops
    elif schedule == "zb-2p":
        rest = max(0.0, times.forward + times.backward - 2 * times.weight)
        bubble, transfers = (p - 1) * rest * ZERO_BUBBLE_REST, fill_hops
    elif schedule == "gpipe":
        bubble, transfers = spread, fill_hops
    else:
        bubble, transfers = spread, steady_hops
    return PipelineSeconds(compute, bubble, transfers)
