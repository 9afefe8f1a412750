"""Who of a former life may still touch blocks, and until when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixpool.radix.errors import PoolExhausted
from radixpool.rpc.manager import recovery
from radixpool.rpc.manager.recovery import GRACE_S
from radixpool.v1 import cache_pb2

NUM_BLOCKS, TTL_S = 16, 10.0
FRONTEND = cache_pb2.CLIENT_ROLE_FRONTEND
OTHER_POOL = b"q" * 16


def test_what_an_old_worker_may_write_to_stays_out_of_use_until_it_registers_again(
    loaded: Any, start: Callable[..., Any]
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


def test_a_worker_that_stays_away_is_waited_out(loaded: Any, start: Callable[..., Any], clock: Any) -> None:
    life = start()
    life.register_pool()
    clock.now += TTL_S + GRACE_S - 0.001
    life.engine.sweep()
    assert life.quarantined == 6
    clock.now += 0.001
    life.engine.sweep()
    assert (life.quarantined, life.free) == (0, NUM_BLOCKS - 3)


def test_a_worker_that_is_dead_is_not_waited_for(start: Callable[..., Any]) -> None:
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
    return state_of(pid) == "Z"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def wait_for_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 10
    while state_of(pid) != state:
        assert time.monotonic() < deadline, state_of(pid)
        time.sleep(0.001)


def test_a_worker_whose_lease_ended_is_waited_for_as_long_as_its_steps_may_run(
    start: Callable[..., Any], clock: Any
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
    loaded: Any, start: Callable[..., Any], clock: Any
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


def test_clients_that_left_or_never_hold_blocks_are_not_waited_for(start: Callable[..., Any], clock: Any) -> None:
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


def test_a_client_is_remembered_until_its_last_sequence_is_swept(start: Callable[..., Any]) -> None:
    life = start()
    life.register_pool()
    worker = life.register("w")
    worker.acquire(1)
    worker.unregister()
    assert start().engine.former_life.report.former_clients == 1, "killed before the sweep"


def test_a_worker_that_is_frozen_is_waited_for(start: Callable[..., Any], clock: Any, caplog: Any) -> None:
    """When it thaws it goes on with the step it was in, and writes to blocks that it had been given."""
    life = start()
    life.register_pool()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        life.register("w", pid=process.pid).acquire(4, 5)
        life.register("f", FRONTEND, pid=process.pid).acquire(6)
        process.send_signal(signal.SIGSTOP)
        wait_for_state(process.pid, "T")
        life = start()
        life.register_pool()
        for _ in range(3):
            clock.now += 10 * (TTL_S + GRACE_S)
            life.register_pool()
            life.engine.sweep()
            assert life.quarantined == 3 + 2, "it may still write"
        assert caplog.text.count(f"fenced until they go on, or end; process ids: {process.pid}\n") == 1
        process.send_signal(signal.SIGCONT)
        wait_for_state(process.pid, "S")
        clock.now += GRACE_S - 0.001
        life.engine.sweep()
        assert life.quarantined == 3 + 2, "it may be in the middle of its step"
        clock.now += 0.001
        life.engine.sweep()
        assert (life.quarantined, life.free) == (0, NUM_BLOCKS)
        process.kill()


def test_who_is_silent_is_waited_out_though_it_runs(start: Callable[..., Any], clock: Any) -> None:
    """An idle engine does not register again before its next request."""
    life = start()
    life.register_pool()
    life.register("f", FRONTEND, pid=os.getpid()).acquire(6)
    life.register("w", pid=os.getpid()).acquire(7)
    life = start()
    life.register_pool()
    clock.now += TTL_S + GRACE_S
    life.engine.sweep()
    assert life.engine.former_life.is_over


def test_another_pool_leaves_no_client_of_the_former_one_behind(start: Callable[..., Any], clock: Any) -> None:
    """Their entries stayed, each restart waited for them, and a full table would have taken in nobody any more."""
    life = start()
    life.register_pool()
    clock.now += TTL_S - 1
    clients = {name: life.register(name, FRONTEND) for name in ("idle", "busy", "dying")}
    clients["busy"].acquire(1)
    clock.now += 1
    life.engine.sweep()
    clients["dying"].acquire(2)
    clients["dying"].unregister()
    life.register_pool(OTHER_POOL, name="another holder")
    life.engine.check()
    life = start()
    assert life.engine.former_life.report.former_clients == 0


def test_many_processes_are_looked_at_in_turn(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at each of 4,096 at every sweep would hold up the manager; workers are looked at every time."""
    life = start()
    life.register_pool()
    for number in range(10):
        life.register(f"f{number}", FRONTEND, pid=os.getpid())
    life.register("w", pid=os.getpid())
    life = start()
    monkeypatch.setattr(recovery, "LOOKS_PER_POLL", 4)
    looked: list[str] = []
    former = life.engine.former_life
    for _ in range(5):
        looked += sorted(client_id.rstrip(b"\0").decode() for client_id, _ in former._next_looks())
    assert looked == [
        *("f0", "f1", "f2", "f3", "w"), *("f4", "f5", "f6", "f7", "w"), *("f0", "f1", "f8", "f9", "w"),
        *("f2", "f3", "f4", "f5", "w"), *("f6", "f7", "f8", "f9", "w"),
    ]  # fmt: skip
