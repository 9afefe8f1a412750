"""API skeleton (bodies follow)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.results import (
    BlockInfo, CommitResult, EvictResult, FlushResult, ForkResult, InvalidateResult, NodeInfo, PendingPrefix, PinInfo,
    PrefixMatch, ReleaseResult, RewindResult,
)
from radixpool.radix.sequence import Sequence
from radixpool.radix.stats import CacheStats
from radixpool.radix.tokens import TokensLike

Fence = int | Mapping[str, int] | None   # a step of every worker, a step per worker, or none


class RadixCache:
    def __init__(self, num_blocks: int, block_size: int = 16, *, policy: str = "lru",
                 clock: Callable[[], float] = time.monotonic, pin_budget: int | None = None) -> None: ...
    # --- requests (phase 1)
    def match(self, tokens: TokensLike, *, namespace: Namespace = DEFAULT_NAMESPACE, media=()) -> PrefixMatch: ...
    def acquire(self, tokens: TokensLike, *, namespace: Namespace = DEFAULT_NAMESPACE, reserve: int = 0,
                max_hit: int | None = None) -> Sequence:
        """PoolExhausted | ValueError | TypeError; refusal changes nothing."""
    def acquire_or_wait(self, tokens, *, namespace=..., reserve=0, max_hit=None) -> Sequence | PendingPrefix:
        """Phase 2: as acquire; PendingPrefix when another sequence computes the same prefix (in_flight="wait")."""
    def extend(self, seq: Sequence, tokens: TokensLike) -> None: ...
    def reserve(self, seq: Sequence, num_tokens: int) -> None: ...
    def commit(self, seq: Sequence, upto: int, *, after_step: Fence = None) -> CommitResult: ...
    def rewind(self, seq: Sequence, to: int, *, after_step: Fence = None) -> RewindResult: ...          # phase 2
    def fork(self, seq: Sequence, n: int = 1) -> ForkResult: ...                                        # phase 2
    def release(self, seq: Sequence, *, after_step: Fence = None) -> ReleaseResult:
        """Second release is harmless: ReleaseResult(0, 0)."""
    def sequence(self, handle: int) -> Sequence:
        """UnknownSequence when it was released or never existed."""
    def sequences(self) -> Iterator[Sequence]: ...
    # --- workers / fences
    def add_worker(self, worker: str, *, completed_step: int = -1) -> None: ...
    def complete_step(self, worker: str, step: int) -> int:
        """Blocks that left quarantine."""
    def remove_worker(self, worker: str) -> int:
        """The worker is known dead: it fences nothing any more. Blocks that left quarantine."""
    # --- operators
    def evict(self, num_blocks: int, *, dry_run: bool = False) -> EvictResult: ...
    def invalidate(self, seq: Sequence, block_index: int) -> InvalidateResult: ...                      # phase 2
    def pin(self, tokens, *, namespace=..., ttl: float | None = None) -> PinInfo: ...                   # phase 2
    def unpin(self, pin_id: int) -> None: ...                                                           # phase 2
    def expire(self) -> tuple[int, ...]: ...                                                            # phase 2
    def set_retention(self, tokens, *, namespace=..., start: int = 0, priority: int, ttl: float | None = None) -> int: ...
    def set_quota(self, tenant: str, *, guaranteed_blocks: int = 0, max_blocks: int | None = None) -> None: ...
    def flush(self, namespace: Namespace | None = None, *,
              mode: Literal["idle_only", "drain", "new_generation"] = "idle_only") -> FlushResult: ...
    def stats(self) -> CacheStats: ...
    def check(self) -> None:
        """InvariantViolation with the state."""
    def nodes(self, namespace: Namespace | None = None) -> Iterator[NodeInfo]:
        """Every run, parents before children. NodeInfo in radix/results.py."""
    def namespaces(self) -> tuple[Namespace, ...]: ...
    def block_info(self, block_id: int) -> BlockInfo: ...
