"""Less common operations on sequences: rewind, fork, invalidate."""

from __future__ import annotations

from radixpool.radix.admission import check_count
from radixpool.radix.errors import UnknownSequence
from radixpool.radix.media import mark_blocks
from radixpool.radix.node import Node
from radixpool.radix.pins import Pins
from radixpool.radix.quarantine import Fence
from radixpool.radix.results import CopyOrder, ForkResult, InvalidateResult, RewindResult
from radixpool.radix.sequence import Sequence

__all__ = ["Variants"]


class Variants(Pins):
    """Operations for speculative decoding, parallel sampling and data that turned out bad."""

    def rewind(self, seq: Sequence, to: int, *, after_step: Fence = None) -> RewindResult:
        """Forget all tokens from `to` on, and the room reserved for them: rejected drafts were never there.

        Blocks beyond the last kept token become free, or wait for `after_step` if a step may still write to them.
        O(blocks given back).

        Raises:
            UnknownSequence: it was released.
            ValueError: `to` is more than its tokens, or within the full blocks it has committed: those may be shared.
            UnknownWorker: a bad fence.

        """
        if seq.released:
            raise UnknownSequence(seq.handle)
        lowest, highest = seq._node.end * self.block_size, seq.num_tokens
        if not isinstance(to, int) or not lowest <= to <= highest:
            raise ValueError(
                f"to must be an integer from {lowest}, the end of its committed blocks, to {highest}, not {to!r}"
            )
        steps = self._quarantine.resolve(after_step)
        keep = -(-to // self.block_size) * 4
        dropped = seq._table[keep:]
        seq._table = seq._table[:keep]
        seq._tokens = seq._tokens[: to * 4]
        seq.committed_tokens = min(seq.committed_tokens, to)
        if seq._media:
            kept = (span for span in seq._media if span.start < to)
            seq._media = tuple(span._replace(length=min(span.length, to - span.start)) for span in kept)
            seq._marks = mark_blocks(seq._media, to, self.block_size)
        quarantined = self._retire(dropped, seq._node, steps)
        if self._producers is not None:
            self._track(seq)
        return RewindResult(to, (len(dropped) >> 2) - quarantined, quarantined)

    def fork(self, seq: Sequence, n: int = 1) -> ForkResult:
        """Make `n` sequences that go on from where `seq` is: committed full blocks shared, the rest their own.

        A partly filled tail block is copied by a copy order, as far as it is committed; uncommitted tokens are known to
        the forks but have to be computed by each. Reserved room is not inherited. O(n) times the blocks not shared.

        Raises:
            PoolExhausted, QuotaExceeded: no room for all; nothing was changed.
            UnknownSequence: it was released.
            ValueError: `n` is below 1, or the sequence holds an invalidated block.

        """
        if seq.released:
            raise UnknownSequence(seq.handle)
        check_count("n", n)
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        if seq.invalid_from is not None:
            raise ValueError(f"sequence {seq.handle} holds an invalidated block at {seq.invalid_from}: recompute it")
        node = seq._node
        own = -(-seq.num_tokens // self.block_size) - node.end
        if own:
            self._admit_or_refuse(n * own, node, node)
        written = seq.committed_tokens - node.end * self.block_size
        handles, copies = [], []
        for _ in range(n):
            fork = self._fork_one(seq, own)
            handles.append(fork.handle)
            if written:
                src, dst = (int(s.block_table[node.end]) for s in (seq, fork))
                copies.append(CopyOrder(src, dst, written))
                fork.copies = (copies[-1],)
        return ForkResult(tuple(handles), tuple(copies))

    def _fork_one(self, seq: Sequence, own: int) -> Sequence:
        node = seq._node
        node.ref += 1  # held by `seq` already
        fork = Sequence()
        self._last_handle += 1
        fork.handle = self._last_handle
        fork.released = False
        fork.cached_tokens = fork.committed_tokens = seq.committed_tokens
        fork.copies = ()
        fork.in_flight = fork.invalid_from = fork._source = fork._producing = None
        fork._tokens = bytes(seq._tokens)
        fork._table = seq._table[: node.end * 4] + (self._claim(own, node) if own else b"")
        fork._node = node
        fork._block_size = self.block_size
        fork._namespace = seq._namespace
        fork._media, fork._marks = seq._media, seq._marks
        self._sequences[fork.handle] = fork
        if self._producers is not None:
            self._track(fork)
        return fork

    def invalidate(self, seq: Sequence, block_index: int) -> InvalidateResult:
        """Declare that the data of a block in the sequence's table is bad.

        A committed block leaves the tree with everything below it; what nobody holds of it is free at once, the rest
        when its holders go. Holders see `invalid_from`, and pins end before the block. Of a private block what is
        committed of it is taken back.
        O(runs below the block + the depth of every live sequence).

        Raises:
            UnknownSequence: it was released.
            ValueError: the table has no such block.

        """
        if seq.released:
            raise UnknownSequence(seq.handle)
        if not isinstance(block_index, int) or not 0 <= block_index < seq.num_blocks:
            raise ValueError(f"block_index must be an integer from 0 to {seq.num_blocks - 1}, not {block_index!r}")
        if block_index >= seq._node.end:
            seq.committed_tokens = min(seq.committed_tokens, block_index * self.block_size)
            return InvalidateResult(0, 0, ())
        node = seq._node
        while node.start > block_index:
            node = node.parent
        if node.start < block_index:
            self._split(node, block_index - node.start)
        before = len(self._free)
        self._shrink_pins(node)
        doomed = self._subtree(node)
        if self._told:
            for run in reversed(doomed):
                if run.policy is not None:
                    self._tell_removed(run, run.blocks)
        removed = self._kill(doomed)
        holders = []
        for other in self._sequences.values():
            if other._node.goes_through(node):
                first = block_index
            elif other._source is not None and other._source.goes_through(node):
                first = other._node.end  # it began its tail as a copy of bad data
            else:
                continue
            other.invalid_from = first if other.invalid_from is None else min(other.invalid_from, first)
            holders.append(other.handle)
        return InvalidateResult(removed, len(self._free) - before, tuple(holders))

    def _subtree(self, top: Node) -> list[Node]:
        """Return `top` and all nodes below it, parents first. O(nodes)."""
        nodes = [top]
        for node in nodes:
            nodes.extend((node.children or {}).values())
        return nodes

    def _kill(self, subtree: list[Node]) -> int:
        """Make a subtree unfindable: free what nobody holds, leave the rest to die with its holders.

        Return how many blocks left the tree. O(nodes).
        """
        top = subtree[0]
        siblings = top.parent.children
        first = top.key[: self._stride] + top.media
        if siblings is not None and siblings.get(first) is top:
            del siblings[first]
            top.parent.children = siblings or None
        return sum(self._kill_one(node) for node in reversed(subtree))

    def _kill_one(self, node: Node) -> int:
        """Take one node, everything below which is dead or gone, out of the findable."""
        policy = node.policy
        node.policy = None
        if policy is None or node.parent is node:
            return 0
        count = node.num_blocks
        if not (node.ref or node.fence or node.children):
            policy.remove(node)
        policy.dropped(node)
        self._tree_blocks -= count
        self._odd += 1
        if not (node.ref or node.fence):
            self._count_cached(node, -count)
            self._give(node.blocks, node)
            self._odd -= 1
            self._detach(node)
        elif self._persistence is not None:
            self._persistence.removed(node.blocks)
        return count
