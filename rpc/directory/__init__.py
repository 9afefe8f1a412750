"""The block directory: what makes the cache survive the manager's process. See docs/directory.md."""

from radixpool.rpc.directory.directory import BlockDirectory
from radixpool.rpc.directory.errors import DirectoryDamaged, DirectoryError, DirectoryInUse, DirectoryNoSpace
from radixpool.rpc.directory.file import reset

__all__ = [
    "BlockDirectory",
    "reset",
    "DirectoryDamaged",
    "DirectoryError",
    "DirectoryInUse",
    "DirectoryNoSpace",
]
