"""Pins: cached prefixes that are not evicted, within a budget, for good or for a time.

A pin is a holder without a sequence. Time is read from the injected clock by `pin` and `expire` only, and nothing
expires but through `expire`, so that a replayed log gives the same victims whatever the clocks say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from radixpool.radix.errors import NotCached, PinBudgetExceeded, UnknownPin
from radixpool.radix.lifecycle import Lifecycle
from radixpool.radix.media import MediaSpan, mark_blocks
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.node import Node
from radixpool.radix.options import CacheOptions
from radixpool.radix.results import ExpireResult, PinInfo
from radixpool.radix.timing import check_ttl
from radixpool.radix.tokens import TokensLike, pack_tokens

__all__ = ["Pins"]


class Pins(Lifecycle):
    """Operations on pins."""

    def __init__(self, options: CacheOptions) -> None:
        super().__init__(options)
        budget = options.pin_budget
        self._pin_budget = options.num_blocks // 2 if budget is None else budget
        self._pins: dict[int, tuple[PinInfo, Node]] = {}
        self._last_pin = 0

    def pin(
        self,
        tokens: TokensLike,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        media: Iterable[MediaSpan] = (),
        ttl: float | None = None,
    ) -> PinInfo:
        """Keep the cached whole blocks of a prefix from being evicted, until `unpin` or for `ttl` seconds.

        Blocks under several pins count once. A flush drops the pins of what it clears. O(length of the match).

        Raises:
            NotCached: not one whole block of it is cached.
            PinBudgetExceeded: more blocks would be pinned than the budget allows; nothing was changed.
            ValueError, TypeError: bad tokens, media or TTL.

        """
        key = pack_tokens(tokens)
        marks = mark_blocks(media, len(key) >> 2, self.block_size)
        check_ttl(ttl)
        root = self._root(namespace)
        node, _, child, head = self._walk_marked(root, key, len(key) // self._stride, marks, [])
        if node is root and child is None:
            raise NotCached(len(key) >> 2)
        target = child or node
        new = head - target.num_blocks if child is not None and not target.pins else 0
        above = target
        while above.parent is not above and not above.pins:
            new += above.num_blocks
            above = above.parent
        if self._pinned + new > self._pin_budget:
            raise PinBudgetExceeded(needed_blocks=new, pinned_blocks=self._pinned, budget_blocks=self._pin_budget)
        if child is not None:
            node = self._split(child, head)
        self._hold(node)
        self._count_pin(node, 1)
        self._last_pin += 1
        deadline = None if ttl is None else self._clock() + ttl
        info = PinInfo(self._last_pin, node.end * self.block_size, node.end, namespace, deadline)
        self._pins[info.pin_id] = (info, node)
        return info

    def unpin(self, pin_id: int) -> None:
        """Remove a pin; what it alone held may be evicted again, as if used now. O(runs of the prefix).

        Raises:
            UnknownPin: it was removed, has expired or never existed.

        """
        if pin_id not in self._pins:
            raise UnknownPin(pin_id)
        _, node = self._pins.pop(pin_id)
        self._tick += 1
        self._count_pin(node, -1)
        self._drop(node)

    def pins(self) -> tuple[PinInfo, ...]:
        """Return the live pins, oldest first. O(pins)."""
        return tuple(info for info, _ in self._pins.values())

    def expire(self) -> ExpireResult:
        """End the pins and retention ranges whose time is over by the injected clock. O(pins + ranges with a TTL).

        Nothing expires by itself: whoever uses TTLs calls this now and then.
        """
        now = self._clock()
        due = [i for i, (info, _) in self._pins.items() if info.deadline is not None and info.deadline <= now]
        for pin_id in due:
            self.unpin(pin_id)
        return ExpireResult(tuple(due), self._expire_ranges(now))

    def _shrink_pins(self, top: Node) -> None:
        """Take `top` and all below it out of every pin; a pin of which nothing is left is dropped."""
        for pin_id, (info, node) in list(self._pins.items()):
            if not node.goes_through(top):
                continue
            above = top.parent
            if above.parent is above:
                del self._pins[pin_id]
            else:
                self._hold(above)
                self._count_pin(above, 1)
                shorter = replace(info, num_tokens=above.end * self.block_size, num_blocks=above.end)
                self._pins[pin_id] = (shorter, above)
            self._count_pin(node, -1)
            self._drop(node)

    def _pin_nodes(self) -> Iterator[Node]:
        return (node for _, node in self._pins.values())

    def _count_pin(self, node: Node, change: int) -> None:
        """Add or remove a pin that ends at `node`. O(runs above that are pinned no other way)."""
        while node.parent is not node:
            before = node.pins
            node.pins = before + change
            if change > 0 and before == 0:
                self._pinned += node.num_blocks
            elif change < 0 and before == 1:
                self._pinned -= node.num_blocks
            else:
                return
            node = node.parent
