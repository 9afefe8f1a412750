"""Build the trees of a cache from a restore plan: what a former incarnation had committed is findable again.

What the former incarnation had handed out may still be read or written by GPU steps it started. It is modelled as a
worker that never completes a step: every restored path is fenced by it, and the blocks that were not committed wait for
it. Once its last step is known to be over, `FORMER_INCARNATION` is removed like any dead worker, or in slices
(`lift_fence`) where others wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from radixpool.radix.eviction.base import EvictionPolicy
from radixpool.radix.fences import FencedCore
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.node import Node
from radixpool.radix.quarantine import NO_STEP
from radixpool.radix.restore import RestorePlan, latest_below
from radixpool.radix.state import _last_block

__all__ = ["FORMER_INCARNATION", "lift_fence", "restore_blocks"]

FORMER_INCARNATION: Final = "(former incarnation)"
"""Name of the worker that stands for everybody who may still use blocks of the former incarnation."""
_FENCE: Final = {FORMER_INCARNATION: NO_STEP}
_RUNS_PER_FENCE: Final = 256
_BLOCKS_PER_FENCE: Final = 16_384
"""What becomes usable at once when one fence of the former incarnation is lifted."""
FENCES_PER_SLICE: Final = 4


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
    plus one copy of the tokens. The caller ends the fence with `lift_fence`, or with
    `cache.remove_worker(FORMER_INCARNATION)` all at once.

    Raises:
        ValueError: the cache is in use, has another block size, or a block is named twice.

    """
    free = _others(cache, plan, quarantined)
    cache._quarantine.add_worker(FORMER_INCARNATION, -1)
    cache._free = cache._free[:0]
    cache._free.frombytes(free.astype(np.uint32).tobytes())
    nodes = _attach_runs(cache, plan, namespaces, media)
    if nodes:
        _fence(cache, nodes, plan)
        cache._tick = int(plan.loose.last_uses.max())
    for first in range(0, quarantined.size, _BLOCKS_PER_FENCE):
        part = quarantined[first : first + _BLOCKS_PER_FENCE].astype(np.int32).tobytes()
        cache._retire(part, cache._root(DEFAULT_NAMESPACE), _FENCE)


def lift_fence(cache: FencedCore) -> bool:
    """Forget a slice of what waits for the former incarnation, least recently used first. Return whether more waits.

    Nothing new waits for it from the first call on. O(1024 runs + 65,536 uncommitted blocks) a call.
    """
    if FORMER_INCARNATION in cache._quarantine.completed:
        cache._quarantine.retire_worker(FORMER_INCARNATION)
    return cache._quarantine.pass_retired(FENCES_PER_SLICE)


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
    """Make a node per run, unheld, fenced once by each of its children; once where there are none."""
    roots = {
        number: cache._roots.setdefault(namespaces[number], cache._root(namespaces[number]))
        for number in np.unique(plan.loose.namespaces).tolist()
    }
    num_children = np.bincount(plan.run_parents + 1, minlength=plan.num_runs + 1)[1:]
    nodes: list[Node] = []
    keep, stride = nodes.append, cache._stride
    for parent_run, namespace, mark, end, last_use, key, blocks, fence in zip(
        *plan.runs(), np.maximum(num_children, 1).tolist(), strict=True
    ):
        parent = nodes[parent_run] if parent_run >= 0 else roots[namespace]
        node = Node(key, blocks, parent, end)
        node.fence = fence
        node.last_use = last_use
        first = key[:stride]
        if mark:
            node.media = media[mark]
            first += node.media
        if parent.children is None:
            parent.children = {first: node}
        else:
            parent.children[first] = node
        keep(node)
    _count(cache, nodes)
    _tell(cache, nodes)
    return nodes


def _count(cache: FencedCore, nodes: list[Node]) -> None:
    """Enter new nodes into the books of the cache, its policies and its accounts."""
    cache._num_nodes += len(nodes)
    for root in cache._roots.values():
        if root.account is not None:
            root.account.used += sum(node.num_blocks for node in nodes if node.root is root)
    if type(cache._policy).inserted is not EvictionPolicy.inserted:
        for node in nodes:
            node.policy.inserted(node, node.num_blocks)  # type: ignore[union-attr]  # all of them are alive


def _tell(cache: FencedCore, nodes: list[Node]) -> None:
    """Tell the events of new nodes, parents first. What is restored is recorded already."""
    events = cache._events
    if events is None:
        return
    events.skip(len(nodes) - events.capacity)
    for node in nodes[-events.capacity :]:
        parent = node.parent
        events.stored(node.root.namespace, _last_block(parent), parent.end, node.key, node.blocks, node.media)


def _fence(cache: FencedCore, nodes: list[Node], plan: RestorePlan) -> None:
    """Fence every path to a leaf: a leaf once by the former incarnation, any other node once by each child.

    A leaf's fence ends together with those of the ancestors that have no other leaf left, so leaves are put together
    by how many of these they have.
    """
    num_blocks = plan.loose.blocks.size
    cache._tree_blocks += num_blocks
    cache._quarantine.node_blocks += num_blocks
    leaves, runs = _by_last_use(plan)
    cache._odd += leaves.size
    part = (np.cumsum(runs) - 1) // _RUNS_PER_FENCE
    for group in np.split(leaves, np.flatnonzero(np.diff(part)) + 1):
        fenced = list(map(nodes.__getitem__, group.tolist()))
        cache._quarantine.wait(_FENCE, len(fenced), partial(cache._unfence_leaves, fenced), fenced)


def _by_last_use(plan: RestorePlan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the leaves, least recently used first, and for each how many runs end with it: it and its ancestors."""
    parents = np.where(plan.run_parents < 0, plan.num_runs, plan.run_parents)
    leaves = np.flatnonzero(np.bincount(parents, minlength=plan.num_runs)[: plan.num_runs] == 0)
    # Ties of one plan keep their order, so that replicas agree.
    leaves = leaves[np.argsort(plan.loose.last_uses[plan.starts[leaves]], kind="stable")]
    rank = np.zeros(plan.num_runs, dtype=np.int64)
    rank[leaves] = np.arange(leaves.size)
    last_leaf = np.maximum(rank, latest_below(parents, rank))
    return leaves, np.bincount(last_leaf, minlength=leaves.size)
