"""What Python asks of `torch.cuda`, answered for a device that is not there, for the time of a dry run."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

CAPABILITY = (9, 0)
MULTI_PROCESSORS = 132


class FakeEvent:
    """An event of a stream whose work is done at once."""

    on_wait: Callable[[str], None]

    def __init__(self, *_: Any, **__: Any) -> None:
        """Settings of an event mean nothing here."""

    def record(self, _stream: Any = None) -> None:
        """Nothing is in progress on any stream."""

    def wait(self, _stream: Any = None) -> None:
        """A stream waits, and the host does not."""

    def query(self) -> bool:
        """Whether what was recorded is done."""
        return True

    def synchronize(self) -> None:
        """The host waits for the device here."""
        self.on_wait("Event.synchronize")


class FakeStream:
    """A stream whose work is done at once."""

    on_wait: Callable[[str], None]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.stream_id, self.cuda_stream = torch.device("cuda", 0), 0, 0

    def wait_stream(self, _other: Any) -> None:
        """A stream waits, and the host does not."""

    def wait_event(self, _event: Any) -> None:
        """A stream waits, and the host does not."""

    def record_event(self, event: Any = None) -> FakeEvent:
        """An event that is over."""
        return event or FakeEvent()

    def query(self) -> bool:
        """Whether everything is done."""
        return True

    def synchronize(self) -> None:
        """The host waits for the device here."""
        self.on_wait("Stream.synchronize")


@contextmanager
def answered_for(device_type: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile `torch.cuda` answers as on one GPU; `on_wait` is called with what the host waits for."""
    if device_type != "cuda":
        yield
        return
    event, stream = (
        type(kind.__name__, (kind,), {"on_wait": staticmethod(on_wait)}) for kind in (FakeEvent, FakeStream)
    )
    properties = SimpleNamespace(
        name="fake CUDA device",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=MULTI_PROCESSORS,
        total_memory=0,
    )
    the_stream = stream()

    def entered(*_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    answers: dict[str, Any] = {
        "Event": event,
        "Stream": stream,
        "stream": entered,
        "device": entered,
        "current_stream": lambda *_: the_stream,
        "default_stream": lambda *_: the_stream,
        "set_stream": lambda *_: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda *_: None,
        "is_initialized": lambda: True,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "synchronize": lambda *_: on_wait("torch.cuda.synchronize"),
        "is_current_stream_capturing": lambda: False,
    }
    # FSDP asks torch.accelerator, too: its own streams would read the memory of a FakeEvent as that of an event of C++.
    of_accelerator = {
        "current_stream": answers["current_stream"],
        "set_stream": answers["set_stream"],
        "synchronize": lambda *_: on_wait("torch.accelerator.synchronize"),
        "current_device_index": answers["current_device"],
    }
    with patch.multiple(torch.cuda, **answers), patch.multiple(torch.accelerator, **of_accelerator):
        yield
