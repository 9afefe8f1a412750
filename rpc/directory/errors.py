"""Errors of the block directory.

RadixPoolError
└── DirectoryError
    ├── DirectoryDamaged     the files contradict themselves; `--reset-directory` starts anew
    ├── DirectoryInUse       another manager has the directory open
    └── DirectoryNoSpace     the disk is full, or the directory cannot be written; nothing changed
"""

from __future__ import annotations

import errno
from pathlib import Path

from radixpool.radix.errors import RadixPoolError

_NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM})


class DirectoryError(RadixPoolError):
    """Something is wrong with the block directory."""


class DirectoryDamaged(DirectoryError):
    """The directory's files cannot be trusted; starting with `--reset-directory` gives the cache up and goes on."""


class DirectoryInUse(DirectoryError):
    """Another manager has this directory open."""


class DirectoryNoSpace(DirectoryError):
    """The directory cannot be written: the disk is full, a quota is reached, or access is denied."""


def no_space(path: Path, error: OSError) -> DirectoryError:
    """Return the directory's own error for a failed write to `path`; what was stored before is untouched."""
    if error.errno in _NO_SPACE_ERRNOS:
        return DirectoryNoSpace(f"directory {path} cannot be written: {error.strerror}")
    return DirectoryError(f"directory {path}: {error.strerror}")
