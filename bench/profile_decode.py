"""Show the timeline of one attention call: start and duration of each kernel, from the profiler, with a cold L2.

usage: python bench/profile_decode.py [--suite shared ...] [--once]   (--once: one call a case, for ncu)
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

import torch
from attention_cases import SUITES, Workload
from torch.profiler import ProfilerActivity, profile

from radixpool.kernels import attend, plan_forest


def timeline(w: Workload, iterations: int = 20) -> list[tuple[str, float, float]]:
    """Return (kernel, start, duration) in microseconds, medians over iterations; the first kernel starts at 0."""
    plan = plan_forest(w.tables, w.lens, spec=w.spec)
    out = torch.empty_like(w.q)
    cache = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    attend(w.q, w.k_pool, w.v_pool, plan, out=out)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(iterations):
            cache.zero_()
            attend(w.q, w.k_pool, w.v_pool, plan, out=out)
        torch.cuda.synchronize()
    events = sorted((e for e in profiler.events() if e.device_time > 0), key=lambda e: e.time_range.start)
    starts, durations = defaultdict(list), defaultdict(list)
    first, position = 0.0, 0
    for event in events:
        if not event.name.startswith(("attend_items", "merge_partials")):
            position = 0
            continue
        first = event.time_range.start if position == 0 else first
        key = (position, event.name)
        starts[key].append(event.time_range.start - first)
        durations[key].append(event.time_range.end - event.time_range.start)
        position += 1
    return [
        (name, statistics.median(starts[p, name]), statistics.median(durations[p, name])) for p, name in sorted(starts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=["plain", "fp8", "shared"])
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--once", action="store_true", help="one call a case and no profiler")
    args = parser.parse_args()
    for case in (c for suite in args.suite for c in SUITES[suite]() if not args.case or args.case in c.name):
        w = Workload(case)
        if args.once:
            attend(w.q, w.k_pool, w.v_pool, plan_forest(w.tables, w.lens, spec=w.spec))
            torch.cuda.synchronize()
            continue
        print(case.name)
        for name, start, duration in timeline(w):
            print(f"   {start:7.1f} to {start + duration:7.1f}  ({duration:6.1f})  {name}", flush=True)


if __name__ == "__main__":
    main()
