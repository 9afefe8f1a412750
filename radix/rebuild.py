"""Build the trees of a cache from a restore plan: what a former incarnation had committed is findable again.

What the former incarnation had handed out may still be read or written by GPU steps it started. It is modelled as a
worker that has completed nothing: every restored path is fenced on its first step, and the blocks that were not
committed wait for it. `FORMER_INCARNATION` is removed like any dead worker once its last step is known to be over.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from radixpool.radix.fences import FencedCore
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.node import Node
from radixpool.radix.restore import RestorePlan

__all__ = ["FORMER_INCARNATION", "restore_blocks"]

FORMER_INCARNATION: Final = "(former incarnation)"
"""Name of the worker that stands for everybody who may still use blocks of the former incarnation."""
_FENCE: Final = {FORMER_INCARNATION: 0}


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
    persistence, cache._persistence = cache._persistence, None  # what is restored is recorded already
    with _collector_paused():
        leaves = _attach_runs(cache, plan, namespaces, media)
        leaves.sort(key=lambda node: node.last_use)  # ties of one plan keep their order, so that replicas agree
        for leaf in leaves:
            _fence_path(cache, leaf)
    cache._persistence = persistence
    if plan.loose.last_uses.size:
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


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Make a million objects that all stay without the collector looking at them again and again (measured: 25 x)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _attach_runs(
    cache: FencedCore, plan: RestorePlan, namespaces: Mapping[int, Namespace], media: Mapping[int, bytes]
) -> list[Node]:
    """Make a node per run, unheld and no candidate. Return those without children."""
    nodes: list[Node] = []
    for run in plan.runs():
        if run.parent >= 0:
            parent = nodes[run.parent]
        else:
            namespace = namespaces[run.namespace]
            parent = cache._roots.get(namespace) or cache._roots.setdefault(namespace, cache._root(namespace))
        node = cache._attach(parent, run.tokens, run.blocks, media[run.media] if run.media else b"")
        node.ref = 0
        node.last_use = run.last_use
        if node.account is not None:
            node.account.used += node.num_blocks
        nodes.append(node)
    return [node for node in nodes if node.children is None]


def _fence_path(cache: FencedCore, leaf: Node) -> None:
    """Fence an unheld path and count its newly fenced nodes as quarantined."""
    node, count = leaf, 0
    while node.parent is not node and not node.fence:
        count += node.num_blocks
        node = node.parent
    cache._fence(leaf)
    cache._quarantine.node_blocks += count
    cache._quarantine.wait(_FENCE, count, lambda: cache._unfence(leaf), leaf)
