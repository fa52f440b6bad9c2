"""ZB-H1 schedule: 1F1B with a split backward, weight gradients moved to where a stage would idle."""

from megatronish.parallel.schedules.plan import Action


def zb_h1(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> list[Action]:
    """ZB-H1 of Qi et al. 2023 (arXiv:2401.10241, section 2.2).

    Forwards and input gradients have the order of 1F1B. Stage s computes a weight gradient s micro-batches after its
    input gradient: the later the stage, the fewer live activations 1F1B holds there, so more weight gradients can be
    deferred to the end, when the stage would be idle. Every stage holds at most min(num_stages, num_microbatches) live
    activations.
    """
    assert num_chunks == 1
    micro_batches = range(num_microbatches)
    ahead = min(num_stages - stage, num_microbatches)
    row = [Action("F", 0, i) for i in range(ahead)]
    for i in micro_batches:
        row.append(Action("B", 0, i))
        row += [Action("W", 0, i - stage)] if i >= stage else []
        row += [Action("F", 0, i + ahead)] if i + ahead < num_microbatches else []
    return row + [Action("W", 0, i) for i in micro_batches[-stage:] if stage]
