"""GPipe, 1F1B, and interleaved 1F1B: schedules whose backward is one action."""

from megatronish.parallel.schedules.plan import Action, one_by_one


def one_f_one_b(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> list[Action]:
    """1F1B of Narayanan et al. 2021 (arXiv:2104.04473, fig. 4).

    Stage s holds at most min(num_stages - s, num_microbatches) live activations.
    """
    assert num_chunks == 1
    forwards = [Action("F", 0, i) for i in range(num_microbatches)]
    backwards = [Action("B", 0, i) for i in range(num_microbatches)]
    return one_by_one(forwards, backwards, ahead=num_stages - stage)


# Interleaved 1F1B schedule: 1F1B over several model chunks a stage, in groups of micro-batches.


def interleaved(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """Interleaved 1F1B of Narayanan et al. 2021 (arXiv:2104.04473, section 2.2); with one chunk it is 1F1B.

    A group of p = num_stages micro-batches goes through the stage's first chunk, then through its second, and so on up
    to chunk v = num_chunks: when the group has left one chunk, its first micro-batch arrives at the next. Stage s does
    2 (p - s - 1) + (v - 1) p warm-up forwards before its first pair of a forward and a backward, as in Megatron-LM.

    The last group is padded to p micro-batches, and the actions of the padding are removed from the plan. Removing a
    micro-batch delays nothing, because an action waits only for its own micro-batch and for earlier actions of its
    stage. So the properties of whole groups (no hang, the order of messages, the peak of live activations) hold for any
    number of micro-batches.
    """
    if num_chunks == 1:
        return one_f_one_b(stage=stage, num_stages=num_stages, num_microbatches=num_microbatches)
    # 1. The order of the forwards and that of the backwards, each by itself: groups of num_stages micro-batches, every
    #    group through all chunks, backwards through the chunks in reverse.
    forwards: list[Action | None] = []
    backwards: list[Action | None] = []
    for group in range(0, num_microbatches, num_stages):
        real = range(group, min(group + num_stages, num_microbatches))
        padding = [None] * (num_stages - len(real))
        for chunk in range(num_chunks):
            forwards += [*(Action("F", chunk, i) for i in real), *padding]
            backwards += [*(Action("B", num_chunks - 1 - chunk, i) for i in real), *padding]
    # 2. Merge the two: the warm-up forwards, then one forward and one backward in turn. The backward of a group's first
    #    micro-batch needs its forward through all chunks, (v - 1) p forwards, and the way to the last stage and back.
    warm_up = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
    row = one_by_one(forwards, backwards, ahead=warm_up + 1)
    # 3. Remove the padding of the last group.
    return [action for action in row if action is not None]


# GPipe schedule: all forwards, then all backwards.


def gpipe(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> list[Action]:
    """GPipe of Huang et al. 2019 (arXiv:1811.06965, fig. 2).

    Every stage holds num_microbatches live activations.
    """
    assert num_chunks == 1 and stage < num_stages
    micro_batches = range(num_microbatches)
    return [Action("F", 0, i) for i in micro_batches] + [Action("B", 0, i) for i in micro_batches]
