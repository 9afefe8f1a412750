"""Stand-ins for what cannot be had in one process: a manager killed in the middle of a store, and GPU memory.

`KilledManager` runs the same operations on two caches: one records into a directory and is killed within a store, the
other goes on. After each kill a new life recovers and must have everything that was findable before and after the
operation, nothing that was findable in neither, the right bytes behind every block, and no block free that anybody may
still write to.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from radixpool.radix.cache import RadixCache
from radixpool.radix.errors import RadixPoolError
from radixpool.radix.events import EventLog
from radixpool.radix.media import MediaSpan
from radixpool.radix.namespace import Namespace
from radixpool.radix.rebuild import lift_fence, restore_blocks
from radixpool.radix.restore import plan_restore
from radixpool.radix.results import BlockState
from radixpool.radix.sequence import Sequence
from radixpool.rpc.directory import BlockDirectory, layout

BLOCK_SIZE = 2
Prefix = tuple[Namespace, tuple[tuple[bytes, bytes], ...]]


class Killed(BaseException):
    """The process ended here."""


class KilledMidway:
    """A `Persistence` that stores through a directory until it is killed within a call, at any byte of its stores.

    `arm(calls, fraction)` lets that many calls pass and ends within the next one, after that fraction of its stores.
    """

    def __init__(self, directory: BlockDirectory, path: Path, seen: Counter[tuple[str, bool]]) -> None:
        self._directory = directory
        self._path = path
        self._seen = seen
        self.killed = False
        self.arm(-1, 0.0)

    def arm(self, calls: int, fraction: float) -> None:
        self._calls_left, self._fraction = calls, fraction

    def _is_last(self, name: str) -> bool:
        self._calls_left -= 1
        last = self.killed = self._calls_left == -1
        self._seen[name, last] += 1
        return last

    def _cut(self, total: int) -> int:
        return round(self._fraction * total)

    def prepare(self, namespace: Namespace, media: bytes = b"") -> None:
        if not self._is_last("prepare"):
            return self._directory.prepare(namespace, media)
        (log,) = self._path.glob("interned.*")
        before = log.stat().st_size
        self._directory.prepare(namespace, media)
        with log.open("r+b") as file:
            file.truncate(before + self._cut(log.stat().st_size - before))
        raise Killed

    def handed_out(self, blocks: Any) -> None:
        self._words("handed_out", blocks)

    def removed(self, blocks: Any) -> None:
        self._words("removed", blocks)

    def returned(self, blocks: Any) -> None:
        self._words("returned", blocks)

    def _words(self, name: str, blocks: Any) -> None:
        """State words are stored one after the other, each whole."""
        store = getattr(self._directory, name)
        if not self._is_last(name):
            return store(blocks)
        ids = ids_of(blocks)
        store(ids[: self._cut(ids.size)])
        raise Killed

    def touched(self, block: int, last_use: int) -> None:
        if not self._is_last("touched"):
            return self._directory.touched(block, last_use)
        if self._fraction >= 0.5:
            self._directory.touched(block, last_use)
        raise Killed

    def stored(self, blocks: Any, tokens: bytes, **rest: Any) -> None:
        """First the rows, byte after byte, then the state words, each whole."""
        if not self._is_last("stored"):
            return self._directory.stored(blocks, tokens, **rest)
        ids = ids_of(blocks)
        words = self._directory._words
        before = words[ids].copy()
        self._directory.stored(blocks, tokens, **rest)
        after = words[ids].copy()
        after[:, layout.STATE] = before[:, layout.STATE]
        cut = self._cut(after.nbytes + ids.size)
        if cut < after.nbytes:
            torn = after.tobytes()[:cut] + before.tobytes()[cut:]
            words[ids] = np.frombuffer(torn, dtype=np.uint32).reshape(before.shape)
        else:
            words[ids[cut - after.nbytes :]] = after[cut - after.nbytes :]
        raise Killed


def ids_of(blocks: Any) -> np.ndarray:
    """Return block ids, however the cache gave them, as integers."""
    return np.frombuffer(blocks, dtype="<i4").astype(np.int64) if isinstance(blocks, bytes) else np.asarray(blocks)


def prefixes(cache: RadixCache) -> dict[Prefix, int]:
    """Map every findable prefix of whole blocks to the block at its end."""
    stride = cache.block_size * 4
    paths: dict[int, Prefix] = {}
    for run in cache.snapshot().stored:
        namespace, path = paths[run.parent] if run.parent >= 0 else (run.namespace, ())
        for i, block in enumerate(np.frombuffer(run.blocks, dtype="<i4").tolist()):
            path = (*path, (run.tokens[i * stride : (i + 1) * stride], run.media))
            paths[block] = (namespace, path)
    return {prefix: block for block, prefix in paths.items()}


def prefix_of(seq: Sequence, num_blocks: int) -> Prefix:
    """Name the content of the first blocks of a sequence: tokens and media of each."""
    tokens, stride = seq.packed_tokens, BLOCK_SIZE * 4
    blocks = ((tokens[i * stride : (i + 1) * stride], seq._marks.get(i, b"")) for i in range(num_blocks))
    return seq.namespace, tuple(blocks)


class Snapshot:
    """What is findable, free, and held or quarantined in a cache."""

    def __init__(self, cache: RadixCache) -> None:
        self.found = prefixes(cache)
        self.free = set(cache._free)
        cached = {b for node in cache.nodes() if node.state is BlockState.CACHED for b in node.blocks.tolist()}
        self.in_use = set(range(cache.num_blocks)) - self.free - cached


class KilledManager:
    """Two caches, a directory, and what the workers have written to each block.

    Attributes:
        handles: live sequences.
        fenced: whether the former life still counts.
        seen: how often each call of the persistence was made, and how often it was the last.
        recoveries: how many lives there were.

    """

    alive: ClassVar[set[KilledManager]] = set()

    def __init__(self, num_blocks: int, *, policy: str = "lru") -> None:
        self.alive.add(self)
        self.num_blocks = num_blocks
        self.policy = policy
        shm = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="radixpool-test-", dir=shm if shm.is_dir() else None))
        self.memory: list[Prefix | None] = [None] * num_blocks
        self.seen: Counter[tuple[str, bool]] = Counter()
        self.step = self.recoveries = 0
        self._start_life()

    def close(self) -> None:
        self.alive.discard(self)
        self.directory.close()
        shutil.rmtree(self.folder)

    def check(self) -> None:
        self.cache.check()
        assert prefixes(self.cache) == prefixes(self.twin)

    # --- lives

    def _start_life(self) -> None:
        """Recover, into the recording cache and into its twin."""
        path = self.folder / "directory"
        self.directory = BlockDirectory.open(path, num_blocks=self.num_blocks, block_size=BLOCK_SIZE)
        self.persistence = KilledMidway(self.directory, path, self.seen)
        scan = self.directory.scan()
        plan = plan_restore(scan.loose)
        dropped = np.concatenate((scan.torn, plan.dropped))
        self.directory.removed(dropped)
        quarantined = np.concatenate((scan.private, dropped))
        self.cache = RadixCache(
            self.num_blocks, BLOCK_SIZE, policy=self.policy, persistence=self.persistence, events=EventLog()
        )
        self.twin = RadixCache(self.num_blocks, BLOCK_SIZE, policy=self.policy, events=EventLog())
        for cache in (self.cache, self.twin):
            restore_blocks(cache, plan, namespaces=scan.namespaces(), media=scan.keys, quarantined=quarantined)
        self.fenced = True
        self.handles: list[int] = []

    def _recover(self, before: Snapshot) -> None:
        """Check what the next life finds, given what was there before the operation and what the twin has after it."""
        self.recoveries += 1
        after = Snapshot(self.twin)
        self.directory.close()
        self._start_life()
        found, free = prefixes(self.cache), set(self.cache._free)
        assert before.found.items() & after.found.items() <= found.items()
        assert found.items() <= before.found.items() | after.found.items()
        assert before.free & after.free <= free, "a free block was lost"
        assert not free & before.in_use - after.free, "a block is free that somebody may still touch"
        for prefix, block in found.items():
            assert self.memory[block] == prefix, f"stale bytes behind block {block}"
        self.cache.check()
        self.directory.check()

    def _both(self, operation: Callable[[RadixCache], Any]) -> Any:
        """Run an operation on both caches; a kill ends the recording one's life. Return the twin's result, or None."""
        before = Snapshot(self.twin)
        try:
            result = _outcome(operation, self.cache)
        except Killed:
            result = None
        if result is None and self.persistence.killed:
            _outcome(operation, self.twin)
            self._recover(before)
            return None
        expected = _outcome(operation, self.twin)
        assert repr(result) == repr(expected)
        return expected

    def _begin_step(self, handle: int) -> None:
        """A step starts that may write to all that is not committed: it holds nothing whole until it is over."""
        seq = self.twin.sequence(handle)
        for block in seq.block_table[seq.committed_tokens // BLOCK_SIZE :].tolist():
            self.memory[block] = None

    # --- operations

    def acquire(
        self, tokens: Iterable[int], namespace: Namespace, *, reserve: int, media: tuple[MediaSpan, ...]
    ) -> None:
        prompt = list(tokens)
        seq = self._both(lambda cache: cache.acquire(prompt, namespace=namespace, reserve=reserve, media=media))
        if seq is not None and not isinstance(seq, Exception):
            self.handles.append(seq.handle)
            self._begin_step(seq.handle)

    def extend(self, handle: int, tokens: Iterable[int]) -> None:
        more = list(tokens)
        self._both(lambda cache: cache.extend(cache.sequence(handle), more))
        if handle in self.handles:
            self._begin_step(handle)

    def commit(self, handle: int, upto: float) -> None:
        seq = self.twin.sequence(handle)
        num_tokens = round(upto * seq.num_tokens)
        table = seq.block_table.tolist()
        for i in range(seq.committed_tokens // BLOCK_SIZE, num_tokens // BLOCK_SIZE):
            self.memory[table[i]] = prefix_of(seq, i + 1)
        self._both(lambda cache: cache.commit(cache.sequence(handle), num_tokens))

    def release(self, handle: int, *, after_steps: int) -> None:
        after_step = self.step + after_steps if after_steps else None
        self.handles.remove(handle)
        self._both(lambda cache: cache.release(cache.sequence(handle), after_step=after_step))

    def rewind(self, handle: int, to: float) -> None:
        seq = self.twin.sequence(handle)
        least = seq.committed_tokens // BLOCK_SIZE * BLOCK_SIZE
        num_tokens = least + round(to * (seq.num_tokens - least))
        self._both(lambda cache: cache.rewind(cache.sequence(handle), num_tokens))
        if handle in self.handles:
            self._begin_step(handle)

    def invalidate(self, handle: int, at: float) -> None:
        index = int(at * (self.twin.sequence(handle).num_blocks - 1))
        if not self.twin.sequence(handle).num_blocks:
            return
        self._both(lambda cache: cache.invalidate(cache.sequence(handle), index))

    def flush(self, namespace: Namespace | None) -> None:
        self._both(lambda cache: cache.flush(namespace, mode="new_generation"))

    def evict(self, num_blocks: int) -> None:
        self._both(lambda cache: cache.evict(num_blocks))

    def complete_step(self) -> None:
        """One worker that takes part in every fence; it is new in each life."""
        self.step += 1

        def complete(cache: RadixCache) -> None:
            if "worker" not in cache.workers():
                cache.add_worker("worker", completed_step=self.step - 1)
            cache.complete_step("worker", self.step)

        self._both(complete)

    def end_former_life(self) -> None:
        """Lift one slice of the fence."""
        if self.fenced:
            more = self._both(lift_fence)
            self.fenced = self.fenced if more is None else more

    def end_fence(self) -> None:
        while self.fenced:
            self.end_former_life()

    def kill_between_operations(self) -> None:
        self._recover(Snapshot(self.twin))

    def check_eviction_order(self) -> None:
        """With nothing held, a recovered cache evicts the same blocks in the same order as if nothing had happened."""
        self.persistence.arm(-1, 0.0)
        self.end_fence()
        for handle in list(self.handles):
            self.release(handle, after_steps=0)
        self.complete_step()
        self.complete_step()
        self.complete_step()
        order = self.twin.evict(self.num_blocks).blocks.tolist()
        self.directory.close()
        self._start_life()
        self.end_fence()
        assert self.cache.evict(self.num_blocks).blocks.tolist() == order
        self.twin.evict(self.num_blocks)


def _outcome(operation: Callable[[RadixCache], Any], cache: RadixCache) -> Any:
    try:
        return operation(cache)
    except RadixPoolError as error:
        return error
