"""From one life of the manager to the next, with a clock in the test's hand and no sockets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixpool.radix import rebuild
from radixpool.radix.errors import UnknownSequence
from radixpool.rpc.directory import BlockDirectory, DirectoryDamaged, DirectoryInUse, DirectoryNoSpace
from radixpool.rpc.errors import Fenced, Recovering
from radixpool.rpc.manager.recovery import GRACE_S
from radixpool.rpc.status import status_from_error

NUM_BLOCKS, BLOCK_SIZE, TTL_S = 16, 4, 10.0
OTHER_POOL = b"q" * 16


def test_nothing_is_served_before_the_pool_is_back(loaded: Any, start: Callable[..., Any]) -> None:
    life = start()
    worker = life.register("w")
    for call in (lambda: life.match(1, 2, 3), lambda: worker.acquire(1), lambda: worker.store(7)):
        with pytest.raises(Recovering, match="pool"):
            call()
    assert status_from_error(Recovering("x")).code == 14, "UNAVAILABLE: clients try again"
    life.register_pool()
    assert life.match(1, 2, 3) == 3
    assert life.match(4, 5) == 0, "it was never committed"


def test_a_second_kill_before_the_fence_keeps_the_quarantine(loaded: Any, start: Callable[..., Any]) -> None:
    start().register_pool()
    life = start()
    life.register_pool()
    assert life.engine.former_life.report.former_clients == 1
    assert life.quarantined == 6
    life.register("w")
    assert life.quarantined == 0
    again = start()
    again.register_pool()
    assert again.engine.former_life.report.unwritten_blocks == 0
    assert again.match(1, 2, 3) == 3


def test_the_fence_is_lifted_in_slices_by_the_sweep(
    loaded: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million restored runs hold up nobody for longer than a slice; killed in between, the next life waits again."""
    monkeypatch.setattr(rebuild, "_BLOCKS_PER_FENCE", 1)
    monkeypatch.setattr(rebuild, "FENCES_PER_SLICE", 1)
    for _ in range(2):
        life = start()
        life.register_pool()
        life.register("w")
        former = life.engine.former_life
        assert former.is_ending and not former.is_over
        waiting = [life.quarantined]
        while life.engine.sweep():
            life.engine.check()
            waiting.append(life.quarantined)
            if len(waiting) == 2:
                break
    assert life.match(1, 2, 3) == 3
    while life.engine.sweep():
        life.engine.check()
    assert former.is_over and not former.is_ending
    assert (life.quarantined, life.free) == (0, NUM_BLOCKS - 3)


def test_old_handles_and_epochs_are_fenced(loaded: Any, start: Callable[..., Any]) -> None:
    worker = loaded.register("x")
    handle = worker.acquire(1, 2, 3)
    life = start()
    life.register_pool()
    worker.life = life
    with pytest.raises(Fenced):
        worker.release(handle)
    with pytest.raises(UnknownSequence):
        life.register("x").release(handle)
    assert life.engine.incarnation > loaded.engine.incarnation


def test_another_pool_starts_a_new_generation_with_nothing_in_it(
    loaded: Any, start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    generation = loaded.engine.generation
    life = start()
    life.register_pool(OTHER_POOL)
    assert "another pool has registered: the cache starts empty" in caplog.text
    assert life.engine.generation == generation + 1
    assert life.match(1, 2, 3) == 0
    assert life.free == NUM_BLOCKS, "old steps write to the old pool"
    life.register("w2").store(7)
    again = start()
    again.register_pool(OTHER_POOL)
    assert (again.match(7), again.match(1), again.engine.generation) == (1, 0, generation + 1)


def test_without_a_pool_nobody_answers_for_the_bytes(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    life = start()
    worker = life.register("w")
    worker.store(1, 2)
    worker.acquire(3)
    life = start()
    assert "no pool was registered" in caplog.text
    assert life.match(1, 2) == 0, "it serves, with an empty cache"
    assert life.quarantined == 4, "but old steps may still run"
    life.register("w")
    assert life.free == NUM_BLOCKS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"block_size": 8}, "block size is 4, not 8"), ({"num_blocks": 17}, "for 16 blocks, not 17")],
)
def test_another_geometry_starts_empty_and_says_so(
    loaded: Any, start: Callable[..., Any], caplog: pytest.LogCaptureFixture, changes: dict[str, int], reason: str
) -> None:
    life = start(**changes)
    assert reason in caplog.text
    assert not life.engine.former_life.awaits_pool
    assert life.match(1, 2, 3) == 0


def test_a_torn_record_is_dropped_and_its_blocks_wait(loaded: Any, start: Callable[..., Any], path: Path) -> None:
    node = next(iter(loaded.engine.cache.nodes()))
    loaded.kill()
    directory = BlockDirectory.open(path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    directory._words[node.blocks[1], 20] ^= 1
    directory.close()
    life = start()
    life.register_pool()
    report = life.engine.former_life.report
    assert (report.restored_blocks, report.dropped_blocks) == (1, 2)
    assert life.match(1, 2, 3) == 1
    assert life.quarantined == 1 + 2 + 3
    life.engine.check()
    life.register("w")
    assert life.free == NUM_BLOCKS - 1


def test_a_torn_client_slot_is_waited_out(loaded: Any, start: Callable[..., Any], path: Path, clock: Any) -> None:
    loaded.kill()
    directory = BlockDirectory.open(path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    directory._clients_region[16] ^= 1
    directory.close()
    life = start()
    life.register_pool()
    life.register("w")
    assert not life.engine.former_life.is_over, "nobody can tell who that was"
    clock.now += TTL_S + GRACE_S
    life.engine.sweep()
    assert life.engine.former_life.is_over
    clock.now += GRACE_S
    life.engine.sweep()
    life.register("v")
    assert start().engine.former_life.report.former_clients == 1, "only who registered since"


def test_damage_is_refused_and_the_lock_given_back(loaded: Any, start: Callable[..., Any], path: Path) -> None:
    loaded.kill()
    (log,) = path.glob("interned.*")
    log.write_bytes(log.read_bytes()[:30])
    for _ in range(2):
        with pytest.raises(DirectoryDamaged, match="--reset-directory"):
            start()


def test_a_directory_in_use_is_refused(loaded: Any, path: Path, clock: Any, make_life: type) -> None:
    with pytest.raises(DirectoryInUse):
        make_life(path, clock)


def test_a_full_disk_refuses_one_commit_and_loses_nothing(
    loaded: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = loaded.register("x")
    handle = worker.acquire(6, 7)

    def full(*_: object) -> None:
        raise DirectoryNoSpace("directory cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(BlockDirectory, "prepare", full)
        with pytest.raises(DirectoryNoSpace):
            worker.commit(handle, 2)
    status = status_from_error(DirectoryNoSpace("x"))
    assert status.code == 8, "RESOURCE_EXHAUSTED"
    loaded.engine.check()
    assert loaded.match(6, 7) == 0
    worker.commit(handle, 2)
    assert loaded.match(6, 7) == 2


def test_without_a_directory_there_is_nothing_to_recover(clock: Any, make_life: type) -> None:
    life = make_life(None, clock)
    worker = life.register("w")
    worker.store(1)
    worker.unregister()
    life.engine.sweep()
    life.engine.check()
    former = life.engine.former_life
    assert former.is_over
    assert not former.awaits_pool
    assert former.report.started_empty_because == "the manager has no directory"
