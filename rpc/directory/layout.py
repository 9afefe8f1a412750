"""Where everything stands in the blocks file: one page of header, the client table, then one record per block.

All numbers are little-endian. The header's first part is written once, before the file gets its name; what changes
later (incarnation, generation, pool) alternates between two slots, so that a torn write leaves the other one valid.

A record is a row of 32-bit words: sixteen of fields and checksum, then the block's token ids, padded to
whole cache lines (128 bytes for 16 tokens). The state word is one aligned word of its own and is stored last when a
record becomes valid and first when it becomes invalid. The checksum covers every other word except the last use, a
hint that is updated in place.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from radixpool.rpc import limits
from radixpool.rpc.directory.errors import DirectoryDamaged

MAGIC: Final = b"RPBLKDIR"
VERSION: Final = 3
HEADER_BYTES: Final = 4096
SEED_BYTES: Final = 16
CLIENT_SLOT_BYTES: Final = 64
CLIENT_SLOTS: Final = limits.MAX_CLIENTS
RECORDS_OFFSET: Final = HEADER_BYTES + CLIENT_SLOTS * CLIENT_SLOT_BYTES
NO_POOL: Final = bytes(limits.POOL_ID_BYTES)
"""Stands for the pool as long as none has registered."""

NO_PARENT: Final = 0xFFFF_FFFF
MAX_BLOCKS: Final = 1 << 31
MAX_BLOCK_SIZE: Final = 1 << 16

STATE: Final = 0
MARK: Final = 1
"""Always `MARKED`, so that a row of zeros is not a record."""
LAST_USE: Final = 2
"""First of two words."""
SERIAL: Final = 4
"""First of two words: the number of the store that wrote the record. No two stores have the same one."""
PARENT_SERIAL: Final = 6
"""First of two words: the parent's serial."""
NAMESPACE: Final = 8
MEDIA: Final = 9
"""Number of the media key of the block, 0 for none."""
CHECKSUM: Final = 10
"""First of two words."""
START: Final = 12
"""Position in its path of the first block that was stored together with this one."""
INDEX: Final = 13
"""Position of the block counted from there."""
PARENT: Final = 14
BLOCK: Final = 15
"""The block's own id: a record in the wrong place is not valid."""
TOKENS: Final = 16
MARKED: Final = 0x5250_424C
UNCHECKED: Final = (STATE, LAST_USE, LAST_USE + 1, CHECKSUM, CHECKSUM + 1)
"""Words that the checksum leaves out: they change in place, or are the checksum."""
_WORDS_PER_LINE: Final = 16

_IDENTITY = struct.Struct("<8sIIQI16s")
_CRC = struct.Struct("<I")
_LIFE = struct.Struct("<QQ16sQ")
_LIFE_OFFSETS: Final = (1024, 2048)


class BlockRecordState(IntEnum):
    """The state word of a record. Any two differ in every byte, so that no damaged byte turns one into another.

    A file of zeros is a directory of free blocks.
    """

    FREE = 0
    PRIVATE = 0x5A17_C3D2
    COMMITTED = 0x36E9_4B71


@dataclass(frozen=True, slots=True)
class Geometry:
    """What decides the size of the file: a directory of another geometry is of no use."""

    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        _check_range("num_blocks", self.num_blocks, MAX_BLOCKS)
        _check_range("block_size", self.block_size, MAX_BLOCK_SIZE)

    @property
    def record_words(self) -> int:
        """32-bit words of one record, whole cache lines."""
        return TOKENS + -(-self.block_size // _WORDS_PER_LINE) * _WORDS_PER_LINE

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return RECORDS_OFFSET + self.num_blocks * self.record_words * 4


@dataclass(frozen=True, slots=True)
class Life:
    """The changing part of the header: which life of the manager, of the contents and of the pool this is.

    `lease_ttl_ms` is the longest lease that a client in the client table may have.
    """

    incarnation: int
    generation: int
    pool_id: bytes
    lease_ttl_ms: int


def _check_range(name: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise ValueError(f"{name} must be 1 to {limit}, got {value}")


def pack_identity(geometry: Geometry, seed: bytes) -> bytes:
    """Return the part of the header that never changes."""
    body = _IDENTITY.pack(MAGIC, VERSION, geometry.block_size, geometry.num_blocks, geometry.record_words * 4, seed)
    return body + _CRC.pack(zlib.crc32(body))


def unpack_version(header: bytes) -> int:
    """Return the version of the format, of which this is a part. Raises DirectoryDamaged naming what is wrong."""
    size = _IDENTITY.size
    if len(header) < HEADER_BYTES:
        raise DirectoryDamaged(f"header must be {HEADER_BYTES} bytes, got {len(header)}")
    magic, version, *_ = _IDENTITY.unpack_from(header)
    if magic != MAGIC:
        raise DirectoryDamaged(f"header magic must be {MAGIC!r}, got {magic!r}")
    if zlib.crc32(header[:size]) != _CRC.unpack_from(header, size)[0]:
        raise DirectoryDamaged("header checksum does not match")
    return int(version)


def unpack_identity(header: bytes) -> tuple[Geometry, bytes]:
    """Return geometry and checksum seed. Raises DirectoryDamaged naming what is wrong."""
    version = unpack_version(header)
    _, _, block_size, num_blocks, record_bytes, seed = _IDENTITY.unpack_from(header)
    if version != VERSION:
        raise DirectoryDamaged(f"header version must be {VERSION}, got {version}")
    geometry = Geometry(num_blocks, block_size)
    if record_bytes != geometry.record_words * 4:
        raise DirectoryDamaged(f"header record_bytes must be {geometry.record_words * 4}, got {record_bytes}")
    return geometry, seed


def life_slot(life: Life, writes: int) -> tuple[int, bytes]:
    """Return offset and bytes of the header's write number `writes`, which spares the slot of the one before."""
    body = struct.pack("<Q", writes) + _LIFE.pack(life.incarnation, life.generation, life.pool_id, life.lease_ttl_ms)
    return _LIFE_OFFSETS[writes % 2], body + _CRC.pack(zlib.crc32(body))


def unpack_life(header: bytes) -> tuple[Life, int]:
    """Return the newest valid slot and its write number. Raises DirectoryDamaged when neither is valid."""
    found: list[tuple[int, Life]] = []
    for offset in _LIFE_OFFSETS:
        end = offset + 8 + _LIFE.size
        body, (crc,) = header[offset:end], _CRC.unpack_from(header, end)
        if zlib.crc32(body) == crc:
            (writes,) = struct.unpack_from("<Q", body)
            found.append((writes, Life(*_LIFE.unpack_from(body, 8))))
    if not found:
        raise DirectoryDamaged("header checksum of incarnation and pool does not match in either copy")
    writes, life = max(found, key=lambda slot: slot[0])
    return life, writes
