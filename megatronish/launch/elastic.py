"""Report to torchrun of why this rank ends: torchrun prints it last, below its own traceback.

torchrun names a file for each rank (TORCHELASTIC_ERROR_FILE). When a rank fails, it prints the contents of the file of
the rank that failed first as the "root cause", at the very end.
"""

import contextlib
import json
import os
import time
from pathlib import Path

from megatronish.core.errors import without_passwords


def report_to_torchrun(message: str) -> None:
    """Write the message into the file that torchrun reads; nothing where torchrun did not start this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    message = without_passwords(message)
    # The keys are those of torch's own error handler; "py_callstack" is what is printed.
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # the message is printed anyway
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
