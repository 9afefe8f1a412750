"""The trees: how a path is found, split, hung in, taken out and held.

* `_walk` reads and changes nothing; `_split`, `_hold`, `_drop` and `_attach` keep every count right;
* a node is a candidate of its policy exactly when it is alive, unheld, unfenced and childless;
* every loop is bounded by the path or by what it frees, and nothing recurses.
"""

from __future__ import annotations

from radixpool.radix.eviction.base import DEFAULT_PRIORITY
from radixpool.radix.node import Node
from radixpool.radix.state import CacheState

__all__ = ["Tree", "Walk"]


Walk = tuple[Node, int, Node | None, int]
"""Where a walk ended: the deepest node that matched whole, the bytes matched by whole nodes, a child of which only the
head matched (or None), and how many blocks of it did. A plain tuple: making a named one costs a tenth of a lookup."""


class Tree(CacheState):
    """Primitives on trees."""

    # -- reading

    def _walk(self, node: Node, key: bytes, pos: int, end: int, tables: list[bytes]) -> Walk:
        """Follow `key[pos:end]` (whole blocks) down from `node`, appending the blocks of whole matches to `tables`.

        O(length of the match), by memcmp. Changes nothing.
        """
        stride = self._stride
        add = tables.append
        children = node.children
        while children is not None and pos < end:
            after = pos + stride
            child = children.get(key[pos:after])
            if child is None:
                break
            if len(child.key) != stride:  # of one block the dictionary has compared all
                edge = child.key
                size = len(edge)
                after = pos + size
                if after > end or not key.startswith(edge, pos):
                    return node, pos, child, self._common(edge, key, pos, min(size, end - pos) // stride)
            add(child.blocks)
            pos = after
            node = child
            children = node.children
        return node, pos, None, 0

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

    # -- shape

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
        upper.retained_until = lower.retained_until
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
            if self._told:
                self._tell_stored(parent, key, blocks, media)
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

    # -- holders

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
        if node.account is not None:
            node.account.cached -= bottom - node.end

    def _hold_odd(self, node: Node) -> None:
        """`_hold` where some nodes are fenced. `node.ref` was raised from 0. Dead nodes are never taken anew."""
        while True:
            if node.fence:
                self._quarantine.node_blocks -= node.num_blocks
            else:
                self._count_cached(node, -node.num_blocks)
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
            if self._persistence is not None:
                self._tell_touched(node)
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
            if node.account is not None:
                node.account.cached += bottom - node.end
        if refs == 1 and node.children is None and node.parent is node:
            self._forget(node)

    def _drop_odd(self, node: Node) -> None:
        """`_drop` where some nodes are dead or fenced. `node.ref` was lowered to 0 already."""
        node.last_use = self._tick
        self._tell_touched(node)
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
            self._count_cached(node, node.num_blocks)
            if node.children is None:
                node.policy.add(node)

    def _count_cached(self, node: Node, change: int) -> None:
        """Count blocks of `node` that became cached, or are no longer."""
        self._cached += change
        if node.account is not None:
            node.account.cached += change
