"""What is ZB-V's order of work? Two chunks a stage in a V, weight gradients where a stage would idle."""

from collections import Counter

from megatronish.schedule.plan import Action, Kind

CHUNKS = {"a": 0, "b": 1}


def zb_v(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 2) -> list[Action]:
    """ZB-V of Qi et al. 2023 (arXiv:2401.10241, section 6), for forwards, backwards and weight gradients equally long.

    Every stage holds at most 2 num_stages live activations of a chunk: as much as 1F1B's first stage.

    A row below says: this work, so many times, each kind of each chunk taking its micro-batches in order. It needs
    2 p - 1 micro-batches to fill the V. With fewer, those that do not exist are left out, as in `interleaved`.
    """
    assert num_chunks == 2
    s, p, m = stage, num_stages, max(num_microbatches, 2 * num_stages - 1)
    work = (
        ("Fa", 2 * (p - s) - 1),  # until the first micro-batch comes back up the V
        ("Fb Fa", s),
        ("Fb Bb Wb", p - s),
        ("Fa Ba Wa Fb Bb Wb", m - 2 * p + s + 1),
        ("Ba Wa Fb Bb Wb", p - s - 1),  # no forward of the first chunk is left
        ("Ba Bb", s),  # stages above wait for these
        ("Ba Wa", p - s),
        ("Wb", s),
        ("Wa", s),
    )
    return [action for action in _numbered(work) if action.micro_batch < num_microbatches]


def _numbered(work: tuple[tuple[str, int], ...]) -> list[Action]:
    """("Fb Fa", 2) -> F0b F0a F1b F1a."""
    counts: Counter[str] = Counter()
    row = []
    for pattern, times in work:
        for name in pattern.split() * times:
            kind: Kind = name[0]  # type: ignore[assignment]
            row.append(Action(kind, CHUNKS[name[1]], counts[name]))
            counts[name] += 1
    return row
