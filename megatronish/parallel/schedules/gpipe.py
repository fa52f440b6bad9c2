"""GPipe schedule: all forwards, then all backwards."""

from megatronish.parallel.schedules.plan import Action


def gpipe(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> list[Action]:
    """GPipe of Huang et al. 2019 (arXiv:1811.06965, fig. 2).

    Every stage holds num_microbatches live activations.
    """
    assert num_chunks == 1 and stage < num_stages
    micro_batches = range(num_microbatches)
    return [Action("F", 0, i) for i in micro_batches] + [Action("B", 0, i) for i in micro_batches]
