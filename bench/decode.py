"""Decode attention on one GPU, radixpool beside its peers in one run.

usage: python bench/decode.py [--peers DIR] [--suite plain|more|fp8|shared ...] [--out DIR]

Every implementation is checked against float64 before it is timed (a red one is reported, not timed). Rounds alternate
between implementations; the L2 cache is overwritten before every run; figures are medians over all rounds with the
spread of the rounds' medians. *clean* is a replayed graph after an L2 that was filled by reading: without dirty lines
to write back. Writes decode.csv, decode.json and decode.png, prints a table; decode_docs.py makes the documentation.
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
from attention_cases import SUITES, Case, Workload
from attention_peers import LOADERS, Binder, load_peers
from attention_rounds import right_calls, time_in_turns
from decode_docs import plot
from gpu_timing import clean_cache, host_time, read_bandwidth, time_graph

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
    clean_us: float = math.nan
    host_us: float = math.nan
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
    ours = radixpool_calls(w)
    results = {name: Result(case.name, name) for name in [*ours, *binders]}
    calls = right_calls(w, ours, binders, results)
    timings = time_in_turns(calls, rounds, rep_ms=40)
    for name, call in calls.items():
        r, t = results[name], timings[name]
        r.eager_us, r.eager_low_us, r.eager_high_us = statistics.median(t), min(t), max(t)
        r.host_us = host_time(call)
        try:
            r.graph_us = time_graph(call, rep_ms=40).us
            with clean_cache():
                r.clean_us = time_graph(call, rep_ms=40).us
        except Exception as error:
            r.failed = f"graph: {error!r}"[:160]
        best = min(x for x in (r.eager_us, r.graph_us) if not math.isnan(x))
        r.unique_tb_s = w.unique_bytes / best / 1e6
        r.of_read_bandwidth = w.unique_bytes / best * 1e6 / bandwidth
    fresh, reused = plan_times(w)
    read = plain_read(w)
    report(case, w, list(results.values()), read, bandwidth, fresh, reused)
    return [read, *results.values()]


def plain_read(w: Workload) -> Result:
    """Time a plain read of as many bytes as the case's unique KV, under the same conditions.

    The L2 flush before each run leaves dirty lines that a read pushes out and has written back meanwhile.
    """
    result = Result(w.case.name, "plain_read")
    rows = w.unique_bytes // 2 // 4096
    flat = w.k_pool.view(torch.uint8).view(-1).view(torch.bfloat16)
    if rows * 4096 > flat.numel():
        result.failed = "the pool is smaller"
        return result
    source = flat[: rows * 4096].view(rows, 4096)
    result.graph_us = time_graph(lambda: torch.sum(source, 1), rep_ms=40).us
    with clean_cache():
        result.clean_us = time_graph(lambda: torch.sum(source, 1), rep_ms=40).us
    return result


def report(
    case: Case, w: Workload, results: list[Result], read: Result, bandwidth: float, fresh: float, reused: float
) -> None:  # fmt: skip
    """Print one case: a line per implementation, fastest graph first, as a ratio to ours."""
    floor = w.unique_bytes / bandwidth * 1e6
    print(
        f"== {case.name}: {floor:.1f} us at full bandwidth, plain read of as many bytes {read.graph_us:.1f} us "
        f"(clean L2 {read.clean_us:.1f}), plan {fresh:.0f} us, re-used {reused:.0f} us"
    )
    ours = results[0]
    for r in sorted(results, key=lambda r: r.eager_us if not math.isnan(r.eager_us) else math.inf):
        if math.isnan(r.eager_us):
            print(f"   {r.name:22s} {r.failed}")
            continue
        print(
            f"   {r.name:22s} eager {r.eager_us:7.1f} ({r.eager_low_us:.1f} to {r.eager_high_us:.1f})"
            f" graph {r.graph_us:7.1f} clean {r.clean_us:7.1f}  x ours {r.eager_us / ours.eager_us:5.2f}"
            f" {r.graph_us / ours.graph_us:5.2f} {r.clean_us / ours.clean_us:5.2f}  host {r.host_us:4.0f}"
            f"  err {r.error:.1e}"
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
    plot([asdict(r) for r in results], out / "decode.png")


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
