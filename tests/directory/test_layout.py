"""The header: every damaged byte is noticed, a torn update leaves the former one."""

import pytest

from radixpool.rpc.directory import layout
from radixpool.rpc.directory.errors import DirectoryDamaged
from radixpool.rpc.directory.layout import BlockRecordState, Geometry, Life

SEED = bytes(range(16))
GEOMETRY = Geometry(num_blocks=1000, block_size=16)
OLD = Life(incarnation=6, generation=2, pool_id=b"a" * 16, lease_ttl_ms=10_000)
NEW = Life(incarnation=7, generation=2, pool_id=b"b" * 16, lease_ttl_ms=3_000)


def header(*writes: tuple[Life, int]) -> bytearray:
    page = bytearray(layout.HEADER_BYTES)
    identity = layout.pack_identity(GEOMETRY, SEED)
    page[: len(identity)] = identity
    for life, number in writes:
        offset, slot = layout.life_slot(life, number)
        page[offset : offset + len(slot)] = slot
    return page


def test_identity_and_newest_life_are_read_back() -> None:
    page = bytes(header((OLD, 1), (NEW, 2)))
    assert layout.unpack_identity(page) == (GEOMETRY, SEED)
    assert layout.unpack_life(page) == (NEW, 2)


@pytest.mark.parametrize("at", range(len(layout.pack_identity(GEOMETRY, SEED))))
def test_any_damaged_byte_of_the_identity_is_named(at: int) -> None:
    page = header((OLD, 1))
    page[at] ^= 0x41
    with pytest.raises(DirectoryDamaged, match="header"):
        layout.unpack_identity(bytes(page))


def test_a_torn_update_leaves_the_former_life() -> None:
    offset, slot = layout.life_slot(NEW, 2)
    for written in range(len(slot)):
        page = header((OLD, 1))
        page[offset : offset + written] = slot[:written]
        assert layout.unpack_life(bytes(page)) == (OLD, 1)


def test_both_lives_damaged_is_an_error() -> None:
    page = header((OLD, 1), (NEW, 2))
    for life, number in ((OLD, 1), (NEW, 2)):
        page[layout.life_slot(life, number)[0]] ^= 1
    with pytest.raises(DirectoryDamaged, match="either copy"):
        layout.unpack_life(bytes(page))


def test_no_damaged_byte_turns_one_state_into_another() -> None:
    words = [int(state).to_bytes(4, "little") for state in BlockRecordState]
    for one in words:
        for other in words:
            assert one == other or all(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("block_size", "words"), [(1, 32), (16, 32), (17, 48), (64, 80)])
def test_records_are_whole_cache_lines(block_size: int, words: int) -> None:
    assert Geometry(num_blocks=1, block_size=block_size).record_words == words


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "field"), [(0, 1, "num_blocks"), (1, 0, "block_size"), (1, 1 << 17, "block_size")]
)
def test_impossible_geometry_names_field_limit_and_value(num_blocks: int, block_size: int, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be 1 to .*, got"):
        Geometry(num_blocks=num_blocks, block_size=block_size)
