"""The files of a block directory: made, locked, opened and checked.

A directory is a folder of its own, readable by its owner only, because records hold the token ids of prompts:

    lock              held (flock) as long as a manager has the directory open
    blocks            header, client table and records, memory-mapped
    interned.SEED     namespaces and media keys that records name by number; its name holds the seed of `blocks`

`blocks` gets its name when it is complete and all its space is allocated, so that a write through the map cannot meet
a full disk. Nothing is fsynced: the KV that the records describe is lost with the machine's power anyway, and what one
process wrote to a shared map every later process of the same machine sees.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from radixpool.rpc.directory import layout
from radixpool.rpc.directory.errors import DirectoryDamaged, DirectoryError, DirectoryInUse, no_space
from radixpool.rpc.directory.interned import InternLog
from radixpool.rpc.directory.layout import Geometry, Life

LOCK_NAME: Final = "lock"
BLOCKS_NAME: Final = "blocks"
NEW: Final = "it is new"
"""Why a directory is empty that was not there before."""
INTERNED_PREFIX: Final = "interned."


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """An open directory: lock, map and interned keys, and why it is new if it is."""

    path: Path
    lock_fd: int
    map: mmap.mmap
    seed: bytes
    life: Life
    life_writes: int
    interned: InternLog
    started_empty_because: str | None

    def close(self) -> None:
        """Give everything back; the map itself once nobody looks into it any more."""
        self.interned.close()
        with suppress(BufferError):  # a traceback that is still kept may refer to a view
            self.map.close()
        os.close(self.lock_fd)


def lock(path: Path) -> int:
    """Make the folder if need be and return its locked descriptor. Raises DirectoryInUse, DirectoryError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path)
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise no_space(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise DirectoryInUse(f"directory {path} is open in another manager (process {owner or 'unknown'})") from None
    return fd


def _check_owner(path: Path) -> None:
    """Refuse a folder in which somebody else could put files in the place of ours."""
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise DirectoryError(f"directory {path} must belong to this user, it belongs to user {status.st_uid}")
    if status.st_mode & 0o022:
        raise DirectoryError(
            f"directory {path} must be writable by its owner only (chmod go-w), mode {status.st_mode & 0o777:o}"
        )


def reset(path: Path) -> None:
    """Delete the contents of the directory, whatever state they are in. Raises DirectoryInUse while it is open."""
    fd = lock(path)
    try:
        for file in path.iterdir():
            if file.name.startswith((BLOCKS_NAME, INTERNED_PREFIX)):
                file.unlink()
    except OSError as error:
        raise no_space(path, error) from error
    finally:
        os.close(fd)


def open_files(path: Path, geometry: Geometry) -> OpenFiles:
    """Open the directory, making or replacing what is missing or of another geometry.

    Raises DirectoryInUse, DirectoryDamaged, DirectoryNoSpace, DirectoryError; then nothing has changed.
    """
    fd = lock(path)
    try:
        _note_owner(fd)
        reason = _why_empty(path, geometry)
        if reason is not None:
            _create(path, geometry)
        return _open_existing(path, fd, reason)
    except BaseException:
        os.close(fd)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the directory and the way out in what is raised inside."""
    try:
        yield
    except DirectoryDamaged as error:
        raise DirectoryDamaged(
            f"directory {path} is damaged: {error}; --reset-directory gives its cache up and starts anew"
        ) from None


def _note_owner(fd: int) -> None:
    with suppress(OSError):  # only for the message of DirectoryInUse: a full disk is no reason not to start
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _why_empty(path: Path, geometry: Geometry) -> str | None:
    """Return why what is there cannot be used, None when it can. Raises DirectoryDamaged."""
    try:
        with (path / BLOCKS_NAME).open("rb") as file:
            header = file.read(layout.HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return NEW
    except OSError as error:
        raise no_space(path, error) from error
    with naming(path):
        version = layout.unpack_version(header)
        if version != layout.VERSION:
            return f"its format is version {version}, not {layout.VERSION}"
        found, _ = layout.unpack_identity(header)
        layout.unpack_life(header)
        if size != found.file_bytes:
            raise DirectoryDamaged(f"blocks file must be {found.file_bytes} bytes, got {size}")
    if found.block_size != geometry.block_size:
        return f"its block size is {found.block_size}, not {geometry.block_size}"
    if found.num_blocks != geometry.num_blocks:
        return f"it is for {found.num_blocks} blocks, not {geometry.num_blocks}"
    return None


def _create(path: Path, geometry: Geometry) -> None:
    """Put an empty directory in the place of whatever is there. The incarnation goes on from the former one."""
    seed = os.urandom(layout.SEED_BYTES)
    temporary = path / (BLOCKS_NAME + ".new")
    life = Life(_incarnation_of(path / BLOCKS_NAME), generation=0, pool_id=layout.NO_POOL, lease_ttl_ms=0)
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, geometry.file_bytes)
            os.pwrite(fd, layout.pack_identity(geometry, seed), 0)
            offset, slot = layout.life_slot(life, 1)
            os.pwrite(fd, slot, offset)
        finally:
            os.close(fd)
        InternLog.create(_interned_path(path, seed), seed=seed)
        temporary.replace(path / BLOCKS_NAME)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        _interned_path(path, seed).unlink(missing_ok=True)
        raise no_space(path, error) from error


def _incarnation_of(blocks: Path) -> int:
    try:
        with blocks.open("rb") as file:
            return layout.unpack_life(file.read(layout.HEADER_BYTES))[0].incarnation
    except FileNotFoundError:
        return 0


def _interned_path(path: Path, seed: bytes) -> Path:
    return path / (INTERNED_PREFIX + seed.hex())


def _remove_leftovers(path: Path, seed: bytes) -> None:
    """Remove what a manager left that was killed while it made or replaced a file."""
    log = _interned_path(path, seed)
    for file in path.iterdir():
        if file.name.startswith(INTERNED_PREFIX) and file != log:
            file.unlink(missing_ok=True)


def _open_existing(path: Path, lock_fd: int, reason: str | None) -> OpenFiles:
    try:
        fd = os.open(path / BLOCKS_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise no_space(path, error) from error
    try:
        mapped = mmap.mmap(fd, 0)
    finally:
        os.close(fd)
    with naming(path):
        header = mapped[: layout.HEADER_BYTES]
        _, seed = layout.unpack_identity(header)
        life, writes = layout.unpack_life(header)
        interned = _open_interned(path, seed)
    _remove_leftovers(path, seed)
    return OpenFiles(path, lock_fd, mapped, seed, life, writes, interned, reason)


def _open_interned(path: Path, seed: bytes) -> InternLog:
    log = _interned_path(path, seed)
    try:
        return InternLog(log, seed=seed)
    except FileNotFoundError:
        raise DirectoryDamaged(f"{log.name} is missing") from None
