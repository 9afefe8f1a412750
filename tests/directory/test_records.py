"""Records: what was stored is read back, and a record torn or damaged at any byte is dropped with its descendants."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixpool.radix.errors import InvariantViolation
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.restore import ORPHAN, ROOT, plan_restore
from radixpool.rpc.directory import BlockDirectory, layout
from radixpool.rpc.directory.errors import DirectoryDamaged
from radixpool.rpc.directory.interned import InternLog
from radixpool.rpc.directory.scan import ScanResult

BLOCK_SIZE = 4
Open = Callable[..., BlockDirectory]
Store = Callable[..., None]
TENANT = Namespace(tenant="a", cache_salt="ü")


def tokens_of(*blocks: int) -> bytes:
    return np.repeat(np.array(blocks, dtype="<u4"), 4).tobytes()


def record_span(directory: BlockDirectory, block: int) -> slice:
    size = directory.geometry.record_words * 4
    start = layout.RECORDS_OFFSET + block * size
    return slice(start, start + size)


def links(scan: ScanResult) -> dict[int, int | None]:
    """Map each block to its parent's id, None for a root."""
    loose = scan.loose
    return {
        int(block): None if parent == ROOT else -1 if parent == ORPHAN else int(loose.blocks[parent])
        for block, parent in zip(loose.blocks, loose.parents.tolist(), strict=True)
    }


def test_what_was_stored_is_read_back(opened: Open, store: Store) -> None:
    directory = opened()
    store(directory, 7, 3, last_use=5)
    store(directory, 9, parent=3, position=2, last_use=6, media=b"image")
    store(directory, 1, namespace=TENANT)
    scan = opened().scan()
    loose = scan.loose
    assert links(scan) == {7: None, 3: 7, 9: 3, 1: None}
    assert dict(zip(loose.blocks.tolist(), loose.positions.tolist(), strict=True)) == {7: 0, 3: 1, 9: 2, 1: 0}
    assert loose.tokens[loose.blocks.tolist().index(3)].tolist() == [300, 301, 302, 303]
    assert loose.last_uses.tolist() == [1, 5, 5, 6]
    keys = [scan.keys[number] for number in loose.namespaces.tolist()]
    assert keys == [TENANT.encode(), *[Namespace().encode()] * 3]
    assert [scan.keys.get(number) for number in loose.media.tolist()] == [None, None, None, b"image"]
    assert scan.torn.size == scan.private.size == 0


def test_states_of_blocks_without_records(opened: Open, store: Store) -> None:
    directory = opened()
    store(directory, 1, 2, 3)
    directory.handed_out([4, 5, 6])
    directory.returned([5])
    directory.removed([2, 3])
    directory.returned(np.array([3], dtype=np.int32))
    scan = opened().scan()
    assert links(scan) == {1: None}
    assert scan.private.tolist() == [2, 4, 6]


def test_block_ids_are_taken_as_bytes_sequences_and_arrays(opened: Open) -> None:
    directory = opened()
    directory.handed_out(np.array([1, 2], dtype="<i4").tobytes())
    directory.handed_out((3,))
    directory.handed_out(np.array([4], dtype=np.int32))
    assert directory.scan().private.tolist() == [1, 2, 3, 4]


def test_a_run_longer_than_a_piece_is_one_path(opened: Open, store: Store) -> None:
    directory = opened(num_blocks=5000)
    blocks = np.random.default_rng(0).permutation(5000)[:3000].tolist()
    store(directory, *blocks)
    plan = plan_restore(opened(num_blocks=5000).scan().loose)
    assert plan.num_runs == 1
    assert plan.loose.blocks.tolist() == blocks


@pytest.mark.parametrize("length", [1, 2, 40, 257, 600])
def test_at_every_line_of_a_store_what_counts_is_whole_and_a_prefix_of_the_run(
    opened: Open, store: Store, length: int
) -> None:
    """What a kill would leave after each line of the code that stores: no torn record, and no hole in the path."""
    directory = opened(num_blocks=1024)
    blocks = np.random.default_rng(length).permutation(1000)[:length].tolist()
    store(directory, 1000)
    directory.handed_out(blocks)
    path = list(zip([1000, *blocks], [None, 1000, *blocks], strict=False))
    seen: list[int] = []

    def look(frame: FrameType, event: str, _argument: object) -> Callable[..., object] | None:
        if "rpc/directory/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            sys.settrace(None)
            scan = directory.scan()
            assert scan.torn.size == 0
            counted = links(scan)
            assert counted == dict(path[: len(counted)])
            seen.append(len(counted) - 1)
            sys.settrace(look)
        return look

    tracer = sys.gettrace()
    sys.settrace(look)
    try:
        directory.stored(
            np.array(blocks, dtype="<i4").tobytes(),
            tokens_of(*blocks),
            parent=1000,
            position=1,
            namespace=DEFAULT_NAMESPACE,
            last_use=1,
        )
    finally:
        sys.settrace(tracer)
    assert len(seen) > 20
    assert sorted(set(seen)) == [*range(0, length, 256), length]


def test_serials_are_not_used_twice_in_any_life(opened: Open, store: Store) -> None:
    """A record of a former life that lost its parent does not find one in what this life stores there."""
    directory = opened()
    store(directory, 1)
    store(directory, 2, parent=1, position=1)
    directory.removed([1])
    directory = opened()
    store(directory, 1)
    assert links(directory.scan()) == {1: None, 2: -1}
    serials = directory._words[[1, 2], layout.SERIAL]
    assert serials[0] > serials[1]


def test_touching_changes_the_last_use_and_nothing_else(opened: Open, store: Store) -> None:
    directory = opened()
    store(directory, 1, 2)
    directory.touched(2, 2**40)
    scan = opened().scan()
    assert scan.loose.last_uses.tolist() == [1, 2**40]
    assert scan.torn.size == 0


def test_a_recycled_parent_is_not_mistaken(opened: Open, store: Store) -> None:
    """A child whose parent's block was stored anew, in the same place of an equal path, is an orphan."""
    directory = opened()
    store(directory, 1)
    store(directory, 2, parent=1, position=1)
    store(directory, 1)
    assert links(directory.scan()) == {1: None, 2: -1}
    with pytest.raises(InvariantViolation, match="1 records have no parent"):
        directory.check()


def test_a_child_in_another_namespace_or_place_is_an_orphan(opened: Open, store: Store) -> None:
    directory = opened()
    store(directory, 1)
    store(directory, 2, parent=1, position=1, namespace=TENANT)
    store(directory, 3, parent=1, position=5)
    store(directory, 4, parent=-1, position=1)
    store(directory, 5, parent=30, position=1)
    assert links(directory.scan()) == {1: None, 2: -1, 3: -1, 4: -1, 5: -1}


@pytest.fixture
def chain(opened: Open, store: Store, path: Path) -> tuple[BlockDirectory, bytes, bytes]:
    """Make a directory with the path 1-2-3 and the branch 4 at 1, and the file before and after block 2 was stored."""
    directory = opened(num_blocks=8)
    store(directory, 1)
    store(directory, 4, parent=1, position=1)
    directory.handed_out([2, 3])
    before = (path / "blocks").read_bytes()
    store(directory, 2, parent=1, position=1)
    after = (path / "blocks").read_bytes()
    store(directory, 3, parent=2, position=2)
    return directory, before, after


def record_survives(directory: BlockDirectory, content: bytes, path: Path) -> bool:
    """Put `content` in the place of block 2's record and tell whether it counts; the rest must be as expected."""
    span = record_span(directory, 2)
    with (path / "blocks").open("r+b") as file:
        file.seek(span.start)
        file.write(content)
    scan = directory.scan()
    plan = plan_restore(scan.loose)
    kept = set(plan.loose.blocks.tolist())
    assert {1, 4} <= kept
    assert (2 in kept) == (3 in kept), "descendants go with the block"
    unusable = {*scan.private.tolist(), *scan.torn.tolist(), *plan.dropped.tolist()}
    assert unusable == {2, 3} - kept, "and may not be handed out"
    return 2 in kept


def test_a_record_torn_at_any_byte_is_dropped(chain: tuple[BlockDirectory, bytes, bytes], path: Path) -> None:
    """Any number of leading bytes of the new record over the old one, and any number of trailing ones."""
    directory, before, after = chain
    span = record_span(directory, 2)
    old, new = before[span], after[span]
    for at in range(len(new)):
        for torn in (new[:at] + old[at:], old[:at] + new[at:]):
            assert record_survives(directory, torn, path) == (torn == new)


def test_a_damaged_byte_is_always_detected(chain: tuple[BlockDirectory, bytes, bytes], path: Path) -> None:
    directory, _, after = chain
    whole = after[record_span(directory, 2)]
    last_use = range(layout.LAST_USE * 4, layout.LAST_USE * 4 + 8)
    for at in range(len(whole)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[at] ^= flip
            assert record_survives(directory, bytes(damaged), path) == (at in last_use)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=200, deadline=None
)
@given(st.sets(st.integers(0, 127), min_size=1))
def test_any_mixture_of_two_records_is_dropped(
    chain: tuple[BlockDirectory, bytes, bytes], path: Path, new_bytes: set[int]
) -> None:
    directory, before, after = chain
    span = record_span(directory, 2)
    torn = bytes((after if at in new_bytes else before)[span][at] for at in range(128))
    assert record_survives(directory, torn, path) == (torn == after[span])


def test_a_record_in_the_wrong_place_is_dropped(chain: tuple[BlockDirectory, bytes, bytes], path: Path) -> None:
    directory, _, after = chain
    assert not record_survives(directory, after[record_span(directory, 4)], path)


def test_records_that_name_a_lost_key_are_damage(opened: Open, store: Store, path: Path) -> None:
    directory = opened()
    store(directory, 1)
    directory.close()
    (log,) = path.glob("interned.*")
    log.write_bytes(log.read_bytes()[:-1])
    directory = opened()
    with pytest.raises(DirectoryDamaged, match=r"name 1 keys .* --reset-directory"):
        directory.scan()


def test_compaction_keeps_what_records_name(
    opened: Open, store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixpool.rpc.directory.interned.COMPACT_MIN_BYTES", 400)
    directory = opened()
    store(directory, 1, media=b"kept")
    for salt in range(200):
        store(directory, 2, namespace=Namespace(cache_salt=str(salt)))
        directory.returned([2])
    (log,) = path.glob("interned.*")
    assert log.stat().st_size < 3000
    store(directory, 2, namespace=Namespace(cache_salt="7"))
    scan = opened().scan()
    assert [scan.keys[number] for number in scan.loose.namespaces.tolist()] == [
        Namespace().encode(),
        Namespace(cache_salt="7").encode(),
    ]
    assert scan.keys[int(scan.loose.media[0])] == b"kept"
    directory.check()


def test_keys_prepared_for_a_commit_survive_a_compaction_until_they_are_named(
    opened: Open, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit of several media blocks prepares all keys first; nothing after that may need room on the disk."""
    monkeypatch.setattr("radixpool.rpc.directory.interned.COMPACT_MIN_BYTES", 0)
    directory = opened()
    store(directory, 1)
    directory.handed_out([2, 3])
    for media in (b"cat", b"dog"):
        directory.prepare(DEFAULT_NAMESPACE, media)

    def full(*_: object) -> int:
        raise AssertionError("the disk is full")

    monkeypatch.setattr(InternLog, "_append", full)
    for block, media in ((2, b"cat"), (3, b"dog")):
        directory.returned([9])
        directory.removed([9])
        directory.stored(
            [block],
            bytes(16),
            parent=block - 1,
            position=block - 1,
            namespace=DEFAULT_NAMESPACE,
            last_use=1,
            media=media,
        )
    directory.check(findable=[1, 2, 3])
