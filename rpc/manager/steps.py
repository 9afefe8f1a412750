"""GPU steps of workers: which of them may touch the blocks of a sequence that is released.

A worker numbers its steps and tells in each batch which have been completed and which is launched next. It launches a
step only after a batch that announced it and named every sequence of the step, so that it has heard which of them are
gone. Hence the steps that can still touch a released sequence are known: those that its workers had launched and not
completed. Between two steps there is nothing to wait for, however long a worker is idle.

A worker whose lease ended may still run the steps it launched. It is waited for until it registers again (which it does
only when none of its steps runs), until its process is known to be dead, or, where the process cannot be watched, until
its lease and a grace are over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from radixpool.radix import RadixCache
from radixpool.rpc.manager.handles import Held
from radixpool.rpc.manager.leases import Lease
from radixpool.v1 import cache_pb2

GRACE_S: Final = 2.0
"""The longest step that a worker may have begun just before its lease ended."""


class WorkerSteps:
    """The workers of one cache. `clock` gives monotonic seconds."""

    def __init__(self, cache: RadixCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._lost: dict[Lease, float] = {}

    def add(self, worker: Lease) -> None:
        """Count the steps of a new worker from 0."""
        self._cache.add_worker(worker.worker_key, completed_step=0)

    def replaced(self, former: Lease) -> None:
        """Learn that a worker has registered again: every step of its former epoch is over."""
        self._lost.pop(former, None)
        self._forget(former)

    def left(self, worker: Lease) -> None:
        """Learn that a worker has ended its lease itself: no step of it runs."""
        self._forget(worker)

    def lost(self, worker: Lease) -> None:
        """Learn that a worker's lease has expired: it may still run what it has launched."""
        self._lost[worker] = self._clock() + GRACE_S

    def find_lost(self, client_id: bytes) -> Lease | None:
        """Return the lost worker of this client id, None when there is none. O(lost workers)."""
        return next((lease for lease in self._lost if lease.client_id == client_id), None)

    def poll(self) -> list[Lease]:
        """Wait no longer for lost workers that are dead, and return them. O(lost workers)."""
        forgotten = []
        for worker, deadline in list(self._lost.items()):
            watch = worker.process
            if watch.is_dead if watch.is_certain else self._clock() >= deadline:
                del self._lost[worker]
                self._forget(worker)
                forgotten.append(worker)
        return forgotten

    def completed(self, worker: Lease, steps: cache_pb2.StepReport) -> None:
        """Free what waited for the steps that are over. Raises ValueError for counts that cannot be."""
        known = self._cache.completed_step(worker.worker_key)
        if known is None:
            raise ValueError("steps: only a client registered with CLIENT_ROLE_WORKER has steps")
        if not known <= steps.completed_step <= steps.launched_step:
            raise ValueError(
                f"steps.completed_step must be from {known}, the last one reported, to steps.launched_step "
                f"({steps.launched_step}), got {steps.completed_step}"
            )
        if steps.launched_step < worker.launched_step:
            raise ValueError(f"steps.launched_step must be at least {worker.launched_step}, got {steps.launched_step}")
        self._cache.complete_step(worker.worker_key, steps.completed_step)

    def launched(self, worker: Lease, steps: cache_pb2.StepReport) -> None:
        """Note up to which step the worker goes on with what the batch has told it."""
        worker.launched_step = steps.launched_step

    def fence(self, held: Held, caller: Lease | None, after_step: int | None = None) -> dict[str, int]:
        """Return the steps not known to be over that may touch a sequence. O(workers that used it).

        `after_step` is the caller's own word for its steps, where it is a worker.
        """
        fence: dict[str, int] = {}
        for worker in held.workers:
            completed = self._cache.completed_step(worker.worker_key)
            if completed is not None:
                step = after_step if after_step is not None and worker is caller else worker.launched_step
                if step > completed:
                    fence[worker.worker_key] = step
        return fence

    def close(self) -> None:
        """Stop watching processes: the cache whose steps these were is given up."""
        for worker in self._lost:
            worker.process.close()

    def _forget(self, worker: Lease) -> None:
        worker.process.close()
        if self._cache.completed_step(worker.worker_key) is not None:
            self._cache.remove_worker(worker.worker_key)
