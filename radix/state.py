"""The state of a cache: free list, counters, trees by namespace, and whom to tell about blocks.

Every change of a block's owner goes through here, so that accounts, persistence and events hear of it **before** it
happens. `free + cached + held + quarantined = num_blocks`, where held is what remains of the other three.
"""

from __future__ import annotations

from array import array

from radixpool.radix.eviction.base import DEFAULT_PRIORITY
from radixpool.radix.groups import PolicyGroups
from radixpool.radix.namespace import Namespace
from radixpool.radix.node import Node, Root
from radixpool.radix.options import CacheOptions
from radixpool.radix.quarantine import Quarantine

__all__ = ["CacheState"]


class CacheState:
    """What a cache knows. The classes derived from it add what can be done with it."""

    def __init__(self, options: CacheOptions) -> None:
        num_blocks, block_size = options.num_blocks, options.block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._stride = block_size * 4  # bytes of tokens per block
        self._free = array("I", range(num_blocks - 1, -1, -1))  # a stack: the last one goes first
        self._cached = 0  # blocks of live, unheld, unfenced nodes
        self._tree_blocks = 0  # blocks of live nodes
        self._pinned = 0  # blocks of nodes under a pin
        self._num_nodes = 0  # live and dead nodes, roots not counted
        self._odd = 0  # dead nodes plus node fences: zero lets releases take the short way
        self._tick = 0
        self._evicted_blocks = 0
        self._generation = 0
        self._quarantine = Quarantine()
        self._groups = PolicyGroups(options.policy, num_blocks)
        self._policy = self._groups.default
        self._roots: dict[Namespace, Root] = {}
        self._clock = options.clock
        self._persistence = options.persistence
        self._events = options.events
        self._told = self._persistence is not None or self._events is not None

    # -- blocks

    def _take(self, count: int, payer: Node) -> bytes:
        """Take `count` >= 1 free blocks, which must be there. O(count).

        They are told in the order in which they became free: of evicted ones ancestors first within a run, so that the
        records that are left when the process dies meanwhile hang together as they did, or on nothing.
        """
        free = self._free
        if self._persistence is not None:
            self._persistence.handed_out(free[-count:].tobytes())
        taken = free[: -count - 1 : -1].tobytes()
        del free[-count:]
        if payer.account is not None:
            payer.account.used += count
        return taken

    def _give(self, blocks: bytes, payer: Node) -> None:
        """Give blocks back to the free list. O(number of blocks)."""
        if self._persistence is not None and blocks:
            self._persistence.returned(blocks)
        self._free.frombytes(blocks)
        if payer.account is not None:
            payer.account.used -= len(blocks) >> 2

    # -- telling

    def _tell_stored(self, parent: Node, key: bytes, blocks: bytes, media: bytes) -> None:
        """Announce a run that is about to become findable below the end of `parent`."""
        namespace = parent.root.namespace
        before = _last_block(parent)
        if self._persistence is not None:
            self._persistence.stored(
                blocks,
                key,
                parent=before,
                position=parent.end,
                namespace=namespace,
                last_use=self._tick,
                media=media,
            )
        if self._events is not None:
            self._events.stored(namespace, before, parent.end, key, blocks, media)

    def _tell_removed(self, node: Node, blocks: bytes) -> None:
        """Announce that `blocks`, the tail of `node`, are about to leave the tree."""
        if self._events is not None:
            self._events.removed(node.root.namespace, blocks)

    def _tell_touched(self, node: Node) -> None:
        """Announce the last use of a path that ends at `node`."""
        if self._persistence is not None and node.policy is not None and node.blocks:
            self._persistence.touched(_last_block(node), node.last_use)

    # -- trees

    def _root(self, namespace: Namespace) -> Root:
        """Return the tree of `namespace`, a new one that is not yet registered if there is none."""
        root = self._roots.get(namespace)
        if root is None:
            account = self._groups.account(namespace.tenant)
            root = Root(namespace, self._stride, self._groups.policy(account, DEFAULT_PRIORITY), account)
        return root

    def _forget(self, root: Node) -> None:
        """Drop an empty tree that nobody uses, so that namespaces do not pile up."""
        assert isinstance(root, Root)
        if self._roots.get(root.namespace) is root:
            del self._roots[root.namespace]


def _last_block(node: Node) -> int:
    """Return the id of the last block of `node`, -1 for a root."""
    return int.from_bytes(node.blocks[-4:], "little") if node.blocks else -1
