"""The life of an admitted sequence: extend, reserve, commit, release."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from radixpool.radix.admission import check_count
from radixpool.radix.errors import UnknownSequence
from radixpool.radix.eviction.base import DEFAULT_PRIORITY
from radixpool.radix.media import MediaSpan, mark_blocks, segments
from radixpool.radix.node import Node
from radixpool.radix.options import CacheOptions
from radixpool.radix.quarantine import Fence
from radixpool.radix.results import CommitResult, ReleaseResult, Remap
from radixpool.radix.retention import Retention
from radixpool.radix.sequence import Sequence
from radixpool.radix.tokens import TokensLike, pack_tokens

__all__ = ["Lifecycle"]

MERGE_LIMIT_BLOCKS = 256  # growing a run in place copies it, so longer runs get a child instead

_NOTHING_RELEASED = ReleaseResult(0, 0)


class Lifecycle(Retention):
    """Operations on admitted sequences."""

    def __init__(self, options: CacheOptions) -> None:
        super().__init__(options)
        self._committed_blocks = 0
        self._remapped_blocks = 0

    def extend(self, seq: Sequence, tokens: TokensLike, *, media: Iterable[MediaSpan] = ()) -> None:
        """Append known tokens; allocates when they need more blocks than the table has. O(len(tokens)).

        `media` are spans among the new tokens, counted from the beginning of the sequence.

        Raises:
            PoolExhausted, QuotaExceeded: no room; nothing was changed.
            UnknownSequence: it was released.
            ValueError, TypeError: bad tokens or media.

        """
        if seq.released:
            raise UnknownSequence(seq.handle)
        key = pack_tokens(tokens)
        known = len(seq._tokens) >> 2
        total = known + (len(key) >> 2)
        spans = tuple(media) if media else ()
        if spans:
            if spans[0][0] < known:
                raise ValueError(f"media[0] must begin among the new tokens, at {known} or later, not {spans[0][0]}")
            marks = mark_blocks(seq._media + spans, total, self.block_size)
        if total > (len(seq._table) >> 2) * self.block_size:
            self._grow(seq, total)
        if type(seq._tokens) is bytes:
            seq._tokens = bytearray(seq._tokens)  # appending to it is amortised O(1)
        seq._tokens += key
        if spans:
            seq._media += spans
            seq._marks = marks
        if self._producers is not None:
            self._track(seq)

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens whose ids are not known yet (decode lookahead, drafts).

        A later `extend` uses the room up; asking again for what is there already changes nothing. O(blocks added).

        Raises:
            PoolExhausted, QuotaExceeded: no room; nothing was changed.
            UnknownSequence: it was released.

        """
        if seq.released:
            raise UnknownSequence(seq.handle)
        check_count("num_tokens", num_tokens)
        self._grow(seq, (len(seq._tokens) >> 2) + num_tokens)

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        """Give the table room for `num_tokens` tokens in all."""
        needed = -(-num_tokens // self.block_size) - (len(seq._table) >> 2)
        if needed <= 0:
            return
        node = seq._node
        if needed > len(self._free) + self._cached or self._groups.accounts:
            self._admit_or_refuse(needed, node, node)
        seq._table += self._claim(needed, node)

    def commit(self, seq: Sequence, upto: int, *, after_step: Fence = None) -> CommitResult:
        """Declare that the KV of the sequence's first `upto` tokens is written; its full blocks become findable.

        Blocks whose content is in the tree already are swapped for those (remaps), and the sequence's own copies are
        quarantined until `after_step`, by default until every worker has completed one more step. Committing less than
        before changes nothing. O(new tokens).

        Raises:
            UnknownSequence: it was released.
            UnknownWorker, ValueError: a bad fence, or `upto` is negative or more than its known tokens.

        """
        if seq.released:
            raise UnknownSequence(seq.handle)
        tokens = seq._tokens
        if upto.__class__ is not int or not 0 <= upto <= len(tokens) >> 2:
            raise ValueError(f"upto must be an integer from 0 to {len(tokens) >> 2}, the known tokens, not {upto!r}")
        if upto <= seq.committed_tokens:
            return CommitResult(seq.committed_tokens, ())
        done = seq._node.end
        full = upto // self.block_size
        remaps: tuple[Remap, ...] = ()
        if full > done:
            steps = None if after_step is None else self._quarantine.resolve(after_step)
            if self._persistence is not None:
                for mark in {seq._marks.get(i, b"") for i in range(done, full)} if seq._marks else (b"",):
                    self._persistence.prepare(seq._namespace, mark)
            if seq._marks:
                for first, last, mark in segments(seq._marks, done, full):
                    remaps += self._commit_blocks(seq, first, last, steps, mark)
            else:
                remaps = self._commit_blocks(seq, done, full, steps, b"")
        seq.committed_tokens = upto
        if seq._source is not None:  # the copy was made before anything was computed
            self._tick += 1
            self._drop(seq._source)
            seq._source = None
        if self._wanted:
            self._apply_wanted(seq, done)
        if self._producers is not None:
            self._track(seq)
        return CommitResult(upto, remaps)

    def _commit_blocks(
        self, seq: Sequence, first: int, last: int, steps: dict[str, int] | None, mark: bytes
    ) -> tuple[Remap, ...]:
        """Publish blocks `[first, last)` of the table, which follow what the sequence holds in the tree."""
        stride = self._stride
        tokens = seq._tokens
        node = seq._node
        if tokens.__class__ is bytes:
            key, pos, end = tokens, first * stride, last * stride
        else:
            key, pos, end = bytes(tokens[first * stride : last * stride]), 0, (last - first) * stride
        remaps: tuple[Remap, ...] = ()
        if node.children and key[pos : pos + stride] + mark in node.children:
            remaps = self._adopt_twins(seq, key, pos, end, steps, mark)
            first += len(remaps)
            pos += len(remaps) * stride
            node = seq._node
        if pos < end:
            blocks = seq._table[first * 4 : last * 4]
            seq._node = self._publish(node, key[pos:end], blocks, mark)
            self._committed_blocks += last - first
        return remaps

    def _publish(self, node: Node, key: bytes, blocks: bytes, mark: bytes) -> Node:
        """Put new blocks under `node`, in the same run where nothing can tell them apart."""
        policy = node.policy
        if (
            node.ref != 1
            or node.children is not None
            or policy is None
            or not (policy.merges_runs or not node.last_use)
            or node.fence
            or mark
            or node.media
            or node.parent is node
            or len(node.blocks) + len(blocks) > MERGE_LIMIT_BLOCKS * 4
            or node.priority != DEFAULT_PRIORITY
        ):
            return self._attach(node, key, blocks, mark)
        if self._told:
            self._tell_stored(node, key, blocks, b"")
        num_new = len(blocks) >> 2
        node.key += key
        node.blocks += blocks
        node.end += num_new
        self._tree_blocks += num_new
        policy.inserted(node, num_new)
        return node

    def _adopt_twins(
        self, seq: Sequence, key: bytes, pos: int, end: int, steps: dict[str, int] | None, mark: bytes
    ) -> tuple[Remap, ...]:
        """Swap the sequence's own copies of what is in the tree already for the tree's blocks."""
        node = seq._node
        tables: list[bytes] = []
        if mark:
            deepest = node.children[key[pos:end] + mark]  # type: ignore[index]  # the caller has seen it
            tables.append(deepest.blocks)
        else:
            deepest, _, child, head = self._walk(node, key, pos, end, tables)
            if child is not None:
                deepest = self._split(child, head)
                tables.append(deepest.blocks)
        theirs = b"".join(tables)
        first = node.end
        own = seq._table[first * 4 : first * 4 + len(theirs)]
        self._hold(deepest)
        node.ref -= 1  # the hold moves down: `deepest` holds `node` through its path
        seq._node = deepest
        seq._table = seq._table[: first * 4] + theirs + seq._table[first * 4 + len(theirs) :]
        self._retire(own, node, self._quarantine.next_step() if steps is None else steps)
        self._remapped_blocks += len(theirs) >> 2
        old = np.frombuffer(own, dtype=np.int32).tolist()
        new = np.frombuffer(theirs, dtype=np.int32).tolist()
        return tuple(map(Remap, range(first, first + len(old)), old, new))

    def release(self, seq: Sequence, *, after_step: Fence = None) -> ReleaseResult:
        """End a sequence. What it committed stays cached, everything else is free again.

        With `after_step`, no block of it is handed out before that step is completed (committed blocks can still be
        hit). Releasing twice is harmless. O(runs on its path that nobody else holds + private blocks).

        Raises:
            UnknownWorker, ValueError: a bad fence; nothing was changed.

        """
        if seq.released:
            return _NOTHING_RELEASED
        node = seq._node
        private = seq._table[node.end * 4 :]
        steps: dict[str, int] = {}
        if after_step is not None:
            steps = self._quarantine.resolve(after_step)
        seq.released = True
        del self._sequences[seq.handle]
        self._tick += 1
        if self._wanted:
            self._wanted.pop(seq.handle, None)
        if self._producers is not None:
            self._track(seq)
        if steps or self._odd or seq._source is not None:
            return self._release_odd(seq, private, steps)
        if private:
            self._give(private, node)
        self._drop(node)
        if self._policy.evicts_on_release:
            self._make_free(self._cached)
        return ReleaseResult(len(private) >> 2, 0) if private else _NOTHING_RELEASED

    def _release_odd(self, seq: Sequence, private: bytes, steps: dict[str, int]) -> ReleaseResult:
        """Drop a hold where there are dead nodes or fences; keep its path fenced until `steps` are over."""
        free, quarantined = len(self._free), self._quarantine.num_blocks
        node = seq._node
        self._retire(private, node, steps)
        if seq._source is not None:
            self._drop_after(seq._source, steps)
            seq._source = None
            self._tick += 1  # no two candidates share a time
        self._drop_after(node, steps)
        result = ReleaseResult(len(self._free) - free, self._quarantine.num_blocks - quarantined)
        if self._policy.evicts_on_release:
            self._make_free(self._cached)
        return result

    def sequence(self, handle: int) -> Sequence:
        """Return the live sequence with this handle. O(1).

        Raises:
            UnknownSequence: it was released or never existed.

        """
        seq = self._sequences.get(handle)
        if seq is None:
            raise UnknownSequence(handle)
        return seq

    def sequences(self) -> Iterator[Sequence]:
        """Iterate over the live sequences in the order of their handles. Do not release any meanwhile."""
        return iter(self._sequences.values())
