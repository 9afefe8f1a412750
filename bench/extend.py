"""Prefill and extend on one GPU, radixpool beside its peers in one run.

usage: python bench/extend.py [--peers DIR] [--suite main|shapes|fp8 ...] [--case TEXT] [--out DIR]

Every implementation is checked against float64 before it is timed (a red one is reported, not timed). Rounds alternate
between implementations; the L2 cache is overwritten before every run; figures are medians over the rounds with the
spread of the rounds' medians. `radixpool_plain` is the same plan without the fast kernel. Prints a table, writes
extend.csv and extend.png.
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
from extend_cases import FP8, SUITES, Case, Workload
from extend_peers import LOADERS, Binder, load_peers
from gpu_timing import time_eager

from radixpool.kernels import extend, plan_forest


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
    """Return our call, and the same with the plain kernel only."""
    calls = {}
    for name in ("radixpool", "radixpool_plain"):
        plan = plan_forest(w.tables, w.lens, w.new, spec=w.spec)
        if name == "radixpool_plain":
            plan.fast = False
        out = torch.full_like(w.q, math.nan)
        calls[name] = lambda plan=plan, out=out: extend(w.q, w.k_pool, w.v_pool, plan, out=out)
    return calls


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
    reference = w.reference()
    results: dict[str, Result] = {}
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    ours = radixpool_calls(w)
    for name in [*ours, *binders]:
        results[name] = Result(case.name, name)
        try:
            call = ours[name] if name in ours else binders[name](w)
            results[name].error = w.error(call(), reference)
            torch.cuda.synchronize()
            if not results[name].error < (8e-2 if case.dtype == FP8 else 2e-2):
                raise ArithmeticError(f"relative error {results[name].error:.1e}")
            calls[name] = call
        except Exception as error:
            results[name].failed = repr(error)[:160]
    timings: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            timings[name].append(time_eager(call, rep_ms=60).us)
    for name, t in timings.items():
        r = results[name]
        r.us, r.low_us, r.high_us = statistics.median(t), min(t), max(t)
        r.tflops = case.flops / r.us / 1e6
    report(case, list(results.values()), plan_ms(w))
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


def write_results(results: list[Result], out: Path) -> None:
    """Write the CSV and the plot."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "extend.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, list(asdict(results[0])))
        writer.writeheader()
        writer.writerows(asdict(r) for r in results)
    plot(results, out / "extend.png")


def plot(results: list[Result], path: Path) -> None:
    """Plot TFLOP/s, a group of bars per case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(r.case for r in results))
    names = list(dict.fromkeys(r.name for r in results))
    figure, axes = plt.subplots(figsize=(10, 0.75 * len(cases) + 1.5))
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        speed = {r.case: r.tflops for r in results if r.name == name}
        axes.barh(
            [j + i * height for j in range(len(cases))], [speed.get(c, math.nan) for c in cases], height, label=name
        )
    axes.set_yticks([j + 0.4 - height / 2 for j in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s of the visible part (longer is faster)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", type=Path, help="folder with the peers' parts; without it cuDNN alone runs beside us"
    )
    parser.add_argument("--peer", nargs="+", choices=list(LOADERS), default=list(LOADERS))
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    binders = load_peers(args.peers, args.peer)
    results = []
    for suite in args.suite:
        for case in (c for c in SUITES[suite] if args.case in c.name):
            results += run_case(case, binders, args.rounds)
    if not results:
        parser.error(f"--case: no case of {', '.join(args.suite)} contains {args.case!r}")
    write_results(results, args.out)


if __name__ == "__main__":
    main()
