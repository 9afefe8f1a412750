"""The proof that a cache is consistent: every counter, state and link recomputed from scratch and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radixpool.radix.errors import InvariantViolation
from radixpool.radix.node import Node

if TYPE_CHECKING:
    from radixpool.radix.inspection import Inspection

__all__ = ["check_cache"]

_FREE, _CACHED, _HELD, _QUARANTINED = range(1, 5)
_NAMES = ("nowhere", "free", "cached", "held", "quarantined")


class _Checker:
    """One run of the proof."""

    def __init__(self, cache: Inspection) -> None:
        self.cache = cache
        self.states = np.zeros(cache.num_blocks, dtype=np.int8)
        self.nodes: dict[int, Node] = {}
        self.refs: dict[int, int] = {}
        self.fences: dict[int, int] = {}
        self.tree_blocks = self.pinned = 0

    def fail(self, what: str) -> None:
        raise InvariantViolation(f"{what}\n{self.cache.stats()}")

    def need(self, condition: bool, what: str) -> None:
        if not condition:
            self.fail(what)

    def claim(self, packed: bytes, state: int, what: str) -> None:
        """Put blocks into a state; each block must be in none yet."""
        ids = np.frombuffer(packed, dtype=np.int32)
        if not ids.size:
            return
        self.need(int(ids.min()) >= 0 and int(ids.max()) < len(self.states), f"{what}: block id out of range")
        taken = ids[self.states[ids] != 0]
        if taken.size:
            other = _NAMES[self.states[taken[0]]]
            self.fail(f"{what}: block {taken[0]} is {_NAMES[state]} and {other}")
        self.states[ids] = state
        self.need(len(np.unique(ids)) == len(ids), f"{what}: a block is named twice")

    def collect(self) -> None:
        """Find every node: findable ones from the roots, dead ones from their holders."""
        stack: list[Node] = list(self.cache._roots.values())
        for namespace, root in self.cache._roots.items():
            self.need(root.namespace == namespace, f"tree of {namespace} is listed under another namespace")
        stack.extend(seq._node for seq in self.cache._sequences.values())
        stack.extend(seq._source for seq in self.cache._sequences.values() if seq._source is not None)
        stack.extend(self.cache._quarantine.fenced_nodes())
        stack.extend(self.cache._pin_nodes())
        while stack:
            node = stack.pop()
            if id(node) in self.nodes:
                continue
            self.nodes[id(node)] = node
            if node.parent is not node:
                stack.append(node.parent)
            for first, child in (node.children or {}).items():
                self.need(child.parent is node, f"{child} is listed by a node that is not its parent")
                self.need(child.key[: node.stride] + child.media == first, f"{child} is listed under another block")
                stack.append(child)

    def count(self) -> None:
        """Work out from the holders what every node's counts must be."""
        for seq in self.cache._sequences.values():
            self.refs[id(seq._node)] = self.refs.get(id(seq._node), 0) + 1
            if seq._source is not None:
                self.refs[id(seq._source)] = self.refs.get(id(seq._source), 0) + 1
        pins: dict[int, int] = {}
        for seq in self.cache._sequences.values():
            account = self.cache._groups.account(seq._namespace.tenant)
            self.need(seq._node.account is account, f"sequence {seq.handle} is charged to the wrong account")
        for node in self.cache._pin_nodes():
            self.refs[id(node)] = self.refs.get(id(node), 0) + 1
            pins[id(node)] = pins.get(id(node), 0) + 1
        for node in self.cache._quarantine.fenced_nodes():
            self.fences[id(node)] = self.fences.get(id(node), 0) + 1
        for node in sorted(self.nodes.values(), key=lambda node: -node.end):  # children before parents
            if node.parent is node:
                self.need(node.ref == self.refs.get(id(node), 0) + 1, f"root {node} has the wrong ref count")
                continue
            for counts, value, what in (
                (self.refs, node.ref, "ref"),
                (self.fences, node.fence, "fence"),
                (pins, node.pins, "pin"),
            ):
                expected = counts.get(id(node), 0)
                self.need(value == expected, f"{node} has {what} count {value}, its holders make {expected}")
                if expected:
                    counts[id(node.parent)] = counts.get(id(node.parent), 0) + 1

    def check_node(self, node: Node) -> None:
        num_blocks = node.num_blocks
        self.need(num_blocks > 0, f"{node} is empty")
        self.need(len(node.key) == num_blocks * node.stride, f"{node} has {len(node.key)} bytes of tokens")
        self.need(node.end == node.parent.end + num_blocks, f"{node} does not begin where its parent ends")
        self.need(node.children is None or len(node.children) > 0, f"{node} has an empty dictionary of children")
        self.need(not node.media or num_blocks == 1, f"{node} has media and more than one block")
        self.need(node.root is node.parent.root, f"{node} is of another tree than its parent")
        dead = node.policy is None
        listed = (node.parent.children or {}).get(node.key[: node.stride] + node.media) is node
        if dead:
            self.need(node.ref > 0 or node.fence > 0, f"{node} is dead and nobody holds it")
        else:
            self.need(listed and node.parent.policy is not None, f"{node} is alive but not findable")
            self.tree_blocks += num_blocks
            group = self.cache._groups.policy(node.account, node.priority)
            self.need(node.policy is group, f"{node} is ranked by another group's policy")
        if node.pins:
            self.pinned += num_blocks
        self.need(node.account is node.parent.account, f"{node} is charged to another account than its parent")
        state = _HELD if node.ref else _QUARANTINED if node.fence else _CACHED
        self.claim(node.blocks, state, repr(node))

    def check_sequences(self) -> None:
        for handle, seq in self.cache._sequences.items():
            node, what = seq._node, f"sequence {handle}"
            self.need(seq.handle == handle and not seq.released, f"{what} is listed wrongly")
            self.need(
                node.end == seq.committed_tokens // self.cache.block_size, f"{what}: tree part is not what is committed"
            )
            self.need(
                seq.committed_tokens <= seq.num_tokens <= seq.capacity_tokens, f"{what}: token counts out of order"
            )
            path: list[bytes] = []
            keys: list[bytes] = []
            while node.parent is not node:
                path.append(node.blocks)
                keys.append(node.key)
                node = node.parent
            table = b"".join(reversed(path))
            self.need(seq._table.startswith(table), f"{what}: its table differs from its path")
            self.need(seq._tokens.startswith(b"".join(reversed(keys))), f"{what}: its path holds other tokens")
            self.claim(seq._table[len(table) :], _HELD, what)

    def check_counters(self) -> None:
        cache = self.cache
        stats = cache.stats()
        quarantined = np.flatnonzero(self.states == 0)
        self.need(
            len(quarantined) == cache._quarantine.private_blocks,
            f"{len(quarantined)} blocks are nowhere, {cache._quarantine.private_blocks} wait privately for a step",
        )
        self.states[quarantined] = _QUARANTINED
        for state, value in (
            (_FREE, stats.free_blocks),
            (_CACHED, stats.cached_blocks),
            (_HELD, stats.held_blocks),
            (_QUARANTINED, stats.quarantined_blocks),
        ):
            found = int((self.states == state).sum())
            self.need(found == value, f"{found} blocks are {_NAMES[state]}, the counter says {value}")
        live = [node for node in self.nodes.values() if node.parent is not node]
        self.need(len(live) == cache._num_nodes, f"{len(live)} nodes, the counter says {cache._num_nodes}")
        self.need(self.tree_blocks == cache._tree_blocks, f"{self.tree_blocks} tree blocks, not {cache._tree_blocks}")
        self.need(self.pinned == cache._pinned, f"{self.pinned} pinned blocks, the counter says {cache._pinned}")
        odd = sum(node.policy is None for node in live) + len(list(cache._quarantine.fenced_nodes()))
        self.need(odd == cache._odd, f"{odd} dead nodes and fences, the counter says {cache._odd}")
        self.check_accounts()
        for root in cache._roots.values():
            self.need(root.children is not None or root.ref > 1, f"tree of {root.namespace} is empty and unused")

    def check_accounts(self) -> None:
        """Compare what tenants with a quota are charged with what they have."""
        for account in self.cache._groups.accounts.values():
            own = [node for node in self.nodes.values() if node.account is account]
            private = sum(
                seq.num_blocks - seq._node.end for seq in self.cache._sequences.values() if seq._node.account is account
            )
            used = sum(node.num_blocks for node in own) + private
            cached = sum(node.num_blocks for node in own if not (node.ref or node.fence))
            self.need(account.used == used, f"{account} uses {used} blocks")
            self.need(account.cached == cached, f"{account} has {cached} cached blocks")

    def check_candidates(self) -> None:
        """Compare the policies' candidates with the unheld, unfenced, childless nodes."""
        expected = {
            id(node)
            for node in self.nodes.values()
            if node.parent is not node and not (node.ref or node.fence or node.children) and node.policy is not None
        }
        found = [id(run) for policy in self.cache._groups.policies() for run in policy.candidates()]
        self.need(len(found) == len(set(found)), "a run is a candidate twice")
        self.need(set(found) == expected, f"{len(expected)} candidates, the policies know {len(found)}")

    def run(self) -> None:
        self.claim(self.cache._free.tobytes(), _FREE, "free list")
        self.collect()
        self.count()
        for node in self.nodes.values():
            if node.parent is not node:
                self.check_node(node)
        self.check_sequences()
        self.check_counters()
        self.check_candidates()


def check_cache(cache: Inspection) -> None:
    """Raise `InvariantViolation` unless every invariant of `cache` holds. O(size of the cache)."""
    _Checker(cache).run()
