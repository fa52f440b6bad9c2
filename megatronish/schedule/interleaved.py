"""What is interleaved 1F1B's order of work? 1F1B over several chunks a stage, in groups of micro-batches."""

from megatronish.schedule.one_f_one_b import one_f_one_b
from megatronish.schedule.plan import Action, one_by_one


def interleaved(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """Interleaved 1F1B of Narayanan et al. 2021 (arXiv:2104.04473, section 2.2); with one chunk it is 1F1B.

    A group of num_stages micro-batches goes through the stage's first chunk, then through its second, and so on: when
    the group is through, its first micro-batch has come round to the next chunk. Stage s is 2 (p - s - 1) + (v - 1) p
    forwards ahead of its first pair of a forward and a backward, as in Megatron-LM.

    The last group is filled up with micro-batches that do not exist, and their actions are left out of the plan.
    Leaving micro-batches out can make nothing wait longer, for an action waits for its own micro-batch or for what
    stands earlier in its row. So what holds for whole groups (no hang, the order on every line, the most that is
    alive) holds for any number of micro-batches.
    """
    if num_chunks == 1:
        return one_f_one_b(stage=stage, num_stages=num_stages, num_microbatches=num_microbatches)
    forwards, backwards = [], []
    for group in range(0, num_microbatches, num_stages):
        for chunk in range(num_chunks):
            forwards += [Action("F", chunk, group + i) for i in range(num_stages)]
            backwards += [Action("B", num_chunks - 1 - chunk, group + i) for i in range(num_stages)]
    warm_up = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
    row = one_by_one(forwards, backwards, ahead=warm_up + 1)
    return [action for action in row if action.micro_batch < num_microbatches]
