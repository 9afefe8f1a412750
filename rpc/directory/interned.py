"""Keys of any length that records refer to by number: an append-only log beside the blocks file.

Namespaces and media keys stand here. An entry is `length, crc32, body`; the body is the number and the key. It is
written before the first record that names it, so a torn last entry is never referred to and is simply overwritten.
Space comes back by writing the log anew, through a rename, once most of its entries are named by no record; numbers
are never used twice.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from radixpool.rpc.directory.errors import DirectoryDamaged, DirectoryNoSpace, no_space

_HEADER = struct.Struct("<8s16s")
_HEADER_MAGIC: Final = b"RPKEYS01"
_ENTRY = struct.Struct("<II")
_NUMBER = struct.Struct("<I")
NO_KEY: Final = 0
"""The number that no key ever has."""
MAX_NUMBER: Final = 0xFFFF_FFFF
COMPACT_MIN_BYTES: Final = 1 << 20
"""A log that grew by less than this since it was last written anew is left alone."""


class InternLog:
    """Numbers keys and remembers the numbers across lives of the manager.

    Owns the file at `path`. `number_of` appends when it meets a new key.
    """

    def __init__(self, path: Path, *, seed: bytes) -> None:
        """Open the log of the blocks file with this `seed`. Raises DirectoryDamaged when it belongs to another."""
        self._path = path
        self._seed = seed
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        content = path.read_bytes()
        if len(content) < _HEADER.size or _HEADER.unpack_from(content) != (_HEADER_MAGIC, seed):
            os.close(self._fd)
            raise DirectoryDamaged(f"{path} does not belong to the blocks file beside it")
        self._end = _HEADER.size
        self._by_number: dict[int, bytes] = {}
        for end, number, key in _entries(content):
            self._by_number[number] = key
            self._end = end
        self._numbers = {key: number for number, key in self._by_number.items()}
        self._next = max(self._by_number, default=NO_KEY) + 1
        self._compact_at = self._end + COMPACT_MIN_BYTES

    @staticmethod
    def create(path: Path, *, seed: bytes) -> None:
        """Write an empty log, replacing what is there in one step."""
        os.close(_replace(path, _HEADER.pack(_HEADER_MAGIC, seed)))

    @property
    def by_number(self) -> Mapping[int, bytes]:
        """The known keys by number."""
        return self._by_number

    @property
    def wants_compaction(self) -> bool:
        """Whether the log has doubled since it was written anew, and by enough to matter."""
        return self._end >= self._compact_at

    def number_of(self, key: bytes) -> int:
        """Return the number of `key`, appending an entry for a new one. Raises DirectoryNoSpace."""
        number = self._numbers.get(key)
        return self._append(key) if number is None else number

    def _append(self, key: bytes) -> int:
        number = self._next
        if number > MAX_NUMBER:
            raise DirectoryNoSpace(f"{self._path} has given out all of its {MAX_NUMBER} numbers")
        entry = _entry(number, key)
        try:
            _write_all(self._fd, entry, self._end)
        except OSError as error:
            raise no_space(self._path, error) from error
        self._end += len(entry)
        self._next += 1
        self._by_number[number] = key
        self._numbers[key] = number
        return number

    def compact(self, live: Iterable[int]) -> None:
        """Write the log anew with the `live` numbers only. On a full disk the old log stays in use."""
        kept = {number: self._by_number[number] for number in live}
        highest = self._next - 1
        if highest > NO_KEY and highest not in kept:
            kept[highest] = self._by_number[highest]  # so that the next life does not give its number again
        entries = b"".join(_entry(number, key) for number, key in sorted(kept.items()))
        content = _HEADER.pack(_HEADER_MAGIC, self._seed) + entries
        try:
            fd = _replace(self._path, content)
        except OSError:
            self._compact_at = self._end + COMPACT_MIN_BYTES
            return
        os.close(self._fd)
        self._fd, self._end = fd, len(content)
        self._by_number = kept
        self._numbers = {key: number for number, key in kept.items()}
        self._compact_at = self._end * 2 + COMPACT_MIN_BYTES

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _entry(number: int, key: bytes) -> bytes:
    body = _NUMBER.pack(number) + key
    return _ENTRY.pack(len(body), zlib.crc32(body)) + body


def _entries(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (end offset, number, key) up to the first entry that is cut off or does not match its checksum."""
    at = _HEADER.size
    while at + _ENTRY.size <= len(content):
        length, crc = _ENTRY.unpack_from(content, at)
        body = content[at + _ENTRY.size : at + _ENTRY.size + length]
        if len(body) < max(length, _NUMBER.size) or zlib.crc32(body) != crc:
            return
        at += _ENTRY.size + length
        yield at, _NUMBER.unpack_from(body)[0], body[_NUMBER.size :]


def _write_all(fd: int, content: bytes, offset: int) -> None:
    """Write everything or raise: a disk that fills up takes a part first."""
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _replace(path: Path, content: bytes) -> int:
    """Put a file with `content` at `path` in one step and return it open for writing."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, content, 0)
        temporary.replace(path)
    except OSError:
        os.close(fd)
        temporary.unlink(missing_ok=True)
        raise
    return fd
