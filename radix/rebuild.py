"""Build the trees of a cache from a restore plan: what a former incarnation had committed is findable again.

What the former incarnation had handed out may still be read or written by GPU steps it started. It is modelled as a
worker that never completes a step: every restored path is fenced by it, and the blocks that were not committed wait for
it. `FORMER_INCARNATION` is removed like any dead worker once its last step is known to be over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from radixpool.radix.fences import FencedCore
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.node import Node
from radixpool.radix.quarantine import NO_STEP
from radixpool.radix.restore import RestorePlan
from radixpool.radix.state import _last_block

__all__ = ["FORMER_INCARNATION", "restore_blocks"]

FORMER_INCARNATION: Final = "(former incarnation)"
"""Name of the worker that stands for everybody who may still use blocks of the former incarnation."""
_FENCE: Final = {FORMER_INCARNATION: NO_STEP}


def restore_blocks(
    cache: FencedCore,
    plan: RestorePlan,
    *,
    namespaces: Mapping[int, Namespace],
    media: Mapping[int, bytes],
    quarantined: npt.NDArray[np.int32],
) -> None:
    """Fill the new, empty `cache` with the planned trees; nothing of it can be evicted before the fence is passed.

    The blocks `quarantined`, none of which is in the plan, stay unusable just as long; all others are free. O(runs)
    plus one copy of the tokens. The caller ends the fence with `cache.remove_worker(FORMER_INCARNATION)`.

    Raises:
        ValueError: the cache is in use, has another block size, or a block is named twice.

    """
    free = _others(cache, plan, quarantined)
    cache._quarantine.add_worker(FORMER_INCARNATION, -1)
    cache._free = cache._free[:0]
    cache._free.frombytes(free.astype(np.uint32).tobytes())
    told, cache._told = cache._told, False  # what is restored is recorded already, and events are told here
    leaves = _attach_runs(cache, plan, namespaces, media)
    cache._told = told
    leaves.sort(key=lambda node: node.last_use)  # ties of one plan keep their order, so that replicas agree
    if leaves:
        _fence(cache, leaves, plan.loose.blocks.size)
        cache._tick = int(plan.loose.last_uses.max())
    cache._retire(quarantined.astype(np.int32).tobytes(), cache._root(DEFAULT_NAMESPACE), _FENCE)


def _others(cache: FencedCore, plan: RestorePlan, quarantined: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the blocks that are neither planned nor quarantined, the highest first, as a new cache stacks them."""
    if len(cache._free) != cache.num_blocks or cache._roots:
        raise ValueError("cache must be new and empty to be restored")
    if plan.loose.tokens.shape[1] != cache.block_size:
        raise ValueError(f"plan.block_size must be {cache.block_size}, got {plan.loose.tokens.shape[1]}")
    named = np.concatenate((plan.loose.blocks, quarantined))
    if named.size and not 0 <= named.min() <= named.max() < cache.num_blocks:
        raise ValueError(f"plan.blocks must be 0 to {cache.num_blocks - 1}, got {named.min()} to {named.max()}")
    is_free = np.ones(cache.num_blocks, dtype=bool)
    is_free[named] = False
    free = np.flatnonzero(is_free)[::-1]
    if free.size + named.size != cache.num_blocks:
        raise ValueError("plan.blocks and quarantined must name each block once")
    return free


def _attach_runs(
    cache: FencedCore, plan: RestorePlan, namespaces: Mapping[int, Namespace], media: Mapping[int, bytes]
) -> list[Node]:
    """Make a node per run, unheld, fenced by its children. Return those without any."""
    nodes: list[Node] = []
    events = cache._events
    for run in plan.runs():
        namespace = namespaces[run.namespace]
        mark = media[run.media] if run.media else b""
        if run.parent >= 0:
            parent = nodes[run.parent]
        else:
            parent = cache._roots.get(namespace) or cache._roots.setdefault(namespace, cache._root(namespace))
        node = cache._attach(parent, run.tokens, run.blocks, mark)
        node.ref = 0
        if parent.parent is not parent:
            parent.fence += 1
        node.last_use = run.last_use
        if node.account is not None:
            node.account.used += node.num_blocks
        nodes.append(node)
        if events is not None:
            events.stored(namespace, _last_block(parent), parent.end, run.tokens, run.blocks, mark)
    return [node for node in nodes if node.children is None]


def _fence(cache: FencedCore, leaves: list[Node], num_blocks: int) -> None:
    """Fence every path to a leaf: a leaf once by the former incarnation, any other node once by each child."""
    for leaf in leaves:
        leaf.fence = 1
    cache._odd += len(leaves)
    cache._quarantine.node_blocks += num_blocks

    def unfence() -> None:
        for leaf in leaves:
            cache._unfence(leaf)

    cache._quarantine.wait(_FENCE, num_blocks, unfence, leaves)
