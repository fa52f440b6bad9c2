"""Rows of ZeRO-3 that FSDP has padded: at the first forward a rank with fewer rows than others keeps those it has.

FSDP pads rows once, and knows padded rows again by the address of plain tensors. Those of a dry run are not plain: it
would copy them a second time, which no GPU does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


@contextmanager
def rows_padded_once() -> Iterator[None]:
    """Meanwhile FSDP leaves alone the rows that it has padded."""
    reset = FSDPParam.reset_sharded_param

    def reset_once(self: FSDPParam) -> None:
        rows = self._sharded_param_data
        local = getattr(self._module_info.module, self._module_info.param_name)._local_tensor
        is_same = isinstance(rows, FakeTensor) and rows.untyped_storage()._cdata == local.untyped_storage()._cdata
        if not is_same or local.is_meta:
            reset(self)

    with patch.object(FSDPParam, "reset_sharded_param", reset_once):
        yield
