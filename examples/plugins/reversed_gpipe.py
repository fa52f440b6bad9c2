"""GPipe with its backwards in reverse order, a pipeline schedule: the last micro-batch comes back first.

    python pretrain_gpt.py --plugin examples/plugins/reversed_gpipe.py --pp 4 --pipeline-schedule reversed-gpipe ...

As in GPipe, every stage holds the activations of all micro-batches at once.
"""

from megatronish.parallel.schedules.plan import Action
from megatronish.plugins import register_schedule


def reversed_gpipe(*, num_microbatches: int, **_sizes: int) -> list[Action]:
    """The actions of one stage in a step. Others get `stage`, `num_stages` and `num_chunks`, too, and read them."""
    forwards = [Action("F", 0, micro_batch) for micro_batch in range(num_microbatches)]
    backwards = [Action("B", 0, micro_batch) for micro_batch in reversed(range(num_microbatches))]
    return forwards + backwards


register_schedule("reversed-gpipe", reversed_gpipe)
