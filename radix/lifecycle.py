"""The life of a request: match, acquire, extend, reserve, commit, release. The hot path.

A sequence's table is `[blocks of its tree path][private blocks]`; the tree part ends where its deepest run ends.
Refusal changes nothing: room is proven before anything is split, held or evicted.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import numpy as np

from radixpool.radix.core import MERGE_LIMIT_BLOCKS
from radixpool.radix.errors import PoolExhausted, QuotaExceeded, UnknownSequence
from radixpool.radix.eviction.base import DEFAULT_PRIORITY
from radixpool.radix.fences import FencedCore
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.node import Node
from radixpool.radix.quarantine import Fence
from radixpool.radix.results import CommitResult, PrefixMatch, ReleaseResult, Remap
from radixpool.radix.sequence import Sequence
from radixpool.radix.tokens import TokensLike, pack_tokens

__all__ = ["Lifecycle"]

_NOTHING_RELEASED = ReleaseResult(0, 0)


class Lifecycle(FencedCore):
    """Operations on requests and their sequences."""

    def __init__(self, num_blocks: int, block_size: int, policy: str) -> None:
        super().__init__(num_blocks, block_size, policy)
        self._sequences: dict[int, Sequence] = {}
        self._last_handle = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._admitted = 0
        self._refused = 0
        self._committed_blocks = 0
        self._remapped_blocks = 0

    def match(self, tokens: TokensLike, *, namespace: Namespace = DEFAULT_NAMESPACE) -> PrefixMatch:
        """Find the longest cached prefix of `tokens`. Changes nothing, not even what is evicted next.

        O(length of the match). The result is a hint: only `acquire` keeps blocks from being evicted.

        Raises:
            ValueError, TypeError: bad tokens.

        """
        key = pack_tokens(tokens)
        root = self._roots.get(namespace)
        tables: list[bytes] = []
        if root is not None:
            walk = self._walk(root, key, 0, len(key) // self._stride * self._stride, tables)
            if walk.child is not None:
                tables.append(walk.child.blocks[: walk.head * 4])
        blocks = np.frombuffer(b"".join(tables), dtype=np.int32)
        return PrefixMatch(len(blocks) * self.block_size, blocks)

    def acquire(
        self,
        tokens: TokensLike,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        reserve: int = 0,
        max_hit: int | None = None,
    ) -> Sequence:
        """Admit a request in one step: match, hold the hit, allocate the rest. All of it or nothing.

        Args:
            tokens: the prompt, at least one token.
            namespace: the tree to look in.
            reserve: tokens beyond the prompt to allocate room for.
            max_hit: hit at most so many tokens (rounded down to blocks); `len(tokens) - 1` unless given, so that the
                last token is computed and yields logits.

        Returns:
            The sequence. `cached_tokens` of it need no computing; its block table covers `len(tokens) + reserve`.

        Raises:
            PoolExhausted: not enough blocks even if all evictable ones went; nothing was changed.
            QuotaExceeded: the tenant's maximum would be passed; nothing was changed.
            ValueError, TypeError: bad tokens or lengths.

        O(len(tokens)) by memcmp, plus O(runs on the path that nobody held).

        """
        key = tokens if type(tokens) is bytes else pack_tokens(tokens)
        num_tokens = len(key) >> 2
        if not key or len(key) & 3:
            key = self._check_prompt(key)
        block_size = self.block_size
        stride = self._stride
        limit = num_tokens - 1
        if reserve or max_hit is not None:
            _check_count("reserve", reserve)
            if max_hit is not None:
                _check_count("max_hit", max_hit)
                limit = min(max_hit, num_tokens)
        root = self._roots.get(namespace) or self._root(namespace)
        tables: list[bytes] = []
        node, pos, child, head = self._walk(root, key, 0, limit // block_size * stride, tables)
        hit = pos // stride + head
        needed = -(-(num_tokens + reserve) // block_size) - hit
        short = needed - len(self._free)
        if short > 0 or node.account is not None:
            try:
                self._make_room(needed, root, child or node, head)
            except (PoolExhausted, QuotaExceeded):
                self._refused += 1
                raise
        # nothing fails from here on
        if child is not None:
            node = self._split(child, head)
            tables.append(node.blocks)
        if node is root:
            self._roots[namespace] = root
            root.ref += 1
        else:
            self._hold(node)
            if self._policy.observes_hits:
                self._touch(node)
        if needed > 0:
            if short > 0:
                self._evict(short)
            tables.append(self._take(needed, root))
        seq = Sequence()
        handle = self._last_handle = self._last_handle + 1
        seq.handle = handle
        seq.released = False
        seq.cached_tokens = seq.committed_tokens = hit * block_size
        seq.copies = ()
        seq.in_flight = seq.invalid_from = seq._source = seq._producing = None
        seq._tokens = key
        seq._table = b"".join(tables)
        seq._node = node
        seq._block_size = block_size
        seq._namespace = namespace
        seq._media = ()
        self._sequences[handle] = seq
        self._queried_tokens += num_tokens
        self._hit_tokens += hit * block_size
        self._admitted += 1
        return seq

    def _check_prompt(self, key: bytes) -> bytes:
        if not key:
            raise ValueError("tokens is empty: a request has at least 1 token")
        return pack_tokens(key)

    def _touch(self, node: Node) -> None:
        """Report a hit to the policies, deepest run first."""
        while node.parent is not node:
            if node.policy is not None:
                node.policy.touched(node)
            node = node.parent

    def extend(self, seq: Sequence, tokens: TokensLike) -> None:
        """Append known tokens; allocates when they need more blocks than the table has. O(len(tokens)).

        Raises:
            PoolExhausted, QuotaExceeded: no room; nothing was changed.
            UnknownSequence: it was released.
            ValueError, TypeError: bad tokens.

        """
        if seq.released:
            raise UnknownSequence(seq.handle)
        key = pack_tokens(tokens)
        self._grow(seq, (len(seq._tokens) + len(key)) >> 2)
        if type(seq._tokens) is bytes:
            seq._tokens = bytearray(seq._tokens)  # appending to it is amortised O(1)
        seq._tokens += key

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens whose ids are not known yet (decode lookahead, drafts).

        A later `extend` uses the room up; asking again for what is there already changes nothing. O(blocks added).

        Raises:
            PoolExhausted, QuotaExceeded: no room; nothing was changed.
            UnknownSequence: it was released.

        """
        if seq.released:
            raise UnknownSequence(seq.handle)
        _check_count("num_tokens", num_tokens)
        self._grow(seq, (len(seq._tokens) >> 2) + num_tokens)

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        """Give the table room for `num_tokens` tokens in all."""
        needed = -(-num_tokens // self.block_size) - (len(seq._table) >> 2)
        if needed <= 0:
            return
        node = seq._node
        short = needed - len(self._free)
        if short > 0 or node.account is not None:
            try:
                self._make_room(needed, node, node)
            except (PoolExhausted, QuotaExceeded):
                self._refused += 1
                raise
            if short > 0:
                self._evict(short)
        seq._table += self._take(needed, node)

    def commit(self, seq: Sequence, upto: int, *, after_step: Fence = None) -> CommitResult:
        """Declare that the KV of the sequence's first `upto` tokens is written; its full blocks become findable.

        Blocks whose content is in the tree already are swapped for those (remaps), and the sequence's own copies are
        quarantined until `after_step`, by default until every worker has completed one more step. Committing less than
        before changes nothing. O(new tokens).

        Raises:
            UnknownSequence: it was released.
            ValueError: `upto` is negative or more than its known tokens.

        """
        if seq.released:
            raise UnknownSequence(seq.handle)
        tokens = seq._tokens
        if upto.__class__ is not int or not 0 <= upto <= len(tokens) >> 2:
            raise ValueError(f"upto must be an integer from 0 to {len(tokens) >> 2}, the known tokens, not {upto!r}")
        if upto <= seq.committed_tokens:
            return CommitResult(seq.committed_tokens, ())
        seq.committed_tokens = upto
        node = seq._node
        done = node.end
        full = upto // self.block_size
        if full == done:
            return CommitResult(upto, ())
        stride = self._stride
        if tokens.__class__ is bytes:
            key, pos, end = tokens, done * stride, full * stride
        else:
            key, pos, end = bytes(tokens[done * stride : full * stride]), 0, (full - done) * stride
        remaps: tuple[Remap, ...] = ()
        if node.children:
            remaps = self._adopt_twins(seq, key, pos, end, after_step)
            if remaps:
                pos += len(remaps) * stride
                done += len(remaps)
                node = seq._node
        if pos < end:
            blocks = seq._table[done * 4 : full * 4]
            seq._node = self._publish(node, key[pos:end], blocks)
            self._committed_blocks += full - done
        return CommitResult(upto, remaps)

    def _publish(self, node: Node, key: bytes, blocks: bytes) -> Node:
        """Put new blocks under `node`, in the same run where nothing can tell them apart."""
        policy = node.policy
        if (
            node.ref == 1
            and node.children is None
            and policy is not None
            and (policy.merges_runs or not node.last_use)
            and not (node.fence or node.media)
            and node.parent is not node
            and len(node.blocks) + len(blocks) <= MERGE_LIMIT_BLOCKS * 4
            and node.priority == DEFAULT_PRIORITY
        ):
            num_new = len(blocks) >> 2
            node.key += key
            node.blocks += blocks
            node.end += num_new
            self._tree_blocks += num_new
            policy.inserted(node, num_new)
            return node
        return self._attach(node, key, blocks)

    def _adopt_twins(self, seq: Sequence, key: bytes, pos: int, end: int, fence: Fence) -> tuple[Remap, ...]:
        """Swap the sequence's own copies of what is in the tree already for the tree's blocks."""
        node = seq._node
        tables: list[bytes] = []
        deepest, _, child, head = self._walk(node, key, pos, end, tables)
        if child is not None:
            deepest = self._split(child, head)
            tables.append(deepest.blocks)
        elif deepest is node:
            return ()
        theirs = b"".join(tables)
        first = node.end
        own = seq._table[first * 4 : first * 4 + len(theirs)]
        self._hold(deepest)
        node.ref -= 1  # the hold moves down: `deepest` holds `node` through its path
        seq._node = deepest
        seq._table = seq._table[: first * 4] + theirs + seq._table[first * 4 + len(theirs) :]
        self._retire(own, node, self._quarantine.next_step() if fence is None else self._quarantine.resolve(fence))
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
        if steps or self._odd:
            return self._release_odd(node, private, steps)
        if private:
            self._give(private, node)
        self._drop(node)
        if not private:
            return _NOTHING_RELEASED
        return ReleaseResult(len(private) >> 2, 0)

    def _release_odd(self, node: Node, private: bytes, steps: dict[str, int]) -> ReleaseResult:
        """Drop a hold where there are dead nodes or fences; keep its path fenced until `steps` are over."""
        quarantine = self._quarantine
        free, quarantined, fenced = len(self._free), quarantine.num_blocks, quarantine.node_blocks
        self._retire(private, node, steps)
        if steps and node.parent is not node:
            self._fence(node)
            self._drop(node)
            quarantine.wait(steps, quarantine.node_blocks - fenced, lambda: self._unfence(node), node)
        else:
            self._drop(node)
        return ReleaseResult(len(self._free) - free, quarantine.num_blocks - quarantined)

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


def _check_count(name: str, value: int) -> None:
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be int, not {type(value).__name__}") from None
    if index < 0:
        raise ValueError(f"{name} must be at least 0, not {value}")
