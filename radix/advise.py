"""Answer what another size or another policy would hit, from a sampled shadow of the running cache's requests.

A block is sampled if the hash of its whole path is below a threshold, so that it is sampled always or never, and the
sampled blocks of a path are a path again: a miniature cache of `rate` times the capacity, fed with those alone, misses
`rate` times as often as the whole one would. Waldspurger, Park, Garthwaite, Ahmad, "Efficient MRC construction with
SHARDS", FAST 2015, and the miniature simulations of Waldspurger, Saemundsson, Ahmad, Park, USENIX ATC 2017. The blocks
that everyone shares are sampled or not as a whole, so misses are counted and set against the references expected
(their SHARDS-adj). Owns the miniatures; never touches the real cache.

What it costs is bounded: when it takes more than its share of the time, it looks at fewer groups of requests, as many
as it has time for, and in the end skips requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixpool.radix.cache import RadixCache
from radixpool.radix.errors import PoolExhausted
from radixpool.radix.groupsample import GroupSample

__all__ = ["Advice", "Advisor", "AdvisorState"]

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
OTHER_POLICIES = ("lru", "arc", "lfu-da", "s3fifo")
SMALLEST_GROUP_RATE = 1 / 16

_STEP = np.uint64(0xD1342543DE82EF95)  # odd multipliers with well-spread bits
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ENOUGH_REFERENCES = 500
_BURST_S = 0.02  # CPU seconds that may be saved up for a burst of requests


@dataclass(frozen=True, slots=True)
class Advice:
    """What a cache of another size or policy would have hit of the same requests.

    Attributes:
        policy: name and parameters.
        multiple: its capacity as a multiple of the running cache's.
        capacity_blocks: the same in blocks.
        hit_ratio: estimated share of the looked-up blocks that it would have hit; None before enough was sampled.

    """

    policy: str
    multiple: float
    capacity_blocks: int
    hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class AdvisorState:
    """How the estimates came about.

    Attributes:
        observed_requests: requests seen since the start or the last reset.
        observed_blocks: their full blocks.
        sampled_blocks: block references that went into the miniatures.
        skipped_requests: requests left out because the shadow had used up its share of the time.
        block_rate: share of a looked-at request's blocks that is sampled.
        group_rate: share of the groups of requests that is looked at.
        cpu_seconds: CPU time of looking at requests, since the start or the last reset.

    """

    observed_requests: int
    observed_blocks: int
    sampled_blocks: int
    skipped_requests: int
    block_rate: float
    group_rate: float
    cpu_seconds: float


class Advisor:
    """Miniature caches at several sizes and under several policies, fed by `observe`. One thread at a time.

    Args:
        num_blocks: capacity of the running cache.
        block_size: tokens a block.
        policy: its policy; the sizes are tried under it.
        multiples: sizes to try, as multiples of `num_blocks`.
        policies: other policies to try at the present size.
        sample_blocks: capacity of the miniature of the present size; a smaller cache is shadowed whole.
        cpu_share: the most of the elapsed time that `observe` may take, in 0..1.
        clock: monotonic seconds.
        cpu_clock: CPU seconds of the calling thread.

    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
        policy: str = "lru",
        multiples: tuple[float, ...] = MULTIPLES,
        policies: tuple[str, ...] = OTHER_POLICIES,
        sample_blocks: int = 1_024,
        cpu_share: float = 0.01,
    ) -> None:
        if not 0.0 < cpu_share <= 1.0:
            raise ValueError(f"cpu_share must be above 0 and at most 1, not {cpu_share}")
        if sample_blocks < 1 or min(multiples, default=1.0) <= 0.0:
            raise ValueError(f"sample_blocks and multiples must be positive, not {sample_blocks} and {multiples}")
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._cpu_share = cpu_share
        self._sample_blocks = sample_blocks
        self._cases = [(policy, multiple) for multiple in multiples]
        self._cases += [(other, 1.0) for other in policies if other != policy]
        self._weights = np.random.default_rng(0x5AD0).integers(1 << 63, size=block_size, dtype=np.uint64)
        self._powers: npt.NDArray[np.uint64] = np.ones(1, dtype=np.uint64)
        self._smallest_group_rate = min(1.0, max(SMALLEST_GROUP_RATE, 2.0 * sample_blocks / num_blocks))
        self.reset()

    def reset(self) -> None:
        """Forget everything and look at all groups again. O(1)."""
        self._groups = GroupSample(self._block_size * 4)
        self._cpu_seconds = 0.0
        self._budget_s = _BURST_S
        self._refilled_at = self._clock()
        self._observed = self._skipped = 0
        self._observed_blocks = 0
        self._start_miniatures(1.0)

    def _start_miniatures(self, group_rate: float) -> None:
        """Start empty miniatures for a share of the groups, sampling more blocks of each to keep their size."""
        self._groups.rate = group_rate
        self._started_at = self._clock()
        self._block_rate = min(1.0, self._sample_blocks / (self._num_blocks * group_rate))
        self._threshold = np.uint64(min(int(self._block_rate * 2.0**64), 2**64 - 1))
        rate = self._block_rate * group_rate
        self._miniatures = [
            _Miniature(max(1, round(self._num_blocks * multiple * rate)), policy) for policy, multiple in self._cases
        ]
        self._looked_at_blocks = 0

    def observe(self, tokens: bytes, *, namespace: int = 0) -> None:
        """Look at one admitted request: packed little-endian uint32 tokens, and a hash of its namespace.

        O(1) for a request that is not looked at, else O(tokens) vectorised plus its sampled blocks a miniature.
        """
        num_blocks = len(tokens) // (self._block_size * 4)
        self._observed += 1
        self._observed_blocks += num_blocks
        if not num_blocks or (self._budget_s <= 0.0 and not self._find_time()):
            return
        shared = self._groups.look_at(tokens, namespace)
        if shared is None:
            return
        started = self._cpu_clock()  # a system call: only what is looked at is worth one
        self._looked_at_blocks += num_blocks
        path = self._sampled(tokens, num_blocks, namespace, shared)
        if path:
            for miniature in self._miniatures:
                miniature.serve(path)
        spent = self._cpu_clock() - started
        self._cpu_seconds += spent
        self._budget_s -= spent

    def _find_time(self) -> bool:
        """Tell whether a request may be looked at now that the budget was used up, or look at fewer groups."""
        now = self._clock()
        self._budget_s = min(_BURST_S, self._budget_s + self._cpu_share * (now - self._refilled_at))
        self._refilled_at = now
        if self._budget_s > 0.0:
            return True
        if self._groups.rate > self._smallest_group_rate:
            earned = self._cpu_share * (now - self._started_at)
            kept = min(0.5, earned / (earned + _BURST_S))  # of all that was looked at, what could be paid for
            self._start_miniatures(max(self._groups.rate * kept, self._smallest_group_rate))
            self._budget_s = _BURST_S
            return True
        self._skipped += 1
        return False

    def _sampled(self, tokens: bytes, num_blocks: int, namespace: int, shared: int) -> bytes:
        """Return the symbols of the sampled blocks of a path, from block `shared` on, packed as uint32."""
        paths = self._path_hashes(tokens, num_blocks)
        paths += np.uint64(namespace & 0xFFFFFFFFFFFFFFFF)
        chosen = _scrambled(_scrambled(paths, _STEP), _MIX)[shared:]
        chosen = chosen[chosen <= self._threshold]
        return (chosen & np.uint64(0xFFFFFFFF)).astype("<u4").tobytes()

    def _path_hashes(self, tokens: bytes, num_blocks: int) -> npt.NDArray[np.uint64]:
        """Return a hash of each block and everything before it: a polynomial over the blocks' own hashes. Wraps."""
        if len(self._powers) < num_blocks:
            steps = np.full(2 * num_blocks - 1, _STEP, dtype=np.uint64)
            self._powers = np.cumprod(np.concatenate((np.ones(1, dtype=np.uint64), steps)), dtype=np.uint64)
        ids = np.frombuffer(tokens, dtype="<u4", count=num_blocks * self._block_size)
        own = ids.reshape(num_blocks, self._block_size).astype(np.uint64) @ self._weights
        return np.cumsum(_scrambled(own, _STEP) * self._powers[:num_blocks], dtype=np.uint64)

    def advice(self) -> list[Advice]:
        """Return the estimates: the sizes under the running policy, then the other policies. O(miniatures)."""
        expected = self._looked_at_blocks * self._block_rate
        known = expected >= _ENOUGH_REFERENCES
        return [
            Advice(
                policy=policy,
                multiple=multiple,
                capacity_blocks=round(self._num_blocks * multiple),
                hit_ratio=min(1.0, max(0.0, 1.0 - miniature.misses / expected)) if known else None,
            )
            for (policy, multiple), miniature in zip(self._cases, self._miniatures, strict=True)
        ]

    def state(self) -> AdvisorState:
        """Return how much was seen, sampled and spent. O(1)."""
        return AdvisorState(
            observed_requests=self._observed,
            observed_blocks=self._observed_blocks,
            sampled_blocks=self._miniatures[0].references,
            skipped_requests=self._skipped,
            block_rate=self._block_rate,
            group_rate=self._groups.rate,
            cpu_seconds=self._cpu_seconds,
        )


class _Miniature:
    """A small real cache with one symbol a block."""

    __slots__ = ("cache", "misses", "references")

    def __init__(self, num_blocks: int, policy: str) -> None:
        self.cache = RadixCache(num_blocks, 1, policy=policy)
        self.references = 0
        self.misses = 0

    def serve(self, path: bytes) -> None:
        num_blocks = len(path) >> 2
        self.references += num_blocks
        try:
            seq = self.cache.acquire(path, max_hit=num_blocks)
        except PoolExhausted:
            self.misses += num_blocks
            return
        self.misses += num_blocks - seq.cached_tokens
        self.cache.commit(seq, num_blocks)
        self.cache.release(seq)


def _scrambled(values: npt.NDArray[np.uint64], multiplier: np.uint64) -> npt.NDArray[np.uint64]:
    """Spread every bit of each value over the high half and back; wraps."""
    mixed: npt.NDArray[np.uint64] = (values + _MIX) * multiplier
    mixed ^= np.right_shift(mixed, np.uint64(31), dtype=np.uint64)
    return mixed
