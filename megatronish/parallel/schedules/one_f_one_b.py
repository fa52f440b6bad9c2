"""1F1B schedule: after the warm-up, one backward and one forward in turn."""

from megatronish.parallel.schedules.plan import Action, one_by_one


def one_f_one_b(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> list[Action]:
    """1F1B of Narayanan et al. 2021 (arXiv:2104.04473, fig. 4).

    Stage s holds at most min(num_stages - s, num_microbatches) live activations.
    """
    assert num_chunks == 1
    forwards = [Action("F", 0, i) for i in range(num_microbatches)]
    backwards = [Action("B", 0, i) for i in range(num_microbatches)]
    return one_by_one(forwards, backwards, ahead=num_stages - stage)
