"""Managers, workers and frontends that are killed and frozen under load: nothing stale is served, nothing is lost.

CI runs a few rounds; `make chaos ROUNDS=100` runs many. Every round hurts one process, waits until the load is through
it, and proves the manager's invariants; every process checks every cached block that it is given (see load.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.client import NO_RETRY, Client, ClientOptions, ClientRole
from radixpool.rpc.pool_types import KvDtype, MemfdAttachment, Pool, PoolLayout, PoolSpec

ROUNDS = int(os.environ.get("RADIXPOOL_CHAOS_ROUNDS", "6"))
SEED = int(os.environ.get("RADIXPOOL_CHAOS_SEED", "1"))
NUM_BLOCKS, BLOCK_SIZE, STAMP_BYTES = 96, 4, 32
TTL_S = 0.6
ROLES = ["worker"] * 2 + ["frontend"] * 4
SPEC = PoolSpec(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    dtype=KvDtype.FLOAT32,
    layout=PoolLayout.HND,
)


class House:
    """One manager with a directory, one pool, and the processes that load it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix:{folder}/m.sock"
        self.pool_path = folder / "pool"
        self.pool_path.write_bytes(bytes(NUM_BLOCKS * STAMP_BYTES))
        self.pool = Pool(os.urandom(16), SPEC, MemfdAttachment(str(self.pool_path), NUM_BLOCKS * STAMP_BYTES))
        self.seed = SEED * 1000
        self.manager = self._start_manager()
        self._ended = threading.Event()
        self._holder = threading.Thread(target=self._hold_pool)
        self._holder.start()
        self.load = [self._start_load(role) for role in ROLES]

    def _start_manager(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "radixpool.rpc.cli", "serve", "--json", "--listen", self.address]
        command += ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE)]
        command += ["--lease-ttl-ms", str(int(TTL_S * 1000)), "--directory", str(self.folder / "directory")]
        log = (self.folder / "manager.log").open("a")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        log.close()
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["address"] == self.address
        return process

    def _start_load(self, role: str) -> subprocess.Popen[str]:
        self.seed += 1
        script = str(Path(__file__).with_name("load.py"))
        command = [sys.executable, script, role, self.address, str(self.pool_path), str(self.seed)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def _hold_pool(self) -> None:
        options = ClientOptions(name="pool", role=ClientRole.POOL_HOLDER, retry=NO_RETRY, timeout_s=2)
        with Client(self.address, options=options) as client:
            while not self._ended.wait(0.05):
                with suppress(RadixPoolError):
                    if client.get_pool() is None:
                        client.register_pool(self.pool)

    def kill_manager(self) -> None:
        self.manager.kill()
        self.manager.communicate()
        self.manager = self._start_manager()

    def freeze_manager(self) -> None:
        freeze(self.manager)

    def kill(self, role: str, chance: random.Random) -> None:
        index = chance.choice([i for i, other in enumerate(ROLES) if other == role])
        self.load[index].kill()
        self.load[index].communicate()
        self.load[index] = self._start_load(role)

    def freeze(self, role: str, chance: random.Random) -> None:
        freeze(chance.choice([process for process, other in zip(self.load, ROLES, strict=True) if other == role]))

    def prove(self) -> None:
        """Fail unless every process is well, the manager's invariants hold and the load goes on."""
        for process in self.load:
            assert process.poll() is None, process.communicate()[0]
        with Client(self.address) as client:
            assert client.check().violations == ()
            before = client.stats().cache.admitted_requests
            deadline = time.monotonic() + 30
            while client.stats().cache.admitted_requests < before + 20:
                assert time.monotonic() < deadline, "the load has stopped"
                time.sleep(0.02)

    def end(self) -> None:
        """Stop everything; prove that all blocks came back and that nothing is left behind."""
        for process in self.load:
            process.kill()
            process.communicate()
        try:
            with Client(self.address) as client:
                deadline = time.monotonic() + 30
                while True:
                    cache = client.stats().cache
                    if cache.held_blocks == cache.quarantined_blocks == 0:
                        break
                    assert time.monotonic() < deadline, cache
                    time.sleep(0.05)
                assert client.check().violations == ()
        finally:
            self._ended.set()
            self._holder.join()
            self.manager.terminate()
            self.manager.communicate(timeout=30)
        assert self.manager.returncode == 0
        left = {path.name for path in self.folder.iterdir()} - {"pool", "directory", "manager.log"}
        assert left == set()


def freeze(process: subprocess.Popen[str]) -> None:
    """Stop a process until its lease is long over."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(3 * TTL_S)
    process.send_signal(signal.SIGCONT)


@pytest.fixture
def house() -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="rpchaos", dir="/tmp") as folder:
        house = House(Path(folder))
        yield house
        for process in [*house.load, house.manager]:
            if process.poll() is None:
                process.kill()
                process.communicate()
        house._ended.set()
        house._holder.join()


def test_nothing_stale_and_nothing_lost(house):
    chance = random.Random(SEED)
    hurts: dict[str, Callable[[], None]] = {
        "the manager is killed": house.kill_manager,
        "the manager is frozen": house.freeze_manager,
        "a worker is killed": lambda: house.kill("worker", chance),
        "a worker is frozen": lambda: house.freeze("worker", chance),
        "a frontend is killed": lambda: house.kill("frontend", chance),
        "a frontend is frozen": lambda: house.freeze("frontend", chance),
    }
    house.prove()
    for number in range(ROUNDS):
        what = list(hurts)[number % len(hurts)] if number < len(hurts) else chance.choice(list(hurts))
        print(f"round {number + 1} of {ROUNDS}: {what}", flush=True)
        time.sleep(chance.random() * 0.2)
        hurts[what]()
        house.prove()
    house.end()
