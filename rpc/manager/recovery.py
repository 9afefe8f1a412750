"""From one life of the manager to the next: what is taken over, what is waited for, and when the former life is over.

A manager with a block directory starts with the cache of its former life. Two things are not known then:

* whether the bytes are still there: nothing is served until a pool registers. The same pool brings the cache back,
  another one, or none ever known, means an empty start.
* whether GPU steps of the former life still run: until each client of that life has registered again (which it does
  only when none of its steps runs), has died, or has been silent for its lease and a grace (and is no worker that is
  stopped: it goes on with its step when it thaws), no block that was in use may be written to. Restored blocks can be
  hit all the while. Then they are let go in slices, so that nobody waits for that.

The engine calls everything here under its lock.
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from radixpool.radix import RadixCache
from radixpool.radix.persistence import Persistence
from radixpool.radix.rebuild import lift_fence, restore_blocks
from radixpool.radix.restore import plan_restore
from radixpool.rpc.directory import BlockDirectory
from radixpool.rpc.directory.clients import KnownClient
from radixpool.rpc.directory.file import NEW
from radixpool.rpc.directory.layout import NO_POOL
from radixpool.rpc.directory.processes import ProcessMark, mark_process
from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.manager.options import ManagerOptions
from radixpool.v1 import cache_pb2

_ROLES_WITHOUT_BLOCKS: Final = frozenset({cache_pb2.CLIENT_ROLE_POOL_HOLDER, cache_pb2.CLIENT_ROLE_OPERATOR})
GRACE_S: Final = 2.0
"""The longest GPU step that a client may have begun just before its lease ended."""
LOOKS_PER_POLL: Final = 256
"""A look at a process takes 10 µs, under the lock."""
_log = logging.getLogger(__name__)
_NO_POOL_KNOWN: Final = "no pool was registered in its former life, so that nobody answers for the bytes"
_SCANNED = failpoint("recovery.scanned")
_RESTORED = failpoint("recovery.restored")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What a start brought back.

    restored_blocks: committed blocks that are findable again once the pool is back.
    unwritten_blocks: blocks that were handed out but not committed; out of use until the former life is over.
    dropped_blocks: blocks whose records were torn, damaged or without a place in a tree; out of use just as long.
    former_clients: clients that may still use blocks.
    seconds: how long it took.
    started_empty_because: why nothing could be restored, None when the directory was of use.
    """

    restored_blocks: int = 0
    unwritten_blocks: int = 0
    dropped_blocks: int = 0
    former_clients: int = 0
    seconds: float = 0.0
    started_empty_because: str | None = "the manager has no directory"


class FormerLife:
    """What this life has to reckon with of the one before: nothing, where no directory remembers it.

    Attributes:
        report: what was restored.

    """

    def __init__(self) -> None:
        self.report = RecoveryReport()

    @property
    def persistence(self) -> Persistence | None:
        """Where the cache of this life is recorded."""
        return None

    @property
    def incarnation(self) -> int:
        """The number of this life, greater than that of every earlier one (as far as the clock goes forward)."""
        return time.time_ns() // 1000

    @property
    def generation(self) -> int:
        """The generation of the cached content that this life begins with."""
        return 1

    @property
    def last_pool_id(self) -> bytes:
        """The pool that the restored cache lives in, empty when there is none."""
        return b""

    @property
    def awaits_pool(self) -> bool:
        """Whether the restored cache must not be served yet, because its pool has not come back."""
        return False

    @property
    def is_over(self) -> bool:
        """Whether no block is fenced for the former life's sake any more."""
        return True

    @property
    def is_ending(self) -> bool:
        """Whether the fence is being lifted, a slice with each `poll`."""
        return False

    def restore(self, cache: RadixCache) -> None:
        """Fill a new cache with what the former life had committed. Raises DirectoryDamaged."""

    def pool_registered(self, pool_id: bytes) -> None:
        """Learn that the pool with the bytes of the cached blocks is registered."""

    def pool_replaced(self, generation: int, *, holder_id: bytes) -> None:
        """Learn that other bytes take the place of the cached ones, and that `generation` begins with them.

        Of all clients only the holder of the new pool is left.
        """

    def set_generation(self, generation: int) -> None:
        """Learn that a new generation of content begins."""

    def client_registered(self, client_id: bytes, role: int, process: cache_pb2.ProcessIdentity | None = None) -> None:
        """Learn, before it can hold a block, of a client: what it did in its former life is over.

        Raises DirectoryNoSpace.
        """

    def client_gone(self, client_id: bytes) -> None:
        """Learn that the last block of a client of this life came back."""

    def poll(self) -> None:
        """End the former life when its time is over, a slice at a time. O(1) until then."""

    def check(self, cache: RadixCache) -> None:
        """Prove that what is recorded is what `cache` holds. Raises InvariantViolation."""

    def close(self) -> None:
        """Close the directory; what it holds stays for the next life."""


class RecordedLife(FormerLife):
    """A former life that a directory remembers. `clock` gives monotonic seconds, `lease_ttl_ms` is for this life."""

    def __init__(self, directory: BlockDirectory, *, lease_ttl_ms: int, clock: Callable[[], float]) -> None:
        super().__init__()
        self._directory = directory
        self._clock = clock
        self._lease_ttl_ms = lease_ttl_ms
        self._deadline = clock() + directory.lease_ttl_ms / 1000 + GRACE_S
        directory.set_lease_ttl_ms(max(lease_ttl_ms, directory.lease_ttl_ms))
        self._awaited = directory.clients.known()
        self._stopped_until: dict[bytes, float] = {}
        self._warned = False
        self._fenced: RadixCache | None = None
        self._awaits_pool = False
        self._is_ending = False

    @property
    def persistence(self) -> Persistence:
        """The directory itself."""
        return self._directory

    @property
    def incarnation(self) -> int:
        """The directory's own count, which never goes back."""
        return self._directory.incarnation

    @property
    def generation(self) -> int:
        """The generation that the records belong to."""
        return max(1, self._directory.generation)

    @property
    def last_pool_id(self) -> bytes:
        """The pool that the directory's records describe."""
        return b"" if self._directory.pool_id == NO_POOL else self._directory.pool_id

    @property
    def awaits_pool(self) -> bool:
        """Whether blocks were restored and their pool has not registered yet."""
        return self._awaits_pool

    @property
    def is_over(self) -> bool:
        """Whether every client of the former life has come back or was waited out."""
        return self._fenced is None

    @property
    def is_ending(self) -> bool:
        """Whether nobody is waited for any more, and blocks are still fenced."""
        return self._is_ending

    def restore(self, cache: RadixCache) -> None:
        """Scan the directory and rebuild the tree: everything stays fenced until the former life is over.

        Closes the directory when that fails.
        """
        try:
            self._restore(cache)
        except BaseException:
            self._directory.close()
            raise
        if self.report.started_empty_because == NEW:
            _log.info("the directory is new: the cache starts empty")
        else:
            self._log_restored()
        self.poll()

    def _log_restored(self) -> None:
        report = self.report
        if report.started_empty_because is not None:
            _log.warning(
                "nothing of the directory can be used and the cache starts empty: %s", report.started_empty_because
            )
        _log.info(
            "restored %d blocks in %.2f s; %d unwritten and %d dropped blocks wait for %d former clients",
            report.restored_blocks,
            report.seconds,
            report.unwritten_blocks,
            report.dropped_blocks,
            report.former_clients,
        )

    def _restore(self, cache: RadixCache) -> None:
        started = time.perf_counter()
        scan = self._directory.scan()
        _SCANNED()
        if self.last_pool_id:
            plan, unvouched = plan_restore(scan.loose), scan.loose.blocks[:0]
        else:
            plan, unvouched = plan_restore(scan.loose.take(np.empty(0, dtype=np.int64))), scan.loose.blocks
        dropped = np.concatenate((scan.torn, plan.dropped, unvouched))
        self._directory.removed(dropped)
        quarantined = np.concatenate((scan.private, dropped))
        with collector_paused():
            restore_blocks(cache, plan, namespaces=scan.namespaces(), media=scan.keys, quarantined=quarantined)
        _RESTORED()
        self._fenced = cache
        self._awaits_pool = plan.num_runs > 0
        reason = self._directory.started_empty_because
        self.report = RecoveryReport(
            restored_blocks=plan.loose.blocks.size,
            unwritten_blocks=scan.private.size,
            dropped_blocks=dropped.size,
            former_clients=len(self._awaited) + self._directory.clients.num_unreadable,
            seconds=time.perf_counter() - started,
            started_empty_because=reason or (None if self.last_pool_id else _NO_POOL_KNOWN),
        )

    def pool_registered(self, pool_id: bytes) -> None:
        """Note the pool; from now on the restored cache may be served."""
        self._directory.set_pool(pool_id)
        self._awaits_pool = False

    def pool_replaced(self, generation: int, *, holder_id: bytes) -> None:
        """Forget every block and every other client, of this life and the former: none can touch the new bytes."""
        _log.warning("another pool has registered: the cache starts empty, in generation %d", generation)
        self._directory.clear()
        self._directory.set_generation(generation)
        self._fenced = None
        self._is_ending = False
        self._awaited.clear()
        for client_id in self._directory.clients.client_ids - {holder_id}:
            self._directory.clients.discard(client_id)
        self._directory.clients.discard_unreadable()

    def set_generation(self, generation: int) -> None:
        """Note the generation for the next life."""
        self._directory.set_generation(generation)

    def client_registered(self, client_id: bytes, role: int, process: cache_pb2.ProcessIdentity | None = None) -> None:
        """Record the client unless its role holds no blocks, and stop waiting for it."""
        if role not in _ROLES_WITHOUT_BLOCKS:
            self._directory.clients.add(client_id, KnownClient(role, _mark(process)))
        self._awaited.pop(client_id, None)
        self._end_if_alone()

    def client_gone(self, client_id: bytes) -> None:
        """Strike the client off the record."""
        if client_id not in self._awaited:
            self._directory.clients.discard(client_id)

    def poll(self) -> None:
        """Wait no longer for clients that are dead, or whose lease and grace are over; lift a slice of the fence.

        Looks at the processes of all workers and of `LOOKS_PER_POLL` others in turn; one slice of `lift_fence` at most.
        """
        if self._fenced is None:
            return
        for client_id, client in self._next_looks():
            if client.process is not None and client.process.is_gone:
                self._strike(client_id)
            elif _is_stopped_worker(client):
                self._stopped_until[client_id] = self._clock() + GRACE_S
        if self._clock() >= self._deadline:
            self._wait_for_stopped_workers()
        self._end_if_alone()

    def _next_looks(self) -> list[tuple[bytes, KnownClient]]:
        """Return the clients to look at now; the others come first next time."""
        workers = [item for item in self._awaited.items() if item[1].role == cache_pb2.CLIENT_ROLE_WORKER]
        rest = (item for item in self._awaited.items() if item[1].role != cache_pb2.CLIENT_ROLE_WORKER)
        others = list(itertools.islice(rest, LOOKS_PER_POLL))
        for client_id, client in others:
            del self._awaited[client_id]
            self._awaited[client_id] = client
        return workers + others

    def check(self, cache: RadixCache) -> None:
        """Compare the valid records with the blocks of the tree. O(num_blocks)."""
        self._directory.check(findable=[block for node in cache.nodes() for block in node.blocks.tolist()])

    def close(self) -> None:
        """Unmap and unlock the directory."""
        self._directory.close()

    def _wait_for_stopped_workers(self) -> None:
        """Wait no longer for anybody else: the time is over within which they may have begun or ended a step.

        A worker that was stopped has a grace from the moment on that it goes on.
        """
        for client_id in list(self._awaited):
            if self._clock() >= self._stopped_until.get(client_id, 0.0):
                self._strike(client_id)
        self._directory.clients.discard_unreadable()
        if self._awaited and not self._warned:
            self._warned = True
            pids = sorted(client.process.pid for client in self._awaited.values() if client.process is not None)
            _log.warning(
                "workers of the former life are stopped, perhaps in the middle of a step: what was in use then stays "
                "fenced until they go on, or end; process ids: %s",
                ", ".join(map(str, pids)),
            )

    def _strike(self, client_id: bytes) -> None:
        del self._awaited[client_id]
        self._directory.clients.discard(client_id)

    def _end_if_alone(self) -> None:
        if self._fenced is None or self._awaited or self._directory.clients.num_unreadable:
            return
        if not self._is_ending:
            self._is_ending = True
            self._directory.set_lease_ttl_ms(self._lease_ttl_ms)
        if not lift_fence(self._fenced):
            self._fenced, self._is_ending = None, False


def _is_stopped_worker(client: KnownClient) -> bool:
    return client.role == cache_pb2.CLIENT_ROLE_WORKER and client.process is not None and client.process.is_stopped


def _mark(process: cache_pb2.ProcessIdentity | None) -> ProcessMark | None:
    if process is None:
        return None
    return mark_process(process.pid, namespace=process.namespace, boot_id=process.boot_id)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic collector from what is made meanwhile, then and later: a tree stays, and holds no rings.

    Otherwise it looks at a million new nodes again and again (measured: 25 times the time).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def open_former_life(options: ManagerOptions, *, clock: Callable[[], float] = time.monotonic) -> FormerLife:
    """Open the directory that the options name, if they name one, and lock it.

    Raises DirectoryInUse, DirectoryDamaged, DirectoryNoSpace; nothing has changed then.
    """
    if not options.directory:
        return FormerLife()
    directory = BlockDirectory.open(
        Path(options.directory),
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        incarnation=time.time_ns() // 1000,
    )
    return RecordedLife(directory, lease_ttl_ms=options.lease_ttl_ms, clock=clock)
