"""What does a checkpoint say it holds, can it be trusted, and are its files whole?

torch keeps this in `.metadata`, a pickle, and a pickle can call anything when it is read. So only the few plain classes
that torch writes are let in, and files are named by a bare name: a checkpoint from elsewhere runs no code here.
"""

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatronish.checkpoint.folder import DamagedError

METADATA = ".metadata"
TORCHS = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in TORCHS.get(module, ()):
            return super().find_class(module, name)
        if name == "PosixPath" and module.split(".")[0] == "pathlib":  # Python 3.13 has it in pathlib._local
            return PurePosixPath
        raise pickle.UnpicklingError(f"it names {module}.{name}, which torch does not write there")


class Reader(dcp.FileSystemReader):
    """Torch's reader of a folder. DamagedError, which names the file, if something is missing or cut short."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        path = self.folder / METADATA
        try:
            with path.open("rb") as stream:
                metadata = _Unpickler(stream).load()
            ends = _ends(metadata)
        except OSError as error:
            raise DamagedError(self.folder, f"{METADATA} cannot be read ({error.strerror})") from error
        except Exception as error:  # a damaged pickle raises whatever its damage spells
            raise DamagedError(self.folder, f"{METADATA} cannot be read ({error})") from error
        for name, end in ends.items():
            file = self.folder / name
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < end:
                found = "is missing" if size is None else f"has {size} bytes instead of {end}"
                raise DamagedError(self.folder, f"{name} {found}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _ends(metadata: Metadata) -> dict[str, int]:
    """Where the last tensor of each file ends."""
    ends: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        name = stored.relative_path
        if Path(name).name != name:
            raise ValueError(f"it names a file in another folder, {name}")
        ends[name] = max(ends.get(name, 0), stored.offset + stored.length)
    return ends
