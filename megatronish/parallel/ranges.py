"""Named ranges of a step for torch's profiler: what is no operator, or says what the operators inside are for.

They exist only while the profiler records: else `marked` returns one context that does nothing (0.5 us).
report/breakdown.py reads them from the trace.
"""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import _profiler_enabled
from torch.compiler import is_dynamo_compiling
from torch.profiler import record_function

DATA = "data"
UPDATE = "update"
ATTENTION = "attention"
OPTIMIZER = "optimizer"
BUBBLE = "pipeline bubble"
WAIT = "wait "
"""Before the name of an axis: waiting for a collective over it."""

_NOTHING = nullcontext()


def is_recording() -> bool:
    """Whether torch's profiler records now. A compiled graph has no ranges inside."""
    return not is_dynamo_compiling() and _profiler_enabled()


def marked(name: str) -> AbstractContextManager[object]:
    """Range of this name, where the profiler records."""
    return record_function(name) if is_recording() else _NOTHING
