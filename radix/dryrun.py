"""Dry runs: a shadow of the trees and the policies on which evictions can be tried out."""

from __future__ import annotations

import copy
from typing import Any

from radixpool.radix.node import Node, Root
from radixpool.radix.options import CacheOptions
from radixpool.radix.room import Room

__all__ = ["shadow"]


def shadow(cache: Room) -> Room:
    """Return a copy of everything that eviction looks at and changes, telling nobody. O(runs).

    Runs are copied one by one and put into the memo of `deepcopy`, so copying the policies' lists never recurses from
    run to run.
    """
    options = CacheOptions(cache.num_blocks, cache.block_size, cache._groups.spec, cache._clock, None, None, None)
    other = Room(options)
    memo: dict[int, Any] = {}
    originals: list[Node] = list(cache._roots.values())
    for node in originals:
        memo[id(node)] = _copy(node)
        originals.extend((node.children or {}).values())
    groups = cache._groups
    other._groups = copy.deepcopy(groups, memo)
    other._policy = other._groups.default
    for node in originals:
        twin: Node = memo[id(node)]
        twin.parent = memo[id(node.parent)]
        twin.root = memo[id(node.root)]
        twin.children = node.children and {first: memo[id(child)] for first, child in node.children.items()}
        twin.policy = memo.get(id(node.policy))
        twin.account = memo.get(id(node.account))
        twin.prev, twin.next, twin.data = (copy.deepcopy(value, memo) for value in (node.prev, node.next, node.data))
    other._free = cache._free[:]
    other._cached = cache._cached
    other._tree_blocks = cache._tree_blocks
    other._num_nodes = cache._num_nodes
    other._roots = {namespace: memo[id(root)] for namespace, root in cache._roots.items()}
    return other


_COPIED = (
    "key", "blocks", "end", "stride", "last_use", "priority", "retained_until", "origin",
    "ref", "fence", "pins", "media",
)  # fmt: skip


def _copy(node: Node) -> Node:
    twin = object.__new__(type(node))
    for name in _COPIED:
        setattr(twin, name, getattr(node, name))
    if isinstance(node, Root) and isinstance(twin, Root):
        twin.namespace = node.namespace
    return twin
