"""Listing of a folder of a store: every object below it, or an error.

fsspec's walk, which is also the `find` of file systems without one of their own (files, memory, SFTP, HDFS), leaves
out folders that it cannot read, whatever its argument on_error says. Checkpoints in such a folder would look like none.
"""

from typing import Any


def objects_below(fs: Any, path: str) -> dict[str, dict[str, Any]]:
    """Facts of all objects below a folder of an fsspec file system, by path; none if it is not there.

    Whatever the file system raises, except for a folder that is removed meanwhile.
    """
    if not _walks(fs):
        try:
            return dict(fs.find(path, detail=True))
        except FileNotFoundError:
            return {}
    found: dict[str, dict[str, Any]] = {}
    folders = [path]
    while folders:
        folder = folders.pop()
        try:
            listed = fs.ls(folder, detail=True)
        except FileNotFoundError:
            continue
        for facts in listed:
            if facts["type"] != "directory":
                found[facts["name"]] = facts
            elif facts["name"].rstrip("/") != folder.rstrip("/"):
                folders.append(facts["name"])
    return found


def _walks(fs: Any) -> bool:
    """Whether `find` of a file system, or of one that it wraps, is fsspec's walk."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    while isinstance(fs, AbstractFileSystem):
        own = type(fs)
        is_async = issubclass(own, AsyncFileSystem)
        if (own._find is AsyncFileSystem._find) if is_async else (own.find is AbstractFileSystem.find):
            return True
        fs = getattr(fs, "fs", None)
    return False
