"""Helpers for the tests of the block directory."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from radixpool.radix import rebuild
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.rpc.directory import BlockDirectory

BLOCK_SIZE = 4


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
