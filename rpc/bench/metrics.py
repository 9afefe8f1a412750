"""Figures of one replay: what was hit in blocks, tokens, FLOPs and time, and how far from the optimum that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from radixpool.rpc.bench.cost import PrefillModel, hit_tokens
from radixpool.rpc.bench.trace import Trace

SMALLEST_GAP = 0.001
"""Difference of hit ratio between LRU and the optimum below which the share of it that a policy closes says nothing."""

Kind = Literal["policy", "reference", "optimum"]


@dataclass(frozen=True, slots=True)
class Run:
    """What one replay or reference simulation gives back.

    Attributes:
        hits: blocks hit by each request, int32 [requests].
        evicted_blocks: blocks evicted; None for references that do not count them.
        refused_requests: requests larger than the pool; they hit nothing and are in the denominators.
        delays_ms: how long each request waited for blocks, float64 [requests]; None at zero duration.
        seconds: CPU time of the replay, so that other processes on the machine do not count.

    """

    trace: str
    policy: str
    kind: Kind
    capacity_blocks: int
    hits: npt.NDArray[np.int32]
    seconds: float
    evicted_blocks: int | None = None
    refused_requests: int = 0
    delays_ms: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the results: a policy at a capacity on a trace. Ratios are 0..1, None where undefined."""

    trace: str
    policy: str
    kind: Kind
    capacity_blocks: int
    refs: int
    hits: int
    hit_ratio: float
    token_hit_ratio: float
    request_hit_ratio: float
    flops_hit_ratio: float
    gap_closed: float | None
    equal_lru_capacity_blocks: int | None
    ttft_ms_p50: float
    ttft_ms_p90: float
    ttft_ms_p99: float
    evicted_blocks: int | None
    refused_requests: int
    seconds: float
    refs_per_s: float | None


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What the rows of one trace are measured against.

    Attributes:
        first_request: the first request counted, after the warm-up.
        lru_curve: LRU's hits at every capacity (`reference.lru_curve`), or None where it does not hold (durations).
        lru_hits: LRU's hits by capacity, from the replay where there is one.
        opt_hits: the optimum's hits by capacity.

    """

    model: PrefillModel
    first_request: int
    lru_curve: npt.NDArray[np.int64] | None
    lru_hits: dict[int, int]
    opt_hits: dict[int, int]


def counted_hits(run: Run, first_request: int) -> int:
    """Return the run's block hits after the warm-up; O(requests)."""
    return int(run.hits[first_request:].sum())


def measure(trace: Trace, run: Run, yardstick: Yardstick) -> Row:
    """Return the run's figures; O(requests log requests). Pure."""
    part = slice(yardstick.first_request, None)
    refs = trace.prompt_blocks[part].astype(np.int64)
    hits = run.hits[part].astype(np.int64)
    tokens, cached = trace.input_tokens[part], hit_tokens(trace, run.hits)[part]
    model = yardstick.model
    ttft = (tokens - cached) / model.tokens_per_s * 1e3
    if run.delays_ms is not None:
        ttft = ttft + run.delays_ms[part]
    p50, p90, p99 = (float(q) for q in np.percentile(ttft, (50, 90, 99))) if len(ttft) else (0.0, 0.0, 0.0)
    total = int(hits.sum())
    seconds = max(run.seconds, 1e-9)
    return Row(
        trace=run.trace,
        policy=run.policy,
        kind=run.kind,
        capacity_blocks=run.capacity_blocks,
        refs=int(refs.sum()),
        hits=total,
        hit_ratio=_ratio(total, refs.sum()),
        token_hit_ratio=_ratio(cached.sum(), tokens.sum()),
        request_hit_ratio=float(np.mean(hits[refs > 0] / refs[refs > 0])) if refs.any() else 0.0,
        flops_hit_ratio=_ratio(model.flops(0, cached).sum(), model.flops(0, tokens).sum()),
        gap_closed=gap_closed(
            total,
            yardstick.lru_hits.get(run.capacity_blocks),
            yardstick.opt_hits.get(run.capacity_blocks),
            refs=int(refs.sum()),
        ),
        equal_lru_capacity_blocks=equal_capacity(yardstick.lru_curve, total),
        ttft_ms_p50=p50,
        ttft_ms_p90=p90,
        ttft_ms_p99=p99,
        evicted_blocks=run.evicted_blocks,
        refused_requests=run.refused_requests,
        seconds=run.seconds,
        refs_per_s=trace.num_refs / seconds if run.kind == "policy" else None,
    )


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0


def gap_closed(hits: int, lru: int | None, opt: int | None, *, refs: int) -> float | None:
    """Return the share of the way from LRU (0) to the optimum (1) that `hits` lies; negative below LRU.

    None where LRU and the optimum are less than `SMALLEST_GAP` of the references apart: there is nothing to close.

    >>> gap_closed(15, 10, 20, refs=100)
    0.5
    """
    if lru is None or opt is None or opt - lru <= SMALLEST_GAP * refs:
        return None
    return (hits - lru) / (opt - lru)


def equal_capacity(curve: npt.NDArray[np.int64] | None, hits: int) -> int | None:
    """Return the smallest capacity at which LRU hits at least as much; None if no capacity does.

    >>> equal_capacity(np.array([0, 4, 7, 7]), 5)
    2
    """
    if curve is None or hits > curve[-1]:
        return None
    return int(np.searchsorted(curve, hits, side="left"))


_BUSY = 0.9
"""Share of the requests that must fill at least half of the time for it to be the axis."""


@dataclass(frozen=True, slots=True)
class OverTime:
    """The hit ratio in slices of equally many requests, and where the slices end.

    Attributes:
        unit: "minutes", or "requests" where the trace has no times or half of its time holds hardly any requests.

    """

    unit: Literal["minutes", "requests"]
    ends: npt.NDArray[np.float64]
    hit_ratio: npt.NDArray[np.float64]


def over_time(trace: Trace, hits: npt.NDArray[np.int32], *, slices: int = 30, first_request: int = 0) -> OverTime:
    """Return the hit ratio of each of at most `slices` slices of the trace from `first_request` on; O(requests)."""
    bounds = np.unique(np.linspace(first_request, trace.num_requests, slices + 1).astype(int))
    refs = np.add.reduceat(trace.prompt_blocks.astype(np.int64), bounds[:-1])
    hit = np.add.reduceat(hits.astype(np.int64), bounds[:-1])
    ratio = np.divide(hit, refs, out=np.zeros(len(refs)), where=refs > 0)
    last = bounds[1:] - 1
    times = trace.arrival_ms[last]
    if times[-1] <= 0.0 or times[int(len(times) * _BUSY)] < times[-1] / 2.0:
        return OverTime("requests", (last + 1).astype(np.float64), ratio)
    return OverTime("minutes", times / 60e3, ratio)
