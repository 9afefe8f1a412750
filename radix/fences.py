"""Step fences: blocks whose holder is gone wait until no GPU step can touch them any more.

Private blocks wait in the quarantine; committed ones stay in the tree, findable but no candidates, until `_unfence`.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixpool.radix.node import Node
from radixpool.radix.room import Room

__all__ = ["FencedCore"]


class FencedCore(Room):
    """Workers, the steps they have completed, and what waits for those."""

    def add_worker(self, worker: str, *, completed_step: int = -1) -> None:
        """Register a worker whose steps fences wait for. What is quarantined already does not wait for it. O(1).

        Raises:
            ValueError: it is registered already.

        """
        self._quarantine.add_worker(worker, completed_step)

    def complete_step(self, worker: str, step: int) -> int:
        """Record that `worker` has completed all its steps up to `step`. Return the blocks that left quarantine.

        Reporting an older step again changes nothing. O(log n) for each fence it passes.

        Raises:
            UnknownWorker: it is not registered.

        """
        before = self._quarantine.num_blocks
        self._quarantine.complete(worker, step)
        return before - self._quarantine.num_blocks

    def remove_worker(self, worker: str) -> int:
        """Forget a worker that is known to be dead. Return the blocks that left quarantine.

        Raises:
            UnknownWorker: it is not registered.

        """
        before = self._quarantine.num_blocks
        self._quarantine.remove_worker(worker)
        return before - self._quarantine.num_blocks

    def next_step_fence(self) -> dict[str, int]:
        """Return a fence for `after_step` that every worker passes with the next step it completes. O(workers)."""
        return self._quarantine.next_step()

    def completed_step(self, worker: str) -> int | None:
        """Return the last step that `worker` has completed, None when it is not registered. O(1)."""
        return self._quarantine.completed.get(worker)

    def workers(self) -> dict[str, int]:
        """Return the registered workers with the last step each has completed. O(workers)."""
        return dict(self._quarantine.completed)

    def _retire(self, blocks: bytes, payer: Node, steps: dict[str, int]) -> int:
        """Free private blocks once `steps` are over. Return how many are quarantined until then."""
        if not steps or not blocks:
            self._give(blocks, payer)
            return 0
        count = len(blocks) >> 2
        quarantine = self._quarantine
        quarantine.private_blocks += count
        if payer.account is not None:
            payer.account.used -= count  # nobody's any more

        def free() -> None:
            quarantine.private_blocks -= count
            if self._persistence is not None:
                self._persistence.returned(blocks)
            self._free.frombytes(blocks)

        quarantine.wait(steps, count, free)
        return count

    def _drop_after(self, node: Node, steps: dict[str, int]) -> None:
        """Drop a hold on `node`, keeping the path fenced until `steps` are over."""
        if not steps or node.parent is node:
            self._drop(node)
            return
        before = self._quarantine.node_blocks
        self._fence(node)
        self._drop(node)
        count = self._quarantine.node_blocks - before
        self._quarantine.wait(steps, count, lambda: self._unfence(node), (node,))

    def _fence(self, node: Node) -> None:
        """Fence the held path to `node`. O(nodes of the path that were not fenced)."""
        self._odd += 1
        while node.parent is not node:
            node.fence += 1
            if node.fence > 1:
                return
            node = node.parent

    def _unfence(self, node: Node) -> None:
        """Undo one `_fence`; blocks that nothing else keeps become cached (or free, if they are dead)."""
        self._odd -= 1
        while node.parent is not node:
            node.fence -= 1
            if node.fence:
                return
            parent = node.parent
            if node.ref == 0:
                self._quarantine.node_blocks -= node.num_blocks
                self._settle(node)
            node = parent

    def _unfence_leaves(self, leaves: Iterable[Node]) -> None:
        """Undo one `_fence` of each of many: in short where a run has no other fence, no holder and no child."""
        cached = passed = 0
        for node in leaves:
            policy = node.policy
            if node.fence > 1 or node.ref or node.children or policy is None or node.account is not None:
                self._unfence(node)
                continue
            node.fence = 0
            passed += 1
            cached += len(node.blocks) >> 2
            policy.add(node)
            parent = node.parent
            if parent.fence > 1:
                parent.fence -= 1
            elif parent.parent is not parent:
                passed -= 1  # `_unfence` counts it
                self._unfence(parent)
        self._odd -= passed
        self._quarantine.node_blocks -= cached
        self._cached += cached
