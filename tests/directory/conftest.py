"""Helpers for the tests of the block directory."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from radixpool.radix import rebuild
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.rpc.directory import BlockDirectory
from radixpool.rpc.liveness import own_process
from radixpool.rpc.manager.engine import Engine
from radixpool.rpc.manager.options import ManagerOptions
from radixpool.rpc.manager.recovery import open_former_life
from radixpool.v1 import cache_pb2, common_pb2, pool_pb2

NUM_BLOCKS, BLOCK_SIZE, TTL_S = 16, 4, 10.0
LIMITED = (
    "import os, resource, sys; n = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


@pytest.fixture
def limit_files() -> Callable[[int], list[str]]:
    """Return what begins a command so that no file grows beyond a number of bytes: a full disk, to a program.

    Not by preexec_fn: gRPC's threads do not survive a fork and abort the child now and then.
    """
    return lambda max_bytes: [sys.executable, "-c", LIMITED, str(max_bytes)]


@pytest.fixture
def path() -> Iterator[Path]:
    """Name a folder that is not there yet, on a memory file system where there is one."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="radixpool-test-", dir=shm if shm.is_dir() else None))
    yield folder / "directory"
    shutil.rmtree(folder)


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., BlockDirectory]]:
    """Open the directory at `path`, closing the one opened before."""
    current: list[BlockDirectory] = []

    def close() -> None:
        while current:
            current.pop().close()

    def open_directory(num_blocks: int = 32, block_size: int = BLOCK_SIZE) -> BlockDirectory:
        close()
        current.append(BlockDirectory.open(path, num_blocks=num_blocks, block_size=block_size))
        return current[0]

    yield open_directory
    close()


def tokens_of(*blocks: int) -> bytes:
    """Tokens that differ in every block: block `b` holds 100b, 100b + 1, …"""
    return (
        (np.repeat(np.array(blocks), BLOCK_SIZE) * 100 + np.tile(np.arange(BLOCK_SIZE), len(blocks)))
        .astype("<u4")
        .tobytes()
    )


@pytest.fixture
def store() -> Callable[..., None]:
    """Store a run whose tokens follow from its block ids."""

    def store_run(
        directory: BlockDirectory,
        *blocks: int,
        parent: int = -1,
        position: int = 0,
        namespace: Namespace = DEFAULT_NAMESPACE,
        last_use: int = 1,
        media: bytes = b"",
    ) -> None:
        directory.handed_out(blocks)
        directory.prepare(namespace, media)
        directory.stored(
            blocks,
            tokens_of(*blocks),
            parent=parent,
            position=position,
            namespace=namespace,
            last_use=last_use,
            media=media,
        )

    return store_run


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Load the plain module of that name beside this file; what a failed test left of it is removed.

    Fences of a former life are lifted run by run, so that kills and operations come in between.
    """
    monkeypatch.setattr(rebuild, "_RUNS_PER_FENCE", 1)
    monkeypatch.setattr(rebuild, "_BLOCKS_PER_FENCE", 2)
    monkeypatch.setattr(rebuild, "FENCES_PER_SLICE", 2)
    name = "radixpool_tests_directory_killing"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "killing.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    yield sys.modules[name]
    for manager in list(sys.modules[name].KilledManager.alive):
        manager.close()


POOL_ID = b"p" * 16


class Life:
    """One life of a manager; `kill` ends it without a word."""

    def __init__(self, path: Path | None, clock: Callable[[], float], **changes: Any) -> None:
        values = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "lease_ttl_ms": int(TTL_S * 1000), **changes}
        options = ManagerOptions(listen="127.0.0.1:0", directory=str(path) if path else "", **values)
        self.engine = Engine(options, clock=clock, former_life=open_former_life(options, clock=clock))
        self._request_ids = itertools.count(1)

    def kill(self) -> None:
        self.engine.former_life.close()  # only unmaps and unlocks, as the kernel does for a dead process

    def register(self, name: str, role: int = cache_pb2.CLIENT_ROLE_WORKER, *, pid: int = 0) -> Client:
        client_id = name.encode().ljust(16, b"\0")
        own = own_process()
        process = cache_pb2.ProcessIdentity(pid=pid, namespace=own.namespace, boot_id=own.boot_id) if pid else None
        epoch = self.engine.register_client(client_id, name=name, role=role, process=process)
        return Client(self, client_id, epoch)

    def register_pool(self, pool_id: bytes = POOL_ID, *, name: str = "holder") -> None:
        self.register(name, cache_pb2.CLIENT_ROLE_POOL_HOLDER).register_pool(pool_id)

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


@pytest.fixture
def make_life() -> type[Life]:
    return Life
