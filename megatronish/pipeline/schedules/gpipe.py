"""What is GPipe's order of work? All forwards, then all backwards."""

from megatronish.pipeline.plan import Action, Plan


def gpipe(*, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
    """GPipe of Huang et al. 2019 (arXiv:1811.06965, fig. 2).

    Every stage holds num_microbatches live activations.
    """
    assert num_chunks == 1
    micro_batches = range(num_microbatches)
    actions = [Action("F", 0, i) for i in micro_batches] + [Action("B", 0, i) for i in micro_batches]
    return [list(actions) for _ in range(num_stages)]
