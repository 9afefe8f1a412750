"""From one life of the manager to the next, with a clock in the test's hand and no sockets."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixpool.radix import rebuild
from radixpool.radix.errors import PoolExhausted, UnknownSequence
from radixpool.rpc.directory import BlockDirectory, DirectoryDamaged, DirectoryInUse, DirectoryNoSpace
from radixpool.rpc.errors import Fenced, Recovering
from radixpool.rpc.liveness import own_process
from radixpool.rpc.manager.engine import Engine
from radixpool.rpc.manager.options import ManagerOptions
from radixpool.rpc.manager.recovery import GRACE_S, open_former_life
from radixpool.rpc.status import status_from_error
from radixpool.v1 import cache_pb2, common_pb2, pool_pb2

NUM_BLOCKS, BLOCK_SIZE, TTL_S = 16, 4, 10.0
WORKER, FRONTEND, HOLDER = (
    cache_pb2.CLIENT_ROLE_WORKER,
    cache_pb2.CLIENT_ROLE_FRONTEND,
    cache_pb2.CLIENT_ROLE_POOL_HOLDER,
)
POOL, OTHER_POOL = b"p" * 16, b"q" * 16


class Life:
    """One life of a manager; `kill` ends it without a word."""

    def __init__(self, path: Path | None, clock: Callable[[], float], **changes: Any) -> None:
        values = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "lease_ttl_ms": int(TTL_S * 1000), **changes}
        options = ManagerOptions(listen="127.0.0.1:0", directory=str(path) if path else "", **values)
        self.engine = Engine(options, clock=clock, former_life=open_former_life(options, clock=clock))
        self._request_ids = itertools.count(1)

    def kill(self) -> None:
        self.engine.former_life.close()  # only unmaps and unlocks, as the kernel does for a dead process

    def register(self, name: str, role: int = WORKER, *, pid: int = 0) -> Client:
        client_id = name.encode().ljust(16, b"\0")
        own = own_process()
        process = cache_pb2.ProcessIdentity(pid=pid, namespace=own.namespace, boot_id=own.boot_id) if pid else None
        epoch = self.engine.register_client(client_id, name=name, role=role, process=process)
        return Client(self, client_id, epoch)

    def register_pool(self, pool_id: bytes = POOL, *, name: str = "holder") -> None:
        self.register(name, HOLDER).register_pool(pool_id)

    def match(self, *blocks: int) -> int:
        reply = cache_pb2.MatchResponse()
        self.engine.match(cache_pb2.MatchRequest(tokens=tokens(*blocks)), reply)
        return reply.cached_tokens // BLOCK_SIZE

    @property
    def quarantined(self) -> int:
        return self.engine.cache.stats().quarantined_blocks

    @property
    def free(self) -> int:
        return self.engine.cache.stats().free_blocks


class Client:
    """A registered client."""

    def __init__(self, life: Life, client_id: bytes, epoch: int) -> None:
        self.life = life
        self._client_id = client_id
        self._epoch = epoch

    def header(self) -> common_pb2.RequestHeader:
        request_id = next(self.life._request_ids)
        return common_pb2.RequestHeader(client_id=self._client_id, epoch=self._epoch, request_id=request_id)

    def acquire(self, *blocks: int) -> bytes:
        request = cache_pb2.AcquireRequest(header=self.header(), tokens=tokens(*blocks))
        reply = cache_pb2.AcquireResponse()
        self.life.engine.run("acquire", request, reply)
        return reply.handle

    def commit(self, handle: bytes, num_blocks: int) -> None:
        request = cache_pb2.CommitRequest(header=self.header(), handle=handle, upto_tokens=num_blocks * BLOCK_SIZE)
        self.life.engine.run("commit", request, cache_pb2.CommitResponse())

    def release(self, handle: bytes) -> None:
        request = cache_pb2.ReleaseRequest(header=self.header(), handle=handle)
        self.life.engine.run("release", request, cache_pb2.ReleaseResponse())

    def store(self, *blocks: int) -> None:
        handle = self.acquire(*blocks)
        self.commit(handle, len(blocks))
        self.release(handle)

    def unregister(self) -> None:
        self.life.engine.unregister_client(self.header())

    def register_pool(self, pool_id: bytes) -> None:
        spec = pool_pb2.PoolSpec(
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            dtype=pool_pb2.KV_DTYPE_FLOAT32,
            layout=pool_pb2.POOL_LAYOUT_HND,
        )
        attachment = pool_pb2.PoolAttachment(memfd=pool_pb2.MemfdAttachment(socket_path="@p", size_bytes=1))
        pool = pool_pb2.Pool(pool_id=pool_id, spec=spec, attachment=attachment)
        request = pool_pb2.RegisterPoolRequest(header=self.header(), pool=pool)
        self.life.engine.register_pool(request, pool_pb2.RegisterPoolResponse())


def tokens(*blocks: int) -> bytes:
    """A prompt of whole blocks, named by their content, and one token more."""
    ids = [content * 10 + i for content in blocks for i in range(BLOCK_SIZE)] + [1]
    return b"".join(token.to_bytes(4, "little") for token in ids)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(path: Path, clock: Clock) -> Iterator[Callable[..., Life]]:
    """Start a life of the manager, after killing the one before."""
    lives: list[Life] = []

    def start_life(**changes: Any) -> Life:
        while lives:
            lives.pop().kill()
        lives.append(Life(path, clock, **changes))
        return lives[0]

    yield start_life
    for life in lives:
        life.engine.check()
        life.kill()


@pytest.fixture
def loaded(start: Callable[..., Life]) -> Life:
    """A life with a pool, a worker "w" that stored 1-2-3 and computes 4-5 (three blocks), killed in that state."""
    life = start()
    life.register_pool()
    worker = life.register("w")
    worker.store(1, 2, 3)
    worker.acquire(4, 5)
    life.engine.check()
    return life


def test_nothing_is_served_before_the_pool_is_back(loaded: Life, start: Callable[..., Life]) -> None:
    life = start()
    worker = life.register("w")
    for call in (lambda: life.match(1, 2, 3), lambda: worker.acquire(1), lambda: worker.store(7)):
        with pytest.raises(Recovering, match="pool"):
            call()
    assert status_from_error(Recovering("x")).code == 14, "UNAVAILABLE: clients try again"
    life.register_pool()
    assert life.match(1, 2, 3) == 3
    assert life.match(4, 5) == 0, "it was never committed"


def test_what_an_old_worker_may_write_to_stays_out_of_use_until_it_registers_again(
    loaded: Life, start: Callable[..., Life]
) -> None:
    life = start()
    life.register_pool()
    report = life.engine.former_life.report
    assert (report.restored_blocks, report.unwritten_blocks, report.former_clients) == (4 - 1, 3, 1)
    assert (life.quarantined, life.free) == (6, NUM_BLOCKS - 6)
    other = life.register("somebody else")
    with pytest.raises(PoolExhausted):
        other.acquire(*range(100, 100 + NUM_BLOCKS - 6))
    assert not life.engine.former_life.is_over
    life.register("w")
    assert life.engine.former_life.is_over
    assert (life.quarantined, life.free) == (0, NUM_BLOCKS - 3)
    assert life.match(1, 2, 3) == 3


def test_a_worker_that_stays_away_is_waited_out(loaded: Life, start: Callable[..., Life], clock: Clock) -> None:
    life = start()
    life.register_pool()
    clock.now += TTL_S + GRACE_S - 0.001
    life.engine.sweep()
    assert life.quarantined == 6
    clock.now += 0.001
    life.engine.sweep()
    assert (life.quarantined, life.free) == (0, NUM_BLOCKS - 3)


def test_a_worker_that_is_dead_is_not_waited_for(start: Callable[..., Life]) -> None:
    """Its process is known by number and start, so that a later process with its number does not pass for it."""
    life = start()
    life.register_pool()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        life.register("w", pid=process.pid).acquire(4, 5)
        life = start()
        life.register_pool()
        life.engine.sweep()
        assert life.quarantined == 3, "it lives"
        process.kill()
        while not zombie(process.pid):
            time.sleep(0.001)
        life.engine.sweep()
        assert life.quarantined == 0, "even before its parent has taken notice"
    again = start()
    assert again.engine.former_life.report.former_clients == 0


def zombie(pid: int) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_worker_whose_lease_ended_is_waited_for_as_long_as_its_steps_may_run(
    start: Callable[..., Life], clock: Clock
) -> None:
    life = start()
    life.register_pool()
    life.register("w").acquire(4, 5)
    clock.now += TTL_S
    life.register_pool()
    life.engine.sweep()
    life = start()
    assert life.engine.former_life.report.former_clients == 1, "killed within the grace"
    life.register("w")
    clock.now += TTL_S
    life.engine.sweep()
    clock.now += GRACE_S
    life.engine.sweep()
    assert start().engine.former_life.report.former_clients == 0


def test_clients_of_a_longer_lease_are_waited_for_as_long_as_it_lasts(
    loaded: Life, start: Callable[..., Life], clock: Clock
) -> None:
    """Also through a life with a shorter one that was killed before the fence had passed."""
    for _ in range(2):
        life = start(lease_ttl_ms=500)
        life.register_pool()
        clock.now += 0.5 + GRACE_S
        life.engine.sweep()
        assert life.quarantined == 6
    clock.now += TTL_S - 0.5
    life.engine.sweep()
    assert life.quarantined == 0
    life.register("short")
    life = start()
    clock.now += 0.5 + GRACE_S
    life.engine.sweep()
    assert life.engine.former_life.is_over


def test_a_second_kill_before_the_fence_keeps_the_quarantine(loaded: Life, start: Callable[..., Life]) -> None:
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
    loaded: Life, start: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
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


def test_old_handles_and_epochs_are_fenced(loaded: Life, start: Callable[..., Life]) -> None:
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


def test_clients_that_left_or_never_hold_blocks_are_not_waited_for(start: Callable[..., Life], clock: Clock) -> None:
    life = start()
    life.register_pool()
    left = life.register("left")
    left.acquire(8, 9)
    left.unregister()
    expired = life.register("expired", FRONTEND)
    expired.acquire(6)
    clock.now += TTL_S
    life.register_pool()
    life.engine.sweep()
    life.register("operator", cache_pb2.CLIENT_ROLE_OPERATOR)
    life = start()
    life.register_pool()
    assert life.engine.former_life.report.former_clients == 0
    assert life.engine.former_life.is_over
    assert life.free == NUM_BLOCKS


def test_a_client_is_remembered_until_its_last_sequence_is_swept(start: Callable[..., Life]) -> None:
    life = start()
    life.register_pool()
    worker = life.register("w")
    worker.acquire(1)
    worker.unregister()
    assert start().engine.former_life.report.former_clients == 1, "killed before the sweep"


def test_another_pool_starts_a_new_generation_with_nothing_in_it(
    loaded: Life, start: Callable[..., Life], caplog: pytest.LogCaptureFixture
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
    start: Callable[..., Life], caplog: pytest.LogCaptureFixture
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
    loaded: Life, start: Callable[..., Life], caplog: pytest.LogCaptureFixture, changes: dict[str, int], reason: str
) -> None:
    life = start(**changes)
    assert reason in caplog.text
    assert not life.engine.former_life.awaits_pool
    assert life.match(1, 2, 3) == 0


def test_a_torn_record_is_dropped_and_its_blocks_wait(loaded: Life, start: Callable[..., Life], path: Path) -> None:
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


def test_a_torn_client_slot_is_waited_out(loaded: Life, start: Callable[..., Life], path: Path, clock: Clock) -> None:
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


def test_damage_is_refused_and_the_lock_given_back(loaded: Life, start: Callable[..., Life], path: Path) -> None:
    loaded.kill()
    (log,) = path.glob("interned.*")
    log.write_bytes(log.read_bytes()[:30])
    for _ in range(2):
        with pytest.raises(DirectoryDamaged, match="--reset-directory"):
            start()


def test_a_directory_in_use_is_refused(loaded: Life, path: Path, clock: Clock) -> None:
    with pytest.raises(DirectoryInUse):
        Life(path, clock)


def test_a_full_disk_refuses_one_commit_and_loses_nothing(
    loaded: Life, start: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
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


def test_without_a_directory_there_is_nothing_to_recover(clock: Clock) -> None:
    life = Life(None, clock)
    worker = life.register("w")
    worker.store(1)
    worker.unregister()
    life.engine.sweep()
    life.engine.check()
    former = life.engine.former_life
    assert former.is_over
    assert not former.awaits_pool
    assert former.report.started_empty_because == "the manager has no directory"
