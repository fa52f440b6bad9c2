"""ZB-H1 and ZB-V: schedules whose backward is split, so that weight gradients fill what would be idle."""

from collections import Counter

from megatronish.parallel.schedules.plan import Action, Kind


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


# ZB-V schedule: two chunks a stage in a V, weight gradients where a stage would idle.

CHUNKS = {"a": 0, "b": 1}


def zb_v(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 2) -> list[Action]:
    """ZB-V of Qi et al. 2023 (arXiv:2401.10241, section 6), for F, B and W actions of equal duration.

    Every stage holds at most 2 num_stages live activations of a chunk: as much memory as the first stage of 1F1B.

    The table `phases` has a pattern and its number of repetitions. "Fa" is the forward of the first chunk, "Wb" the
    weight gradient of the second; each kind of each chunk takes its micro-batches in order. The table needs 2 p - 1
    micro-batches to fill the V. With fewer, the actions of the missing ones are removed, as in `interleaved`.
    """
    assert num_chunks == 2
    s, p, m = stage, num_stages, max(num_microbatches, 2 * num_stages - 1)
    phases = (
        # Warm-up: first-chunk forwards until micro-batch 0 comes back up the V, then forwards of both chunks in turn.
        ("Fa", 2 * (p - s) - 1),
        ("Fb Fa", s),
        # Stage 0 holds the last position: the first backwards start there and go down the V, while forwards fill it.
        ("Fb Bb Wb", p - s),
        # Steady state: both chunks, all three kinds in turn.
        ("Fa Ba Wa Fb Bb Wb", m - 2 * p + s + 1),
        # Drain: no first-chunk forward is left, later also no forward; weight gradients are deferred behind the input
        # gradients that earlier stages wait for.
        ("Ba Wa Fb Bb Wb", p - s - 1),
        ("Ba Bb", s),
        ("Ba Wa", p - s),
        # The deferred weight gradients, while other stages finish.
        ("Wb", s),
        ("Wa", s),
    )
    return _numbered(phases, below=num_microbatches)


def _numbered(phases: tuple[tuple[str, int], ...], *, below: int) -> list[Action]:
    """("Fb Fa", 2) -> F0b F0a F1b F1a, without the micro-batches from `below` on."""
    counts: Counter[str] = Counter()
    row = []
    for pattern, times in phases:
        for name in pattern.split() * times:
            if counts[name] < below:
                kind: Kind = name[0]  # type: ignore[assignment]
                row.append(Action(kind, CHUNKS[name[1]], counts[name]))
                counts[name] += 1
    return row
