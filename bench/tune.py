"""Time launch configurations on the card at hand and write the table that `radixpool.kernels.launch` ships.

usage: python bench/tune.py [--out DIR] [--suite plain|fp8|shared ...] [--rep-ms 30]

Every candidate is checked against float64 on every case before it is timed; one that fails is left out, with its error.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from attention_cases import FP8, SUITES, Case, Workload
from gpu_timing import time_eager, time_graph

from radixpool.kernels import attend, plan_forest
from radixpool.kernels import plan as plan_module
from radixpool.kernels.build import attend_source, compile_source
from radixpool.kernels.launch import TileConfig, uses_pairs
from radixpool.kernels.triton_backend import Features, attend_variant

NARROW = [
    TileConfig(64, 4, 3, 2), TileConfig(64, 4, 3, 2, max_registers=168), TileConfig(64, 4, 3, 3, max_registers=168),
    TileConfig(64, 4, 4, 2), TileConfig(128, 4, 3, 1), TileConfig(32, 4, 5, 3, max_registers=168),
    TileConfig(32, 4, 4, 4, max_registers=128), TileConfig(64, 8, 3, 2, max_registers=128),
]  # fmt: skip
NARROW_FP8 = [
    TileConfig(64, 4, 3, 4, max_registers=128), TileConfig(64, 4, 4, 4, max_registers=128),
    TileConfig(64, 4, 3, 5, max_registers=96), TileConfig(64, 4, 5, 3, max_registers=168),
    TileConfig(128, 4, 3, 2), TileConfig(128, 4, 3, 3, max_registers=168), TileConfig(32, 4, 5, 4, max_registers=128),
    TileConfig(64, 2, 4, 4),
]  # fmt: skip
BESIDE = [
    TileConfig(64, 4, 3, 1, max_registers=160), TileConfig(64, 4, 3, 2, max_registers=160),
    TileConfig(64, 4, 3, 3, max_registers=160), TileConfig(32, 4, 5, 1, max_registers=128),
]  # fmt: skip
WIDE = [
    TileConfig(64, 8, 3, 1, split=True), TileConfig(64, 8, 3, 1, split=True, max_registers=168),
    TileConfig(64, 8, 3, 1, max_registers=168), TileConfig(32, 8, 4, 1, split=True, max_registers=168),
    TileConfig(64, 8, 2, 1, split=True, max_registers=168), TileConfig(32, 8, 4, 2, split=True, max_registers=128),
]  # fmt: skip


def candidates(case: Case) -> list[dict[int, TileConfig]]:
    """Return assignments of configurations to tile heights worth trying for a case."""
    if case.dtype == FP8:
        return [dict.fromkeys((16, 32, 64, 128), c) for c in NARROW_FP8]
    if not case.levels:
        return [dict.fromkeys((16, 32, 64, 128), c) for c in NARROW]
    return [{16: n, 32: n, 64: w, 128: w} for n, w in itertools.product(BESIDE, WIDE)]


def build_one(job: tuple[Case, int, TileConfig, bool]) -> str:
    """Compile one kernel into the shared cache, so that the timed process finds it there."""
    case, height, config, chained = job
    pairs = uses_pairs(case.spec, height, 90, interpreted=False)
    try:
        variant = attend_variant(case.spec, config, height, Features(pdl=True), pairs=pairs, chained=chained)
        kernel = compile_source("", attend_source(case.spec, variant), 90, variant.options)
    except Exception as error:
        return f"{case.heads} m{height} {config}: {error!r}"[:300]
    used = f"{kernel.registers} regs, {kernel.spill_bytes} spilled, {kernel.shared_bytes} B"
    return f"{case.heads} m{height} {config}: {used}"


def warm(cases: list[Case]) -> None:
    """Compile all candidates in parallel."""
    jobs: dict[object, tuple[Case, int, TileConfig, bool]] = {}
    for case in cases:
        for assignment in candidates(case):
            for height, config in assignment.items():
                if height in heights_of(case):
                    kernel = (case.heads, case.block_size, case.dtype, height, config.block_n, config.num_warps,
                              config.num_stages, config.split, config.max_registers)  # fmt: skip
                    chained = bool(case.levels) and height < 64
                    jobs[(kernel, chained)] = (case, height, config, chained)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for line in sorted(pool.map(build_one, jobs.values())):
            print(line, flush=True)


def heights_of(case: Case) -> tuple[int, ...]:
    """Return the tile heights that a case's plan uses."""
    group = case.heads[0] // case.heads[1]
    sizes = {group} | {case.batch // nodes * group for _, nodes in case.levels}
    return tuple(sorted({next(h for h in (16, 32, 64, 128) if h >= min(s, 128)) for s in sizes}))


def measure(case: Case, rows: list[dict[str, object]], rep_ms: int) -> None:
    """Time every candidate on one case."""
    w = Workload(case)
    reference = w.reference()
    for assignment in candidates(case):
        row: dict[str, object] = {
            "case": case.name,
            "config": json.dumps({h: asdict(c) for h, c in assignment.items()}),
        }
        rows.append(row)
        fixed = lambda kv_bytes, head_dim, rows, arch, a=assignment, tall=False: a[rows]  # noqa: E731
        plan_module.tile_config = fixed  # type: ignore[assignment]
        try:
            plan = plan_forest(w.tables, w.lens, spec=w.spec)
            out = torch.full_like(w.q, math.nan)
            run = lambda plan=plan, out=out: attend(w.q, w.k_pool, w.v_pool, plan, out=out)  # noqa: E731
            run()
            row["error"] = w.error(out, reference)
            if not row["error"] < 1e-2:
                raise ValueError(f"relative error {row['error']}")
            row["items"] = plan.forest.num_items
            row["parts"] = plan.forest.num_parts
            timing = time_eager(run, rep_ms=rep_ms)
            row["us"], row["low_us"], row["high_us"] = timing.us, timing.low_us, timing.high_us
            row["graph_us"] = time_graph(run, rep_ms=rep_ms).us
        except Exception as error:
            row["failed"] = repr(error)[:200]
            torch.cuda.synchronize()
    timed = sorted((r for r in rows if r["case"] == case.name and "us" in r), key=lambda r: r["graph_us"])
    print(f"== {case.name}: {w.unique_bytes / 4.34e6:.0f} us at 4.34 TB/s; {len(candidates(case)) - len(timed)} failed")
    for r in timed[:8]:
        short = {h: list(c.values()) for h, c in json.loads(str(r["config"])).items() if int(h) in heights_of(case)}
        print(
            f"   {r['graph_us']:7.1f} graph {r['us']:7.1f} eager  err {r['error']:.1e} parts {r['parts']:5d} {short}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=["plain", "fp8", "shared"])
    parser.add_argument("--rep-ms", type=int, default=30)
    args = parser.parse_args()
    cases = [case for suite in args.suite for case in SUITES[suite]()]
    warm(cases)
    rows: list[dict[str, object]] = []
    for case in cases:
        measure(case, rows, args.rep_ms)
    args.out.mkdir(parents=True, exist_ok=True)
    fields = ["case", "config", "us", "low_us", "high_us", "graph_us", "error", "items", "parts", "failed"]
    with (args.out / "tune.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, fields)
        writer.writeheader()
        writer.writerows(rows)
    failures = {str(r["failed"]) for r in rows if "failed" in r}
    print(*failures, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
