"""Quarantine: blocks that nobody holds but that a GPU step not known to be over may still touch.

A fence names, for each registered worker, the step it must have completed. It is passed when every named worker has
completed its step or was removed. Without workers there is nothing to wait for and every fence is passed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from radixpool.radix.errors import UnknownWorker

if TYPE_CHECKING:
    from radixpool.radix.node import Node

__all__ = ["NO_STEP", "Fence", "Quarantine"]

NO_STEP = 2**63 - 1
"""A fence that is passed with the removal of its worker only, and at no step that a caller could wait for."""
Fence = int | Mapping[str, int] | None  # a step of every worker, a step per worker, or none


@dataclass(slots=True)
class _Entry:
    """Something that waits: how many workers it waits for and what to do then."""

    num_blocks: int
    waiting: int
    last_step: int
    free: Callable[[], None]
    nodes: Sequence[Node]


class Quarantine:
    """Workers, their completed steps, and what waits for them. Costs O(log n) an entry and worker."""

    def __init__(self) -> None:
        self.private_blocks = 0  # waiting blocks outside any tree
        self.node_blocks = 0  # blocks of fenced nodes without a holder
        self.completed: dict[str, int] = {}
        self._waiting: dict[str, list[tuple[int, int, _Entry]]] = {}
        self._retired: list[tuple[int, int, _Entry]] = []  # a heap like those of `_waiting`
        self._entries = 0

    @property
    def num_blocks(self) -> int:
        """All quarantined blocks. O(1)."""
        return self.private_blocks + self.node_blocks

    def resolve(self, fence: Fence) -> dict[str, int]:
        """Return the workers the fence still waits for, each with its step. Changes nothing."""
        if fence is None or fence == {}:
            return {}
        if isinstance(fence, Mapping):
            for worker, step in fence.items():
                if worker not in self.completed:
                    raise UnknownWorker(worker)
                _check_step(f"after_step[{worker!r}]", step)
            return {worker: step for worker, step in fence.items() if step > self.completed[worker]}
        _check_step("after_step", fence)
        return {worker: fence for worker, completed in self.completed.items() if fence > completed}

    def next_step(self) -> dict[str, int]:
        """Return a fence that every worker passes with the next step it completes."""
        return {worker: completed + 1 for worker, completed in self.completed.items()}

    def wait(
        self, steps: dict[str, int], num_blocks: int, free: Callable[[], None], nodes: Sequence[Node] = ()
    ) -> None:
        """Call `free` once every worker of `steps` (not empty) has completed its step. It unfences `nodes`."""
        entry = _Entry(num_blocks, len(steps), max(steps.values()), free, nodes)
        for worker, step in steps.items():
            self._entries += 1
            heappush(self._waiting[worker], (step, self._entries, entry))

    def add_worker(self, worker: str, completed_step: int) -> None:
        """Register a worker; what is quarantined already does not wait for it."""
        if worker in self.completed:
            raise ValueError(f"worker {worker!r} is already registered")
        self.completed[worker] = completed_step
        self._waiting[worker] = []

    def complete(self, worker: str, step: int) -> None:
        """Record that `worker` has completed all steps up to `step`; older reports are ignored."""
        if worker not in self.completed:
            raise UnknownWorker(worker)
        _check_step("step", step)
        if step > self.completed[worker]:
            self.completed[worker] = step
            self._pass(worker, step)

    def remove_worker(self, worker: str) -> None:
        """Forget a dead worker: nothing waits for it any more."""
        if worker not in self.completed:
            raise UnknownWorker(worker)
        self._pass(worker, None)
        del self.completed[worker], self._waiting[worker]

    def retire_worker(self, worker: str) -> None:
        """Forget a registered worker that is dead, but leave what waits for it to `pass_retired`."""
        del self.completed[worker]
        self._retired += self._waiting.pop(worker)
        heapify(self._retired)

    def pass_retired(self, limit: int) -> bool:
        """Let up to `limit` fences pass that wait for retired workers. Return whether more do."""
        for _ in range(min(limit, len(self._retired))):
            self._pass_first(self._retired)
        return bool(self._retired)

    def retry_after(self, num_blocks: int) -> int | None:
        """Return the smallest step whose completion frees `num_blocks`, None when none does. For refusals only."""
        for entry in sorted(self._all(), key=lambda entry: entry.last_step):
            if entry.last_step == NO_STEP:
                return None
            num_blocks -= entry.num_blocks
            if num_blocks <= 0:
                return entry.last_step
        return None

    def fenced_nodes(self) -> Iterator[Node]:
        """Iterate over the nodes that fences end at, one for each fence. O(entries)."""
        return (node for entry in self._all() for node in entry.nodes)

    def _all(self) -> list[_Entry]:
        heaps = (*self._waiting.values(), self._retired)
        return list({id(entry): entry for heap in heaps for _, _, entry in heap}.values())

    def _pass(self, worker: str, step: int | None) -> None:
        heap = self._waiting[worker]
        while heap and (step is None or heap[0][0] <= step):
            self._pass_first(heap)

    def _pass_first(self, heap: list[tuple[int, int, _Entry]]) -> None:
        entry = heappop(heap)[2]
        entry.waiting -= 1
        if entry.waiting == 0:
            entry.free()


def _check_step(name: str, step: int) -> None:
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"{name} must be a step number >= 0, not {step!r}")
