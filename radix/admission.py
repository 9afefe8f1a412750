"""Admission: match and acquire. Room is proven before anything is split, held or evicted, so a refusal changes nothing.

A sequence's table is `[blocks of its tree path][private blocks]`; the tree part ends where its deepest run ends.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NoReturn, overload

import numpy as np

from radixpool.radix.errors import PoolExhausted, QuotaExceeded
from radixpool.radix.inflight import InFlight
from radixpool.radix.media import Marks, MediaSpan, mark_blocks, segments
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.node import Node, Root
from radixpool.radix.options import CacheOptions
from radixpool.radix.results import CopyOrder, PendingPrefix, PrefixMatch
from radixpool.radix.sequence import Sequence
from radixpool.radix.tokens import TokensLike, pack_tokens
from radixpool.radix.tree import Walk

__all__ = ["Admission", "InFlightMode"]

InFlightMode = Literal["ignore", "report", "wait"]
PARTIAL_SCAN_LIMIT = 128  # children looked at for a copy-on-write hit; a busy branch can have any number

_NO_MARKS: Marks = {}


@dataclass(frozen=True, slots=True)
class _Request:
    """An acquire with options. `limit` is the most tokens it may hit."""

    key: bytes
    namespace: Namespace
    root: Root
    reserve: int
    limit: int
    media: tuple[MediaSpan, ...]
    partial: bool
    in_flight: InFlightMode


class Admission(InFlight):
    """Lookups, and the way into the cache."""

    def __init__(self, options: CacheOptions) -> None:
        super().__init__(options)
        self._sequences: dict[int, Sequence] = {}
        self._last_handle = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._admitted = 0
        self._refused = 0

    def match(
        self, tokens: TokensLike, *, namespace: Namespace = DEFAULT_NAMESPACE, media: Iterable[MediaSpan] = ()
    ) -> PrefixMatch:
        """Find the longest cached prefix of `tokens`. Changes nothing, not even what is evicted next.

        O(length of the match). The result is a hint: only `acquire` keeps blocks from being evicted.

        Raises:
            ValueError, TypeError: bad tokens or media.

        """
        key = pack_tokens(tokens)
        marks = mark_blocks(media, len(key) >> 2, self.block_size)
        root = self._roots.get(namespace)
        tables: list[bytes] = []
        if root is not None:
            _, _, child, head = self._walk_marked(root, key, len(key) // self._stride, marks, tables)
            if child is not None:
                tables.append(child.blocks[: head * 4])
        blocks = np.frombuffer(b"".join(tables), dtype=np.int32)
        return PrefixMatch(len(blocks) * self.block_size, blocks)

    @overload
    def acquire(
        self,
        tokens: TokensLike,
        *,
        namespace: Namespace = ...,
        reserve: int = ...,
        max_hit: int | None = ...,
        media: Iterable[MediaSpan] = ...,
        partial: bool = ...,
        in_flight: Literal["ignore", "report"] = ...,
    ) -> Sequence: ...

    @overload
    def acquire(
        self,
        tokens: TokensLike,
        *,
        namespace: Namespace = ...,
        reserve: int = ...,
        max_hit: int | None = ...,
        media: Iterable[MediaSpan] = ...,
        partial: bool = ...,
        in_flight: InFlightMode,
    ) -> Sequence | PendingPrefix: ...

    def acquire(
        self,
        tokens: TokensLike,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        reserve: int = 0,
        max_hit: int | None = None,
        media: Iterable[MediaSpan] = (),
        partial: bool = False,
        in_flight: InFlightMode = "ignore",
    ) -> Sequence | PendingPrefix:
        """Admit a request in one step: match, hold the hit, allocate the rest. All of it or nothing.

        Args:
            tokens: the prompt, at least one token.
            namespace: the tree to look in.
            reserve: tokens beyond the prompt to allocate room for.
            max_hit: hit at most so many tokens (rounded down to blocks); `len(tokens) - 1` unless given, so that the
                last token is computed and yields logits.
            media: content that placeholder tokens stand for; part of the key.
            partial: also use the beginning of a block that differs later, by a copy order (`Sequence.copies`).
            in_flight: what to do if another sequence is computing more of this prefix: `"ignore"` it, `"report"` it in
                `Sequence.in_flight`, or `"wait"`: return a `PendingPrefix` instead and hold nothing.

        Returns:
            The sequence. `cached_tokens` of it need no computing; its block table covers `len(tokens) + reserve`.

        Raises:
            PoolExhausted: not enough blocks even if all evictable ones went; nothing was changed.
            QuotaExceeded: the tenant's maximum would be passed; nothing was changed.
            ValueError, TypeError: bad tokens, lengths or media.

        O(len(tokens)) by memcmp, plus O(runs on the path that nobody held).

        """
        key = tokens if type(tokens) is bytes else pack_tokens(tokens)
        num_tokens = len(key) >> 2
        if not key or len(key) & 3:
            _refuse_prompt(key)
        block_size = self.block_size
        limit = num_tokens - 1
        if reserve or max_hit is not None:
            limit = _hit_limit(num_tokens, reserve=reserve, max_hit=max_hit)
        root = self._roots.get(namespace) or self._root(namespace)
        tables: list[bytes] = []
        if media or partial or in_flight != "ignore":
            request = _Request(key, namespace, root, reserve, limit, tuple(media), partial, in_flight)
            return self._acquire_with(request, tables)
        node, pos, child, head = self._walk(root, key, 0, limit // block_size * self._stride, tables)
        hit = pos // self._stride + head
        needed = -(-(num_tokens + reserve) // block_size) - hit
        # a hold on the hit keeps at most `hit` cached blocks: enough beyond those needs no exact count
        if needed > len(self._free) + self._cached - hit or self._groups.accounts:
            self._admit_or_refuse(needed, root, child or node, head)
        if child is not None:  # nothing fails from here on
            node = self._split(child, head)
            tables.append(node.blocks)
        return self._admit(key, namespace, root, node, tables, needed)

    def _admit_or_refuse(self, needed: int, payer: Node, target: Node, head: int = 0) -> None:
        """Prove room as `_make_room` does, and count a refusal."""
        try:
            self._make_room(needed, payer, target, head)
        except (PoolExhausted, QuotaExceeded):
            self._refused += 1
            raise

    def _admit(
        self, key: bytes, namespace: Namespace, root: Root, node: Node, tables: list[bytes], needed: int
    ) -> Sequence:
        """Hold the path to `node`, allocate `needed` blocks and make the sequence."""
        if node is root:
            self._roots[namespace] = root
            root.ref += 1
        else:
            self._hold(node)
            if self._policy.observes_hits:
                self._touch(node)
        if needed > 0:
            tables.append(self._claim(needed, root))
        cached = node.end * self.block_size
        seq = Sequence()
        handle = self._last_handle = self._last_handle + 1
        seq.handle = handle
        seq.released = False
        seq.cached_tokens = seq.committed_tokens = cached
        seq.copies = ()
        seq.in_flight = seq.invalid_from = seq._source = seq._producing = None
        seq._tokens = key
        seq._table = b"".join(tables)
        seq._node = node
        seq._block_size = self.block_size
        seq._namespace = namespace
        seq._media = ()
        seq._marks = _NO_MARKS
        self._sequences[handle] = seq
        self._queried_tokens += len(key) >> 2
        self._hit_tokens += cached
        self._admitted += 1
        if self._producers is not None:
            self._track(seq)
        return seq

    def _touch(self, node: Node) -> None:
        """Report a hit to the policies, deepest run first."""
        while node.parent is not node:
            assert node.policy is not None
            node.policy.touched(node)
            node = node.parent

    # -- media, copy-on-write hits, prefixes in flight

    def _walk_marked(self, root: Root, key: bytes, limit: int, marks: Marks, tables: list[bytes]) -> Walk:
        """Follow up to `limit` blocks of `key` from `root`, blocks under media included."""
        stride = self._stride
        if not marks:
            return self._walk(root, key, 0, limit * stride, tables)
        node: Node = root
        for first, last, mark in segments(marks, 0, limit):
            if mark:
                marked = (node.children or {}).get(key[first * stride : last * stride] + mark)
                if marked is None:
                    break
                tables.append(marked.blocks)
                node = marked
            else:
                node, pos, child, head = self._walk(node, key, first * stride, last * stride, tables)
                if pos < last * stride:
                    return node, pos, child, head
        return node, node.end * stride, None, 0

    def _acquire_with(self, request: _Request, tables: list[bytes]) -> Sequence | PendingPrefix:
        """Acquire with media, copy-on-write or a look at what is in flight."""
        if request.in_flight not in ("ignore", "report", "wait"):
            raise ValueError(f"in_flight must be 'ignore', 'report' or 'wait', not {request.in_flight!r}")
        key, root = request.key, request.root
        marks = mark_blocks(request.media, len(key) >> 2, self.block_size)
        walk = self._walk_marked(root, key, request.limit // self.block_size, marks, tables)
        node, pos, child, head = walk
        hit = pos // self._stride + head
        producer = self._look_in_flight(request, marks, node) if child is None else None
        if producer is not None and request.in_flight == "wait":
            seq, shared = producer
            return PendingPrefix(seq.handle, hit * self.block_size, shared * self.block_size)
        source, common = self._find_partial(walk, request, hit) if hit not in marks else (None, 0)
        needed = -(-((len(key) >> 2) + request.reserve) // self.block_size) - hit
        if source is not None and not self._has_room(needed, root, source, head + 1):
            source = None  # what may be gained by a copy is no reason to refuse
        if source is None:
            self._admit_or_refuse(needed, root, child or node, head)
        else:
            # the one block that is copied, held on its own until it was
            source = self._split(source, head + 1) if source.num_blocks > head + 1 else source
            child = source if head else None
            self._hold(source)
        if child is not None:
            node = self._split(child, head)
            tables.append(node.blocks)
        seq = self._admit(key, request.namespace, root, node, tables, needed)
        seq._media, seq._marks = request.media, marks
        seq.in_flight = None if producer is None else producer[0].handle
        if source is not None:
            self._copy_on_write(seq, source, common)
        if self._producers is not None:
            self._track(seq)  # again: now its marks are known
        return seq

    def _look_in_flight(self, request: _Request, marks: Marks, node: Node) -> tuple[Sequence, int] | None:
        if request.in_flight == "ignore":
            return None
        return self._find_producer(node, request.key, marks, request.limit // self.block_size)

    def _copy_on_write(self, seq: Sequence, source: Node, common: int) -> None:
        """Let the first private block begin as a copy of `source`'s last one, which is held until the first commit."""
        hit = seq._node.end
        src = int.from_bytes(source.blocks[-4:], "little")
        dst = int.from_bytes(seq._table[hit * 4 : hit * 4 + 4], "little")
        seq._source = source
        seq.copies = (CopyOrder(src, dst, common),)
        seq.cached_tokens += common
        seq.committed_tokens += common
        self._hit_tokens += common

    def _find_partial(self, walk: Walk, request: _Request, hit: int) -> tuple[Node | None, int]:
        """Find the run whose next block shares most tokens with the prompt's. O(children looked at)."""
        if not request.partial:
            return None, 0
        above, _, child, head = walk
        stride, start = self._stride, hit * self._stride
        wanted = request.key[start : min(start + stride, request.limit * 4)]
        if child is not None:
            candidates: list[Node] = [child]
        else:
            looked_at = islice((above.children or {}).values(), PARTIAL_SCAN_LIMIT)
            candidates = [node for node in looked_at if not node.media]
        best: tuple[Node | None, int] = (None, 0)
        for node in candidates:
            block = node.key[head * stride : (head + 1) * stride]
            common = _common_tokens(block, wanted)
            if common > best[1]:
                best = (node, common)
        return best


def _common_tokens(left: bytes, right: bytes) -> int:
    """Count the leading tokens two packed strings share. O(length)."""
    size = min(len(left), len(right)) >> 2
    differ = np.flatnonzero(np.frombuffer(left, np.uint32, size) != np.frombuffer(right, np.uint32, size))
    return int(differ[0]) if differ.size else size


def _refuse_prompt(key: bytes) -> NoReturn:
    pack_tokens(key)
    raise ValueError("tokens is empty: a request has at least 1 token")


def _hit_limit(num_tokens: int, *, reserve: int, max_hit: int | None) -> int:
    """Check both counts and return the most tokens that may be hit."""
    check_count("reserve", reserve)
    if max_hit is None:
        return num_tokens - 1
    check_count("max_hit", max_hit)
    return min(max_hit, num_tokens)


def check_count(name: str, value: int) -> None:
    """Raise unless `value` is an integer >= 0."""
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be int, not {type(value).__name__}") from None
    if index < 0:
        raise ValueError(f"{name} must be at least 0, not {value}")
