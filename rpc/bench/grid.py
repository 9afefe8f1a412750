"""Run traces x policies x capacities, over processes, and measure every run against the optimum of its capacity."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

from radixpool.radix.eviction import make_policy
from radixpool.rpc.bench import offline, reference
from radixpool.rpc.bench.cost import PrefillModel
from radixpool.rpc.bench.metrics import Kind, Row, Run, Yardstick, counted_hits, measure
from radixpool.rpc.bench.replay import Timing, durations_ms, replay
from radixpool.rpc.bench.trace import Trace

DEFAULT_POLICIES = (
    "lru",
    "fifo",
    "lfu",
    "slru",
    "2q",
    "arc",
    "s3fifo",
    "sieve",
    "lfu-da",
    "gdsf",
    "w-tinylfu",
    "priority",
    "tail-lru",
    "request",
    "random",
)
REFERENCES = ("opt", "opt-bypass", "whole-sequence-lru", "running-only", "infinite", "none")
DEFAULT_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Default capacities, as shares of a trace's distinct blocks."""

PROTECTED_TOKENS = 2_048
"""Depth that "priority" protects unless told otherwise: a long system prompt."""

FAST_S = 0.2
"""Time to first token that "tail-lru" tries to keep unless told otherwise, in seconds."""


@dataclass(frozen=True, slots=True)
class GridOptions:
    """What to run on each trace.

    Attributes:
        policies: policy names with parameters, e.g. "s3fifo:small=0.1".
        capacities: pool sizes in blocks; empty takes `DEFAULT_SHARES` of each trace's distinct blocks.
        references: which of `REFERENCES` to put beside them.
        timing: "zero" duration, or "timed" with arrivals and durations.
        warmup: share of the requests, from the start, that fills the cache and is not counted.
        jobs: processes.
        seed: for policies that draw, unless they name their own.

    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    capacities: tuple[int, ...] = ()
    references: tuple[str, ...] = REFERENCES
    timing: Timing = "zero"
    warmup: float = 0.0
    jobs: int = 1
    seed: int = 0
    model: PrefillModel = field(default_factory=PrefillModel)

    def __post_init__(self) -> None:
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"warmup must be in 0..1, got {self.warmup}")
        if any(capacity < 1 for capacity in self.capacities):
            raise ValueError(f"capacities must be at least 1 block, got {min(self.capacities)}")
        for name in self.references:
            if name not in REFERENCES:
                raise ValueError(f"references must be of {', '.join(REFERENCES)}, got {name!r}")
        for policy in self.policies:
            make_policy(policy, 1)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a trace asks for whatever the policy: blocks of the largest request, live at once, reused later."""

    num_requests: int
    num_refs: int
    num_nodes: int
    largest_request_blocks: int
    live_set_blocks: int
    opt_working_set_blocks: int


@dataclass(frozen=True, slots=True)
class TraceResult:
    """Everything measured on one trace: rows to print, runs to plot, the first request counted after the warm-up."""

    trace: Trace
    first_request: int
    facts: Facts
    rows: list[Row]
    runs: list[Run]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class _Case:
    trace: int
    policy: str
    kind: Kind
    capacity: int


def capacities_for(trace: Trace, options: GridOptions) -> tuple[int, ...]:
    """Return the capacities to run, ascending; the defaults are rounded up, and hold the largest request."""
    if options.capacities:
        return tuple(sorted(set(options.capacities)))
    sizes = (max(trace.num_nodes * share, trace.largest_request) for share in DEFAULT_SHARES)
    return tuple(sorted({_round_up(size) for size in sizes}))


def _round_up(blocks: float) -> int:
    """Round up to two digits."""
    step = int(10 ** max(0, len(str(int(blocks))) - 2))
    return max(1, -(-int(blocks) // step) * step)


def run_grid(
    traces: list[Trace], options: GridOptions, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[TraceResult]:
    """Run everything and return one result a trace; deterministic but for the times. Calls `progress(done, total)`."""
    cases = [case for i, trace in enumerate(traces) for case in _cases(i, trace, options)]
    runs: dict[_Case, Run] = {}
    for case, run in _execute(traces, cases, options):
        runs[case] = run
        progress(len(runs), len(cases))
    return [
        _result(trace, [runs[case] for case in cases if case.trace == i], options) for i, trace in enumerate(traces)
    ]


def _cases(index: int, trace: Trace, options: GridOptions) -> Iterator[_Case]:
    sizes = capacities_for(trace, options)
    for policy in options.policies:
        for capacity in sizes:
            yield _Case(index, policy, "policy", capacity)
    for name in options.references:
        kind: Kind = "optimum" if name.startswith("opt") else "reference"
        if kind == "optimum" and options.timing == "timed":
            continue  # neither optimum holds when blocks are pinned for a time
        for capacity in sizes:
            yield _Case(index, name, kind, capacity)


_shared: tuple[list[Trace], GridOptions] | None = None


def _share(traces: list[Trace], options: GridOptions) -> None:
    global _shared
    _shared = traces, options


def _execute(traces: list[Trace], cases: list[_Case], options: GridOptions) -> Iterator[tuple[_Case, Run]]:
    _share(traces, options)
    if options.jobs <= 1:
        yield from ((case, _run(case)) for case in cases)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, initializer=_share, initargs=(traces, options)) as pool:
        futures = {pool.submit(_run, case): case for case in cases}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run(case: _Case) -> Run:
    assert _shared is not None, "the process was not initialised"
    traces, options = _shared
    trace = traces[case.trace]
    if case.kind == "policy":
        policy = _with_defaults(case.policy, trace, options)
        done = replay(trace, policy, case.capacity, timing=options.timing, model=options.model)
        return replace(done, policy=case.policy)
    return _reference(trace, case, options)


def _with_defaults(policy: str, trace: Trace, options: GridOptions) -> str:
    """Give policies named without parameters those that depend on the seed, the block size or the model."""
    if policy == "random":
        return f"random:seed={options.seed}"
    if policy == "gdsf":
        return f"gdsf:double_at={options.model.cost_doubles_at_tokens / trace.block_size}"
    if policy == "priority":
        return f"priority:protect={-(-PROTECTED_TOKENS // trace.block_size)}"
    if policy == "tail-lru":
        limit = max(1, int(options.model.tokens_per_s * FAST_S / trace.block_size))
        return f"tail-lru:limit={limit},turn={limit // 8}"
    return policy


def _reference(trace: Trace, case: _Case, options: GridOptions) -> Run:
    name, capacity, first = case.policy, case.capacity, _first_counted(trace, options)
    if name == "opt":
        hits = offline.optimal_hits(trace, capacity, first_request=first)
    elif name == "opt-bypass":
        hits = offline.optimal_hits(trace, capacity, admission="bypass", first_request=first)
    elif name == "whole-sequence-lru":
        hits = reference.whole_sequence_hits(trace, capacity)
    elif name == "running-only":
        held = durations_ms(trace, options.model)
        hits = reference.running_only_hits(trace, held if options.timing == "timed" else held * 0.0)
    else:
        hits = reference.infinite_hits(trace) if name == "infinite" else reference.no_cache_hits(trace)
    return Run(trace=trace.name, policy=name, kind=case.kind, capacity_blocks=capacity, hits=hits, seconds=0.0)


def _first_counted(trace: Trace, options: GridOptions) -> int:
    return int(trace.num_requests * options.warmup)


def _result(trace: Trace, runs: list[Run], options: GridOptions) -> TraceResult:
    first = _first_counted(trace, options)
    yardstick = Yardstick(
        model=options.model,
        first_request=first,
        lru_curve=reference.lru_curve(trace, first_request=first) if options.timing == "zero" else None,
        lru_hits={run.capacity_blocks: counted_hits(run, first) for run in runs if run.policy == "lru"},
        opt_hits={run.capacity_blocks: counted_hits(run, first) for run in runs if run.policy == "opt"},
    )
    facts = _facts(trace, options)
    return TraceResult(
        trace=trace,
        first_request=first,
        facts=facts,
        rows=[measure(trace, run, yardstick) for run in runs],
        runs=runs,
        warnings=list(_warnings(trace, facts, capacities_for(trace, options))),
    )


def _facts(trace: Trace, options: GridOptions) -> Facts:
    held = durations_ms(trace, options.model)
    return Facts(
        num_requests=trace.num_requests,
        num_refs=trace.num_refs,
        num_nodes=trace.num_nodes,
        largest_request_blocks=trace.largest_request,
        live_set_blocks=reference.live_set(trace, held if options.timing == "timed" else held * 0.0),
        opt_working_set_blocks=offline.working_set(trace),
    )


def _warnings(trace: Trace, facts: Facts, capacities: Iterable[int]) -> Iterator[str]:
    for capacity in capacities:
        if capacity < facts.largest_request_blocks:
            yield (
                f"{trace.name}: {capacity} blocks are fewer than the largest request's {facts.largest_request_blocks}: "
                "such requests are refused and count as misses"
            )
        elif capacity < facts.live_set_blocks:
            yield (
                f"{trace.name}: {capacity} blocks are fewer than the {facts.live_set_blocks} that running requests "
                "hold at once: requests wait for each other"
            )
    if trace.damaged:
        first = trace.damaged[0]
        yield f"{trace.name}: {len(trace.damaged)} damaged lines skipped; line {first.line}: {first.reason}"
    if trace.reordered:
        yield f"{trace.name}: {trace.reordered} requests were not in order of arrival and were sorted"
