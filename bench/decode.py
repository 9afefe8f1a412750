"""Decode attention on one GPU, radixpool beside its peers in one run.

usage: python bench/decode.py [--peers DIR] [--suite plain|more|fp8|shared ...] [--out DIR]

Every implementation is checked against float64 before it is timed (a red one is reported, not timed). Rounds alternate
between implementations; the L2 cache is overwritten before every run; figures are medians over all rounds with the
spread of the rounds' medians. Writes decode.csv, decode.json and decode.png, prints a table.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from attention_cases import FP8, SUITES, Case, Workload
from attention_peers import LOADERS, Binder, load_peers
from gpu_timing import read_bandwidth, time_eager, time_graph

from radixpool.kernels import attend, plan_forest

WRITEBACK = "figures include the write-back of the dirty lines that the L2 flush leaves"


@dataclass
class Result:
    """One implementation on one case; times in microseconds, bandwidth over unique KV bytes."""

    case: str
    name: str
    error: float = math.nan
    eager_us: float = math.nan
    eager_low_us: float = math.nan
    eager_high_us: float = math.nan
    graph_us: float = math.nan
    unique_tb_s: float = math.nan
    of_read_bandwidth: float = math.nan
    failed: str = ""


def radixpool_calls(w: Workload) -> dict[str, Callable[[], torch.Tensor]]:
    """Return our call, with sharing and without."""
    calls = {}
    for name, sharing in (("radixpool", "forest"), ("radixpool_no_sharing", "none")):
        plan = plan_forest(w.tables, w.lens, spec=w.spec, sharing=sharing)
        out = torch.full_like(w.q, math.nan)
        calls[name] = lambda plan=plan, out=out: attend(w.q, w.k_pool, w.v_pool, plan, out=out)
    return calls


def plan_times(w: Workload) -> tuple[float, float]:
    """Return the median host microseconds of a new plan and of an update that re-uses the cut, uploads included."""
    torch.cuda.synchronize()
    fresh, reused = [], []
    lens = w.lens - 1
    plan = plan_forest(w.tables, lens, spec=w.spec)
    for i in range(40):
        start = time.perf_counter()
        plan_forest(w.tables, w.lens, spec=w.spec)
        fresh.append(time.perf_counter() - start)
        start = time.perf_counter()
        plan.update(None, lens + i % 2)
        reused.append(time.perf_counter() - start)
    return statistics.median(fresh) * 1e6, statistics.median(reused) * 1e6


def run_case(case: Case, binders: dict[str, Binder], rounds: int, bandwidth: float) -> list[Result]:
    """Check and time every implementation on one case."""
    w = Workload(case)
    reference = w.reference()
    results: dict[str, Result] = {}
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    bound = radixpool_calls(w)
    for name in [*bound, *binders]:
        results[name] = Result(case.name, name)
        try:
            call = bound[name] if name in bound else binders[name](w)
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
            timings[name].append(time_eager(call, rep_ms=40).us)
    for name, call in calls.items():
        r, t = results[name], timings[name]
        r.eager_us, r.eager_low_us, r.eager_high_us = statistics.median(t), min(t), max(t)
        try:
            r.graph_us = time_graph(call, rep_ms=40).us
        except Exception as error:
            r.failed = f"graph: {error!r}"[:160]
        best = min(x for x in (r.eager_us, r.graph_us) if not math.isnan(x))
        r.unique_tb_s = w.unique_bytes / best / 1e6
        r.of_read_bandwidth = w.unique_bytes / best * 1e6 / bandwidth
    fresh, reused = plan_times(w)
    report(case, w, list(results.values()), bandwidth, fresh, reused)
    return list(results.values())


def read_time(w: Workload) -> float:
    """Return the microseconds of a plain read of as many bytes as the case's unique KV, under the same conditions.

    The L2 flush before each run leaves dirty lines that are written back meanwhile: no kernel of a short case gets
    near the bytes divided by the bandwidth.
    """
    rows = w.unique_bytes // 2 // 4096
    flat = w.k_pool.view(torch.uint8).view(-1).view(torch.bfloat16)
    if rows * 4096 > flat.numel():
        return math.nan
    source = flat[: rows * 4096].view(rows, 4096)
    return time_graph(lambda: torch.sum(source, 1), rep_ms=40).us


def report(case: Case, w: Workload, results: list[Result], bandwidth: float, fresh: float, reused: float) -> None:
    """Print one case: a line per implementation, fastest graph first, as a ratio to ours."""
    floor, read = w.unique_bytes / bandwidth * 1e6, read_time(w)
    print(
        f"== {case.name}: {floor:.1f} us at full bandwidth, plain read of as many bytes {read:.1f} us, "
        f"plan {fresh:.0f} us, re-used {reused:.0f} us"
    )
    ours = results[0]
    for r in sorted(results, key=lambda r: r.eager_us if not math.isnan(r.eager_us) else math.inf):
        if math.isnan(r.eager_us):
            print(f"   {r.name:22s} {r.failed}")
            continue
        print(
            f"   {r.name:22s} eager {r.eager_us:7.1f} ({r.eager_low_us:.1f} to {r.eager_high_us:.1f})"
            f" graph {r.graph_us:7.1f}  x ours {r.eager_us / ours.eager_us:5.2f} eager"
            f" {r.graph_us / ours.graph_us:5.2f} graph  err {r.error:.1e}"
            f"  {r.unique_tb_s:.2f} TB/s {r.of_read_bandwidth:4.0%} {r.failed}",
            flush=True,
        )


def write_results(results: list[Result], bandwidth: float, out: Path) -> None:
    """Write CSV, JSON and a plot."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "decode.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, list(asdict(results[0])))
        writer.writeheader()
        writer.writerows(asdict(r) for r in results)
    device = torch.cuda.get_device_name()
    meta = {"device": device, "torch": torch.__version__, "read_bandwidth_tb_s": bandwidth / 1e12, "note": WRITEBACK}
    (out / "decode.json").write_text(json.dumps({"meta": meta, "results": [asdict(r) for r in results]}, indent=1))
    plot(results, out / "decode.png")


LABELS = {
    "radixpool_no_sharing": "radixpool, plan without sharing",
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "fi_cascade": "FlashInfer cascade",
    "vllm_triton": "vLLM Triton",
    "sglang_triton": "SGLang Triton",
}


def plot(results: list[Result], path: Path) -> None:
    """Plot eager time relative to ours: a row per case, a mark per implementation (ratios have no zero to start at)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(r.case for r in results))
    ours = {r.case: r.eager_us for r in results if r.name == "radixpool"}
    figure, axes = plt.subplots(figsize=(10, 0.3 * len(cases) + 1.6))
    for name, marker in zip(LABELS, "|os^vD", strict=True):
        timed = [r for r in results if r.name == name and r.eager_us > 0]
        points = [(r.eager_us / ours[r.case], cases.index(r.case)) for r in timed]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, s=42, label=LABELS[name], zorder=3)
    axes.axvline(1, color="black", linewidth=1.5, label="radixpool")
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.set_xlabel("time relative to radixpool (right of the line: slower)")
    axes.set_xscale("log")
    ticks = [0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with the peers' parts; without it only torch runs beside us")
    parser.add_argument("--peer", nargs="+", choices=list(LOADERS), default=list(LOADERS))
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    binders = load_peers(args.peers, args.peer)
    results = []
    for suite in args.suite:
        for case in SUITES[suite]():
            results += run_case(case, binders, args.rounds, bandwidth)
        write_results(results, bandwidth, args.out)


if __name__ == "__main__":
    main()
