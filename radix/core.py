"""The tree and the pool: the state of a cache and the primitives that every operation is made of.

Owns the trees, the free list and the counters; knows nothing of sequences. Its primitives keep these promises:

* `_walk` reads and changes nothing; `_split`, `_hold`, `_drop` and `_attach` keep every count right.
* a node is a candidate of its policy exactly when it is alive, unheld, unfenced and childless;
* `free + cached + held + quarantined = num_blocks`, where held is what remains of the other three;
* every loop is bounded by the path or by what it frees, and nothing recurses.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from radixpool.radix.errors import PoolExhausted
from radixpool.radix.eviction.base import DEFAULT_PRIORITY
from radixpool.radix.groups import PolicyGroups
from radixpool.radix.namespace import Namespace
from radixpool.radix.node import Node, Root
from radixpool.radix.quarantine import Quarantine

if TYPE_CHECKING:
    from radixpool.radix.events import EventLog

__all__ = ["CacheCore", "Walk"]

MERGE_LIMIT_BLOCKS = 256  # growing a run in place copies it, so longer runs get a child instead


class Walk(NamedTuple):
    """Where a walk ended.

    Attributes:
        node: deepest node that matched whole.
        pos: bytes of the key matched by whole nodes.
        child: a child of `node` of which only the head matched, or None.
        head: how many blocks of `child` matched.

    """

    node: Node
    pos: int
    child: Node | None
    head: int


class CacheCore:
    """State and primitives. `RadixCache` adds the operations."""

    def __init__(self, num_blocks: int, block_size: int, policy: str) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be int, not {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if num_blocks > 2**31 - 1:
            raise ValueError(f"num_blocks must fit int32 block tables (at most {2**31 - 1}), not {num_blocks}")
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
        self._groups = PolicyGroups(policy, num_blocks)
        self._policy = self._groups.default
        self._roots: dict[Namespace, Root] = {}
        self._events: EventLog | None = None

    # -- reading ---------------------------------------------------------------------------------------------------

    def _walk(self, node: Node, key: bytes, pos: int, end: int, tables: list[bytes]) -> Walk:
        """Follow `key[pos:end]` (whole blocks) down from `node`, appending the blocks of whole matches to `tables`.

        O(length of the match), by memcmp. Changes nothing.
        """
        stride = self._stride
        children = node.children
        while children and pos < end:
            child = children.get(key[pos : pos + stride])
            if child is None:
                break
            edge = child.key
            size = len(edge)
            # the dictionary has compared the first block
            if size == stride or (pos + size <= end and key.startswith(edge, pos)):
                tables.append(child.blocks)
                pos += size
                node = child
                children = child.children
                continue
            return Walk(node, pos, child, self._common(edge, key, pos, min(size, end - pos) // stride))
        return Walk(node, pos, None, 0)

    def _common(self, edge: bytes, key: bytes, pos: int, limit: int) -> int:
        """Count the leading blocks, 1 to `limit`, that `edge` shares with `key[pos:]`. The first is equal."""
        stride = self._stride
        if key.startswith(edge[: limit * stride], pos):
            return limit
        low, high = 1, limit  # low blocks are equal, high blocks are not
        while high - low > 1:
            middle = (low + high) >> 1
            if key.startswith(edge[low * stride : middle * stride], pos + low * stride):
                low = middle
            else:
                high = middle
        return low

    # -- shape -----------------------------------------------------------------------------------------------------

    def _root(self, namespace: Namespace) -> Root:
        """Return the tree of `namespace`, a new one that is not yet registered if there is none."""
        root = self._roots.get(namespace)
        if root is None:
            account = self._groups.account(namespace.tenant)
            root = Root(namespace, self._stride, self._groups.policy(account, DEFAULT_PRIORITY), account)
        return root

    def _split(self, lower: Node, head: int) -> Node:
        """Move the first `head` blocks of `lower` into a new parent. Both keep last use, priority and history.

        `lower` keeps its object, its holders and its candidacy. O(length of the run).
        """
        cut = head * self._stride
        parent = lower.parent
        upper = Node(lower.key[:cut], lower.blocks[: head * 4], parent, lower.start + head)
        upper.policy = lower.policy
        upper.last_use = lower.last_use
        upper.priority = lower.priority
        upper.origin = lower.origin
        upper.ref = 1 if lower.ref else 0
        upper.pins = 1 if lower.pins else 0
        if lower.fence:
            upper.fence = 1
        if upper.policy is None:
            self._odd += 1
        lower.origin = None
        lower.key = lower.key[cut:]
        lower.blocks = lower.blocks[head * 4 :]
        lower.parent = upper
        upper.children = {lower.key[: self._stride]: lower}
        if parent.children is not None and parent.children.get(upper.key[: self._stride]) is lower:
            parent.children[upper.key[: self._stride]] = upper
        self._num_nodes += 1
        if upper.policy is not None:
            upper.policy.split(upper, lower)
        return upper

    def _attach(self, parent: Node, key: bytes, blocks: bytes, media: bytes = b"") -> Node:
        """Hang a new run under `parent`, held once by the caller in place of its hold on `parent`. O(1)."""
        num_new = len(blocks) >> 2
        node = Node(key, blocks, parent, parent.end + num_new)
        node.ref = 1
        policy = parent.policy
        if policy is None:
            self._odd += 1
        else:
            if parent.priority != DEFAULT_PRIORITY:  # retention covers a range, not what grows below it
                policy = node.policy = self._groups.policy(parent.account, DEFAULT_PRIORITY)
            self._tree_blocks += num_new
            policy.inserted(node, num_new)
        first = key[: self._stride]
        if media:
            node.media = media
            first += media
        if parent.children is None:
            parent.children = {first: node}
        else:
            parent.children[first] = node
        self._num_nodes += 1
        return node

    def _detach(self, node: Node) -> None:
        """Take the childless `node`, no candidate any more, out of the tree. O(1)."""
        parent = node.parent
        self._num_nodes -= 1
        children = parent.children
        first = node.key[: self._stride] + node.media
        if children is None or children.get(first) is not node:
            return  # the root of a dead subtree: nobody lists it
        del children[first]
        if not children:
            parent.children = None
            if parent.ref == 0:
                if parent.fence == 0 and parent.policy is not None:
                    parent.policy.add(parent)
            elif parent.ref == 1 and parent.parent is parent:
                self._forget(parent)

    def _forget(self, root: Node) -> None:
        """Drop an empty tree that nobody uses, so that namespaces do not pile up."""
        assert isinstance(root, Root)
        if self._roots.get(root.namespace) is root:
            del self._roots[root.namespace]

    # -- holders ---------------------------------------------------------------------------------------------------

    def _hold(self, node: Node) -> None:
        """Add a holder that ends at `node`. O(nodes of the path that were not held)."""
        refs = node.ref
        node.ref = refs + 1
        if refs:
            return
        if self._odd:
            self._hold_odd(node)
            return
        if node.children is None:
            node.policy.remove(node)  # type: ignore[union-attr]  # dead nodes are odd
        bottom = node.end
        while True:
            node = node.parent
            refs = node.ref
            node.ref = refs + 1
            if refs:
                break
        self._cached -= bottom - node.end

    def _hold_odd(self, node: Node) -> None:
        """`_hold` where some nodes are fenced. `node.ref` was raised from 0. Dead nodes are never taken anew."""
        while True:
            if node.fence:
                self._quarantine.node_blocks -= node.num_blocks
            else:
                self._cached -= node.num_blocks
                if node.children is None:
                    assert node.policy is not None
                    node.policy.remove(node)
            node = node.parent
            refs = node.ref
            node.ref = refs + 1
            if refs:
                return

    def _drop(self, node: Node) -> None:
        """Remove a holder that ended at `node` and stamp what nobody holds any more with the present time.

        O(nodes of the path that become unheld).
        """
        refs = node.ref - 1
        node.ref = refs
        if refs == 0:
            if self._odd:
                self._drop_odd(node)
                return
            time = node.last_use = self._tick
            if node.children is None:
                node.policy.add(node)  # type: ignore[union-attr]  # dead nodes are odd
            bottom = node.end
            while True:
                node = node.parent
                refs = node.ref - 1
                node.ref = refs
                if refs:
                    break
                node.last_use = time
            self._cached += bottom - node.end
        if refs == 1 and node.children is None and node.parent is node:
            self._forget(node)

    def _drop_odd(self, node: Node) -> None:
        """`_drop` where some nodes are dead or fenced. `node.ref` was lowered to 0 already."""
        while True:
            parent = node.parent
            node.last_use = self._tick
            self._settle(node)
            refs = parent.ref - 1
            parent.ref = refs
            node = parent
            if refs:
                break
        if refs == 1 and node.children is None and node.parent is node:
            self._forget(node)

    def _settle(self, node: Node) -> None:
        """Give the blocks of `node`, which has no holder left, their state: quarantined, free or cached."""
        if node.fence:
            self._quarantine.node_blocks += node.num_blocks
        elif node.policy is None:
            self._give(node.blocks, node)
            self._odd -= 1
            self._detach(node)
        else:
            self._cached += node.num_blocks
            if node.children is None:
                node.policy.add(node)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _take(self, count: int, payer: Node) -> bytes:
        """Take `count` >= 1 free blocks, which must be there. O(count)."""
        free = self._free
        taken = free[: -count - 1 : -1].tobytes()
        del free[-count:]
        if payer.account is not None:
            payer.account.used += count
        return taken

    def _give(self, blocks: bytes, payer: Node) -> None:
        """Give blocks back to the free list. O(number of blocks)."""
        self._free.frombytes(blocks)
        if payer.account is not None:
            payer.account.used -= len(blocks) >> 2

    def _make_room(self, needed: int, payer: Node, target: Node, head: int = 0) -> None:
        """Refuse unless `needed` blocks can be had without touching the path to `target` (its first `head` blocks).

        Changes nothing but what is expired.

        Raises:
            PoolExhausted, QuotaExceeded.

        """
        node = target
        spared = 0
        if head and target.ref == 0 and not target.fence:
            spared = head - target.num_blocks  # the rest of a partly hit run stays evictable
        while node.ref == 0:
            if not node.fence:
                spared += node.num_blocks
            node = node.parent
        allocatable = len(self._free) + self._cached - spared
        if needed > allocatable:
            raise PoolExhausted(
                needed,
                allocatable_blocks=allocatable,
                num_blocks=self.num_blocks,
                retry_after_step=self._quarantine.retry_after(needed - allocatable),
            )

    def _evict(self, count: int, taken: list[bytes] | None = None) -> int:
        """Evict up to `count` blocks, tail blocks of the policy's victims first. Return how many went.

        O(1) a block plus one policy decision a run.
        """
        left = count
        free = self._free
        groups = self._groups
        while left > 0:
            run = groups.victim() if groups.many else self._policy.victim()
            if run is None:
                break
            assert isinstance(run, Node)
            policy = run.policy
            assert policy is not None
            gone = run.blocks
            size = len(gone) >> 2
            if size > left:
                policy.evicted(run, left)
                keep = size - left
                gone = gone[keep * 4 :]
                if self._events is not None:
                    self._events.removed(run, gone)
                run.blocks = run.blocks[: keep * 4]
                run.key = run.key[: keep * self._stride]
                run.end -= left
                size = left
            else:
                policy.evicted(run, size)
                policy.remove(run)
                policy.dropped(run)
                if self._events is not None:
                    self._events.removed(run, gone)
                self._detach(run)
            left -= size
            free.frombytes(gone)
            if run.account is not None:
                run.account.used -= size
            if taken is not None:
                taken.append(gone)
        went = count - left
        self._cached -= went
        self._tree_blocks -= went
        self._evicted_blocks += went
        return went
