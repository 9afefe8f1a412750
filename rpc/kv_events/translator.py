"""From the cache's events, which name blocks by their place in the pool, to events that name them by content.

Invariant, which `check` proves: a block has a name exactly while it is announced, together with the number of the
namespace it is announced in; a namespace is known while it has blocks. Memory: 16 bytes a block of the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from radixpool.radix.events import Cleared, Event, Removed, Snapshot, Stored
from radixpool.radix.namespace import Namespace
from radixpool.rpc.kv_events.hashes import root_hash, run_hashes
from radixpool.rpc.kv_events.messages import AllCleared, BlocksRemoved, BlocksStored, KvEvent

MAX_BLOCKS_PER_EVENT: Final = 128
"""A longer run is announced in pieces: messages stay small, and threads that serve get the interpreter in between."""
_NOWHERE: Final = 0


class _Home:
    """A namespace in which something is announced: its number, the name of its root, how many blocks."""

    __slots__ = ("num_blocks", "number", "root")

    def __init__(self, number: int, root: int) -> None:
        self.number = number
        self.root = root
        self.num_blocks = 0


class Translator:
    """Follows the events of one cache of `num_blocks` blocks."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._names: npt.NDArray[np.uint64] = np.zeros(num_blocks, dtype=np.uint64)
        self._numbers: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        self._homes: dict[Namespace, _Home] = {}
        self._next_number = itertools.count(_NOWHERE + 1)

    def restart(self, snapshot: Snapshot) -> Iterator[KvEvent]:
        """Yield what tells a consumer to forget everything and take in `snapshot`. O(its blocks)."""
        self._forget()
        yield AllCleared()
        for stored in snapshot.stored:
            yield from self._stored(stored)

    def translate(self, event: Event) -> Iterator[KvEvent]:
        """Yield what tells a consumer of `event`. O(blocks in it), of the pool when a namespace is cleared."""
        match event:
            case Stored():
                yield from self._stored(event)
            case Removed():
                yield from self._removed(event.namespace, np.frombuffer(event.blocks, dtype="<i4"))
            case Cleared(namespace=None):
                self._forget()
                yield AllCleared()
            case Cleared(namespace=Namespace() as namespace):
                home = self._homes.get(namespace)
                if home is not None:
                    yield from self._removed(namespace, np.flatnonzero(self._numbers == home.number))

    def check(self) -> None:
        """Raise AssertionError unless names, namespaces and counts agree."""
        announced = self._numbers != _NOWHERE
        assert not self._names[~announced].any(), "a block has a name and no namespace"
        numbers, counts = np.unique(self._numbers[announced], return_counts=True)
        found = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        assert found == {home.number: home.num_blocks for home in self._homes.values()}, "counts of blocks differ"

    def _stored(self, event: Stored) -> Iterator[BlocksStored]:
        home = self._home(event.namespace)
        blocks = np.frombuffer(event.blocks, dtype="<i4")
        tokens = np.frombuffer(event.tokens, dtype="<u4")
        parent = None if event.parent < 0 else int(self._names[event.parent])
        home.num_blocks += len(blocks)
        for start in range(0, len(blocks), MAX_BLOCKS_PER_EVENT):
            piece = blocks[start : start + MAX_BLOCKS_PER_EVENT]
            ids = tokens[start * self._block_size : (start + len(piece)) * self._block_size]
            above = home.root if parent is None else parent
            names = run_hashes(above, ids.tobytes(), block_size=self._block_size, media=event.media)
            self._names[piece] = names
            self._numbers[piece] = home.number
            yield BlocksStored(
                hashes=names,
                parent=parent,
                tokens=ids.tolist(),
                block_size=self._block_size,
                adapter=event.namespace.adapter or None,
                extra_keys=_extra_keys(event, first=start, count=len(piece)),
            )
            parent = names[-1]

    def _removed(self, namespace: Namespace, blocks: npt.NDArray[np.integer]) -> Iterator[BlocksRemoved]:
        home = self._homes.get(namespace)
        if home is None:
            return
        announced = blocks[self._numbers[blocks] == home.number]
        names = self._names[announced].tolist()
        self._names[announced] = 0
        self._numbers[announced] = _NOWHERE
        home.num_blocks -= len(names)
        if not home.num_blocks:
            del self._homes[namespace]
        for start in range(0, len(names), MAX_BLOCKS_PER_EVENT):
            yield BlocksRemoved(names[start : start + MAX_BLOCKS_PER_EVENT])

    def _home(self, namespace: Namespace) -> _Home:
        home = self._homes.get(namespace)
        if home is None:
            home = self._homes[namespace] = _Home(next(self._next_number), root_hash(namespace))
        return home

    def _forget(self) -> None:
        self._names[:] = 0
        self._numbers[:] = _NOWHERE
        self._homes.clear()


def _extra_keys(event: Stored, *, first: int, count: int) -> list[list[str] | None]:
    """Return per block what else its name depends on: the namespace at a prefix's first block, and its media.

    Both as digests: a salt must not be published, and a consumer only needs to see that names differ.
    """
    keys: list[list[str] | None] = [None] * count
    special = event.namespace != Namespace(model=event.namespace.model, adapter=event.namespace.adapter)
    if special and event.start + first == 0:
        keys[0] = [f"namespace:{root_hash(event.namespace):016x}"]
    if event.media:
        keys[0] = [*(keys[0] or []), f"media:{blake2b(event.media, digest_size=16).hexdigest()}"]
    return keys
