"""Prefill and extend on one GPU, radixpool beside its peers in one run.

usage: python bench/extend.py [--peers DIR] [--suite main|mixed|shapes|fp8 ...] [--case TEXT] [--out DIR]

All kernels are compiled first, in parallel. Every implementation is checked against float64 before it is timed (a red
one is reported, not timed). Rounds alternate between implementations; the L2 cache is overwritten before every run;
figures are medians over the rounds with the spread of the rounds' medians. `radixpool_plain` is the same plan without
the fast kernel, `radixpool_fp8` has precision="fp8". Large dense matrix products, timed before and after the cases, are
the ceiling of the machine in this run. Prints a table, writes extend.csv; `extend_docs.py` makes the documentation.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from attention_rounds import right_calls, time_in_turns
from extend_ahead import compile_ahead
from extend_cases import FP8, SUITES, Case, Workload
from extend_peers import LOADERS, Binder, load_peers
from gpu_timing import time_eager

from radixpool.kernels import extend, plan_forest

CEILING = "dense matrix product"


@dataclass
class Result:
    """One implementation on one case; times in microseconds."""

    case: str
    name: str
    error: float = math.nan
    us: float = math.nan
    low_us: float = math.nan
    high_us: float = math.nan
    tflops: float = math.nan
    failed: str = ""


def radixpool_calls(w: Workload) -> dict[str, Callable[[], torch.Tensor]]:
    """Return our call, the same with the plain kernel only, and with fp8 products where the pool is fp8."""
    calls = {}
    for name in ("radixpool", "radixpool_plain") + (("radixpool_fp8",) if w.case.dtype == FP8 else ()):
        plan = plan_forest(w.tables, w.lens, w.new, spec=w.spec)
        if name == "radixpool_plain":
            plan.fast = False
        precision = "fp8" if name == "radixpool_fp8" else "full"
        out = torch.full_like(w.q, math.nan)
        calls[name] = lambda plan=plan, out=out, precision=precision: extend(
            w.q, w.k_pool, w.v_pool, plan, out=out, precision=precision
        )
    return calls


def ceilings() -> list[Result]:
    """Time dense products of 8192 x 8192 matrices in bf16 and fp8: what the tensor cores give here, at most."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a8, b8, one = a.to(FP8), b.to(FP8).t(), torch.ones((), device="cuda")
    calls = {
        "dense_bf16": lambda: a @ b,
        "dense_fp8": lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
    }
    results = []
    for name, call in calls.items():
        result = Result(CEILING, name)
        try:
            t = time_eager(call, rep_ms=150)
            result.us, result.low_us, result.high_us, result.tflops = t.us, t.low_us, t.high_us, 2 * n**3 / t.us / 1e6
        except Exception as error:
            result.failed = repr(error)[:160]
        results.append(result)
        print(f"{CEILING}: {name} {result.tflops:.0f} TFLOP/s {result.failed}", flush=True)
    return results


def plan_ms(w: Workload) -> float:
    """Return the median milliseconds of a new plan, schedule of the fast kernel and uploads included."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        plan = plan_forest(w.tables, w.lens, w.new, spec=w.spec)
        extend(w.q, w.k_pool, w.v_pool, plan)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def run_case(case: Case, binders: dict[str, Binder], rounds: int) -> list[Result]:
    """Check and time every implementation on one case."""
    w = Workload(case)
    ours = radixpool_calls(w)
    results = {name: Result(case.name, name) for name in [*ours, *binders]}
    calls = right_calls(w, ours, binders, results)
    for name, us in time_in_turns(calls, rounds, rep_ms=60).items():
        r = results[name]
        r.us, r.low_us, r.high_us = statistics.median(us), min(us), max(us)
        r.tflops = case.flops / r.us / 1e6
    report(case, list(results.values()), plan_ms(w) if "radixpool" in calls else math.nan)
    return list(results.values())


def report(case: Case, results: list[Result], plan: float) -> None:
    """Print one case, fastest first; the last figure is the speed relative to FlashAttention-3."""
    fa3 = next((r.us for r in results if r.name == "fa3"), math.nan)
    print(f"== {case.name} ({case.flops / 1e9:.0f} GFLOP); plan and launch {plan:.2f} ms of host time")
    for r in sorted(results, key=lambda r: r.us if not math.isnan(r.us) else math.inf):
        if math.isnan(r.us):
            print(f"   {r.name:16s} {r.failed}")
            continue
        spread = f"{r.us:8.1f} us ({r.low_us:.1f} to {r.high_us:.1f})"
        print(
            f"   {r.name:16s} {spread:34s} {r.tflops:6.1f} TFLOP/s  err {r.error:.1e}  x FA3 {fa3 / r.us:5.2f}",
            flush=True,
        )


def write_results(results: list[Result], path: Path) -> None:
    """Write the CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(asdict(results[0])))
        writer.writeheader()
        writer.writerows(asdict(r) for r in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", type=Path, help="folder with the peers' parts; without it cuDNN alone runs beside us"
    )
    parser.add_argument("--peer", nargs="+", choices=list(LOADERS), default=list(LOADERS))
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile ahead (default: one a core)")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    cases = [c for suite in args.suite for c in SUITES[suite] if args.case in c.name]
    if not cases:
        parser.error(f"--case: no case of {', '.join(args.suite)} contains {args.case!r}")
    compile_ahead(cases, args.peers, args.peer, jobs=args.jobs)
    binders = load_peers(args.peers, args.peer)
    start, results = time.perf_counter(), ceilings()
    for i, case in enumerate(cases, 1):
        results += run_case(case, binders, args.rounds)
        print(f"{i} of {len(cases)} cases, {time.perf_counter() - start:.0f} s", flush=True)
        write_results(results, args.out / "extend.csv")  # a run that is cut short keeps what it has
    write_results(results + ceilings(), args.out / "extend.csv")


if __name__ == "__main__":
    main()
