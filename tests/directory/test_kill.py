"""Real processes: `radixpool serve --directory` killed with SIGKILL under load, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from radixpool.radix.errors import PoolExhausted, RadixPoolError, UnknownSequence
from radixpool.radix.namespace import Namespace
from radixpool.rpc.client import Client, ClientOptions, ClientRole
from radixpool.rpc.client.retry import NO_RETRY
from radixpool.rpc.directory.errors import DirectoryNoSpace
from radixpool.rpc.errors import Fenced, ManagerUnavailable
from radixpool.rpc.pool_types import KvDtype, MemfdAttachment, Pool, PoolLayout, PoolSpec

NUM_BLOCKS, BLOCK_SIZE = 512, 4
ROUNDS = int(os.environ.get("RADIXPOOL_KILL_ROUNDS", "2"))
POOL = Pool(
    b"p" * 16,
    PoolSpec(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        dtype=KvDtype.FLOAT32,
        layout=PoolLayout.HND,
    ),
    MemfdAttachment("@nowhere", 1),
)


class Manager:
    """`radixpool serve` as a process that can be killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/m.sock"
        self.directory = folder / "directory"
        self.process: subprocess.Popen[str] | None = None

    def command(self, *extra: str) -> list[str]:
        sizes = ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE), "--lease-ttl-ms", "3000"]
        where = ["--listen", self.address, "--directory", str(self.directory)]
        return [sys.executable, "-m", "radixpool.rpc.cli", "serve", "--json", *where, *sizes, *extra]

    def start(self, *extra: str, begin: Sequence[str] = ()) -> dict[str, Any]:
        """Start it with more options; `begin` comes before the command."""
        self.process = subprocess.Popen(
            [*begin, *self.command(*extra)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        ready: dict[str, Any] = json.loads(line)
        return ready

    def kill(self) -> str:
        """Kill it and return what it had written on stderr."""
        assert self.process is not None
        self.process.kill()
        errors: str = self.process.communicate(timeout=20)[1]
        self.process = None
        return errors

    def client(self, name: str, role: ClientRole = ClientRole.WORKER, **options: Any) -> Client:
        client_id = name.encode().ljust(16, b"\0")
        return Client(self.address, options=ClientOptions(name=name, role=role, client_id=client_id, **options))

    def register_pool(self) -> Client:
        holder = self.client("holder", ClientRole.POOL_HOLDER)
        holder.register_pool(POOL)
        return holder


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def manager() -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(prefix="rp", dir="/tmp") as folder:
        manager = Manager(Path(folder))
        yield manager
        if manager.process is not None:
            manager.kill()


def prompt(*path: int) -> list[int]:
    """Whole blocks named by a path, and one token more."""
    return [token for block in path for token in range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)] + [1]


class Load:
    """A worker that stores random prompts until the manager is gone; every block it writes is stamped.

    Attributes:
        committed: prompts whose commit was answered, each with its block table.
        written: for each physical block the prefix that was last written to it, whole or half.

    """

    def __init__(self, manager: Manager, name: str, seed: int, memory: dict[int, tuple[int, ...]]) -> None:
        self.committed: list[tuple[int, ...]] = []
        self._client = manager.client(name, retry=NO_RETRY)
        self._rng = random.Random(seed)
        self._memory = memory
        self._base = (seed % 50 + 1) * 1000
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()
        self._client.close()

    def _run(self) -> None:
        rng = self._rng
        while True:
            path = tuple(self._base + rng.randrange(6) for _ in range(rng.randrange(1, 8)))
            try:
                self._request(path)
            except PoolExhausted:
                time.sleep(0.001)
            except (ManagerUnavailable, RadixPoolError):
                return

    def _request(self, path: tuple[int, ...]) -> None:
        sequence = self._client.acquire(prompt(*path))
        cached = sequence.cached_tokens // BLOCK_SIZE
        table = sequence.block_table.tolist()
        for i, block in enumerate(table[: len(path)]):
            if i < cached:
                assert self._memory.get(block) == path[: i + 1], "a hit on a block that holds something else"
            else:
                self._memory[block] = path[: i + 1]
        committed = sequence.commit(len(path) * BLOCK_SIZE)
        assert committed is not None
        self.committed.append(path)
        if self._rng.random() < 0.9:
            sequence.release()


def register(*clients: Client) -> None:
    """A client registers with its first call that changes something, even if that is refused."""
    for client in clients:
        with contextlib.suppress(PoolExhausted):
            client.acquire([1]).release()


def check_all(client: Client, paths: set[tuple[int, ...]], memory: dict[int, tuple[int, ...]]) -> int:
    """Hit every prompt that was ever stored and compare each block with what was last written to it."""
    hits = 0
    for path in sorted(paths):
        with client.acquire(prompt(*path)) as sequence:
            cached = sequence.cached_tokens // BLOCK_SIZE
            for i, block in enumerate(sequence.block_table.tolist()[: len(path)]):
                if i < cached:
                    assert memory[block] == path[: i + 1], "a hit on a block that holds something else"
                else:
                    memory[block] = ()
            hits += cached
    return hits


def test_kill_9_under_load_loses_nothing_committed_and_serves_nothing_stale(manager: Manager) -> None:
    memory: dict[int, tuple[int, ...]] = {}
    paths: set[tuple[int, ...]] = set()
    for round_ in range(ROUNDS):
        manager.start()
        manager.register_pool().close()
        loads = [Load(manager, f"w{i}", seed=10 * round_ + i, memory=memory) for i in range(2)]
        time.sleep(0.7)
        manager.kill()
        for load in loads:
            load.join()
            assert len(load.committed) > 10, "there was load"
            paths.update(load.committed)

        manager.start()
        manager.register_pool().close()
        with manager.client("w0") as first, manager.client("w1") as second:
            lately = {load.committed[-1] for load in loads}
            for path in lately:
                assert first.match(prompt(*path)).cached_tokens == len(path) * BLOCK_SIZE, "the last commits are there"
            register(first, second)
            assert check_all(first, paths, memory) >= max(map(len, lately))
            assert first.check().violations == ()
        manager.kill()


def test_after_a_kill_handles_are_void_and_half_written_blocks_wait_for_their_worker(manager: Manager) -> None:
    manager.start()
    manager.register_pool().close()
    worker = manager.client("worker")
    stored = worker.acquire(prompt(1, 2))
    stored.commit(2 * BLOCK_SIZE)
    half = worker.acquire(prompt(7, 8, 9))
    half.commit(BLOCK_SIZE)
    incarnation = worker.stats().incarnation
    manager.kill()

    manager.start()
    observer = manager.client("observer", ClientRole.OPERATOR)
    with pytest.raises(ManagerUnavailable, match="pool"):
        manager.client("impatient", retry=NO_RETRY).match(prompt(1))
    manager.register_pool().close()
    assert observer.match(prompt(1, 2)).cached_tokens == 2 * BLOCK_SIZE
    assert observer.match(prompt(7, 8, 9)).cached_tokens == BLOCK_SIZE
    stats = observer.stats()
    assert stats.incarnation > incarnation
    in_trees, half_written = 3, 3 + 1  # the last block of each prompt is private, and two of the second
    assert stats.cache.quarantined_blocks == in_trees + half_written
    with manager.client("other") as other:
        everything = [int(token) for token in range(10**6, 10**6 + (NUM_BLOCKS - 7) * BLOCK_SIZE)]
        sequence = other.acquire(everything)
        assert not set(sequence.block_table.tolist()) & set(half.block_table.tolist())
        with pytest.raises(PoolExhausted):
            other.acquire(prompt(5))
    assert observer.stats().cache.quarantined_blocks == in_trees + half_written
    with pytest.raises((Fenced, UnknownSequence)):  # the latter if its heartbeat has noticed and it registered again
        worker.commit(half.handle, 3 * BLOCK_SIZE)
    register(worker)
    assert observer.stats().cache.quarantined_blocks == 0, "it has registered again"
    assert observer.match(prompt(7, 8, 9)).cached_tokens == BLOCK_SIZE
    worker.close()
    observer.close()


def test_a_full_disk_refuses_new_namespaces_and_loses_nothing(
    manager: Manager, limit_files: Callable[[int], list[str]]
) -> None:
    def store(client: Client, number: int) -> None:
        namespace = Namespace(*("x" * 500,) * 3, 0, "t" * 500, cache_salt=f"{number}" * 100)
        with client.acquire(prompt(number), namespace=namespace) as sequence:
            sequence.commit(BLOCK_SIZE)
        assert client.match(prompt(number), namespace=namespace).cached_tokens == BLOCK_SIZE

    manager.start(begin=limit_files(400_000))
    manager.register_pool().close()
    with manager.client("w") as client:
        stored = 0
        with pytest.raises(DirectoryNoSpace, match="cannot be written"):
            while True:
                store(client, stored)
                stored += 1
        assert stored > 100
        store(client, 0)
        assert client.check().violations == ()
        assert client.stats().cache.held_blocks == 0
        manager.kill()
    manager.start()
    manager.register_pool().close()
    with manager.client("w") as client:
        assert client.stats().cache.num_namespaces == stored
        for number in range(stored + 1):
            store(client, number)
        assert client.stats().cache.committed_blocks == 1, "only the refused one was missing"


def run_serve(manager: Manager, *extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        manager.command(*extra), capture_output=True, text=True, timeout=30, env=_environment(), check=False
    )


def test_a_second_manager_on_one_directory_does_not_start(manager: Manager) -> None:
    manager.start()
    second = run_serve(manager, "--listen", "127.0.0.1:0")
    assert second.returncode == 4
    assert re.search(rf"directory .* is open in another manager \(process {manager.process.pid}\)", second.stderr)


def test_a_damaged_directory_is_refused_and_reset_is_the_way_out(manager: Manager) -> None:
    manager.start()
    manager.kill()
    with (manager.directory / "blocks").open("r+b") as file:
        file.write(b"x")
    refused = run_serve(manager)
    assert refused.returncode == 1
    assert "is damaged: header magic" in refused.stderr
    assert "--reset-directory" in refused.stderr
    manager.start("--reset-directory")
    assert "the directory is new: the cache starts empty" in manager.kill()


def test_another_block_size_starts_empty_and_says_so(manager: Manager) -> None:
    manager.start()
    manager.kill()
    manager.start("--block-size", "8")
    assert "its block size is 4, not 8" in manager.kill()


def test_reset_without_a_directory_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "radixpool.rpc.cli", "serve", "--listen", "127.0.0.1:0", "--reset-directory"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, env=_environment(), check=False)
    assert ran.returncode == 2
    assert "--reset-directory needs --directory" in ran.stderr
