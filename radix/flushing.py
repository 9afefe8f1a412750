"""Flush: forget what is cached, of one namespace or of all, idle or busy."""

from __future__ import annotations

from typing import Literal

from radixpool.radix.errors import CacheBusy
from radixpool.radix.namespace import Namespace
from radixpool.radix.node import Root
from radixpool.radix.results import FlushResult
from radixpool.radix.tenants import Tenants

__all__ = ["FlushMode", "Flushing"]

FlushMode = Literal["idle_only", "drain", "new_generation"]


class Flushing(Tenants):
    """The flush operation."""

    def flush(self, namespace: Namespace | None = None, *, mode: FlushMode = "idle_only") -> FlushResult:
        """Forget cached content of one namespace, or of all. O(runs).

        Args:
            namespace: the tree to flush, None for all.
            mode: `"idle_only"` refuses while a sequence or an unfinished step holds anything; `"drain"` frees what
                nobody holds and leaves the rest findable, to be called again when the holders are gone;
                `"new_generation"` makes everything unfindable at once: holders may finish, and their blocks are freed,
                not cached.

        Pins of what is flushed are dropped in every mode.

        Raises:
            CacheBusy: `idle_only`, and something is in use; nothing was changed.
            ValueError: no such mode.

        """
        if mode not in ("idle_only", "drain", "new_generation"):
            raise ValueError(f"mode must be 'idle_only', 'drain' or 'new_generation', not {mode!r}")
        roots = [root for root in self._roots.values() if namespace is None or root.namespace == namespace]
        if mode == "idle_only":
            self._refuse_if_busy(namespace)
        self._tick += 1
        for pin_id, (info, _) in list(self._pins.items()):
            if namespace is None or info.namespace == namespace:
                self.unpin(pin_id)
        before = len(self._free)
        if mode == "drain":
            held = sum(self._drain(root) for root in roots)
        else:
            if self._events is not None:
                self._events.cleared(namespace, self._generation + 1)
            for root in roots:
                self._kill(self._subtree(root))
                self._roots.pop(root.namespace, None)
            held = 0 if mode == "idle_only" else self._count_unfindable(namespace)
            self._generation += 1
        return FlushResult(len(self._free) - before, held, self._generation)

    def _refuse_if_busy(self, namespace: Namespace | None) -> None:
        if namespace is None:
            busy = bool(self._sequences) or self._quarantine.num_blocks > 0
        else:
            busy = any(seq._namespace == namespace for seq in self._sequences.values())
            busy = busy or any(node.root.namespace == namespace for node in self._quarantine.fenced_nodes())
        if busy:
            held = self.num_blocks - len(self._free) - self._cached - self._quarantine.num_blocks
            raise CacheBusy(held_blocks=held, quarantined_blocks=self._quarantine.num_blocks)

    def _drain(self, root: Root) -> int:
        """Free everything below `root` that nobody holds; return how many blocks of it are still held."""
        held = 0
        taken: list[bytes] = []
        for node in reversed(self._subtree(root)[1:]):
            if node.ref or node.fence:
                held += node.num_blocks
            else:
                left = node.num_blocks
                while left:  # a policy may allow a run to lose a few blocks at a time
                    left -= self._shorten(node, left, taken)
        if self._persistence is not None and taken:
            self._persistence.returned(b"".join(taken))
        return held

    def _count_unfindable(self, namespace: Namespace | None) -> int:
        """Return how many blocks of dead paths wait for their holders."""
        dead = {}
        for end in [seq._node for seq in self._sequences.values()] + list(self._quarantine.fenced_nodes()):
            if namespace is None or end.root.namespace == namespace:
                node = end
                while node.policy is None and node.parent is not node:
                    dead[id(node)] = node.num_blocks
                    node = node.parent
        return sum(dead.values())
