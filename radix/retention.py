"""Retention: a priority for a range of tokens, for good or for a time, also after the request is over.

Lower priorities go first (0 to 100, 35 unless set). Each priority is a group of candidates of its own, so the policy
does not notice. A request may ask for a range before it is committed; it takes effect block by block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from math import inf

from radixpool.radix.admission import Admission, check_count
from radixpool.radix.errors import UnknownSequence
from radixpool.radix.eviction.base import DEFAULT_PRIORITY
from radixpool.radix.media import Marks, MediaSpan, mark_blocks
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.node import Node
from radixpool.radix.options import CacheOptions
from radixpool.radix.sequence import Sequence
from radixpool.radix.timing import check_ttl
from radixpool.radix.tokens import TokensLike, pack_tokens

__all__ = ["Retention"]

MAX_PRIORITY = 100
_NO_END = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """Blocks `[first, last)` of a prefix, with their priority until `deadline`."""

    namespace: Namespace
    key: bytes
    marks: Marks
    first: int
    last: int
    priority: int
    deadline: float | None


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """A range that a sequence asked for, in blocks of its table."""

    first: int
    last: int
    priority: int
    deadline: float | None


class Retention(Admission):
    """Operations on priorities."""

    def __init__(self, options: CacheOptions) -> None:
        super().__init__(options)
        # Those with a deadline, by what asked for them: a range that is asked for again is one, and so is what a
        # sequence has committed of a range.
        self._ranges: dict[Hashable, _Range] = {}
        self._wanted: dict[int, list[_Wanted]] = {}  # what sequences asked for, by handle

    def set_retention(
        self,
        tokens: TokensLike | Sequence,
        priority: int,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        media: Iterable[MediaSpan] = (),
        start: int = 0,
        stop: int | None = None,
        ttl: float | None = None,
    ) -> int:
        """Set the priority of tokens `[start, stop)` of a prefix; return how many cached blocks have it now.

        Only whole blocks within the range count. Of a prefix what is cached is set; of a sequence, which has its own
        namespace and media, also what it commits later. After `ttl` seconds (by `expire`) the priority is the default
        again. What is set last counts, its end too: setting a range again prolongs it. O(length of the match).

        Raises:
            UnknownSequence: the sequence was released.
            ValueError, TypeError: bad tokens, media, range, priority or TTL.

        """
        if not isinstance(priority, int) or not 0 <= priority <= MAX_PRIORITY:
            raise ValueError(f"priority must be an integer from 0 to {MAX_PRIORITY}, not {priority!r}")
        check_count("start", start)
        check_ttl(ttl)
        deadline = None if ttl is None else self._clock() + ttl
        first = -(-start // self.block_size)
        last = _NO_END if stop is None else stop // self.block_size
        if isinstance(tokens, Sequence):
            if tokens.released:
                raise UnknownSequence(tokens.handle)
            wanted = _Wanted(first, last, priority, deadline)
            asked = self._wanted.setdefault(tokens.handle, [])
            for former in [one for one in asked if (one.first, one.last) == (first, last)]:
                asked.remove(former)
                self._ranges.pop(former, None)
            asked.append(wanted)
            return self._apply(tokens, wanted, 0)
        key = pack_tokens(tokens)
        marks = mark_blocks(media, len(key) >> 2, self.block_size)
        last = min(last, len(key) // self._stride)
        key = key[: last * self._stride]
        marks = {block: mark for block, mark in marks.items() if block < last}
        of_prefix = _Range(namespace, key, marks, first, last, priority, deadline)
        self._remember((namespace, key, tuple(marks.items()), first), of_prefix)
        return self._set_range(of_prefix)

    def _apply_wanted(self, seq: Sequence, committed_before: int) -> None:
        """Give the blocks `seq` has just committed the priorities it asked for."""
        for wanted in self._wanted.get(seq.handle, ()):
            self._apply(seq, wanted, committed_before)

    def _apply(self, seq: Sequence, wanted: _Wanted, committed_before: int) -> int:
        first = max(wanted.first, committed_before)
        last = min(wanted.last, seq._node.end)
        if first >= last or seq._node.policy is None:
            return 0
        key = bytes(seq._tokens[: last * self._stride])
        reached = _Range(seq._namespace, key, seq._marks, first, last, wanted.priority, wanted.deadline)
        self._remember(wanted, replace(reached, first=wanted.first))
        return self._set_range(reached)

    def _remember(self, asker: Hashable, wanted: _Range) -> None:
        """Remember when a range ends, and no more what `asker` had asked for before."""
        if wanted.deadline is None:
            self._ranges.pop(asker, None)
        else:
            self._ranges[asker] = wanted

    def _set_range(self, wanted: _Range) -> int:
        """Set the priority of what is cached of a range, splitting runs at its ends. Return how many blocks that is."""
        changed = 0
        for node in self._runs_of(wanted):
            self._set_priority(node, wanted.priority)
            node.retained_until = inf if wanted.deadline is None else wanted.deadline
            changed += node.num_blocks
        return changed

    def _runs_of(self, wanted: _Range) -> list[Node]:
        """Return the cached runs that make up a range, after splitting at its ends. O(length of the match)."""
        root = self._root(wanted.namespace)
        node, _, child, head = self._walk_marked(root, wanted.key, wanted.last, wanted.marks, [])
        if child is not None:
            node = self._split(child, head)
        runs = []
        while node.end > wanted.first:
            if node.start < wanted.first:
                self._split(node, wanted.first - node.start)
            runs.append(node)
            node = node.parent
        return runs

    def _set_priority(self, node: Node, priority: int) -> None:
        if node.priority != priority:
            node.priority = priority
            self._regroup(node, self._groups.policy(node.account, priority))

    def _expire_ranges(self, now: float) -> int:
        """Set ranges whose time is over back to the default. Return how many ended."""
        due = [(asker, r) for asker, r in self._ranges.items() if r.deadline is not None and r.deadline <= now]
        for asker, wanted in due:
            del self._ranges[asker]
            for node in self._runs_of(wanted):
                if node.retained_until <= now:
                    self._set_priority(node, DEFAULT_PRIORITY)
                    node.retained_until = inf
        return len(due)
