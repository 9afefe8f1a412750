"""How fast is the tree? Lifecycles a second, µs an operation, bytes a block, against size, depth and other engines.

    python bench/tree.py                        the four workloads, sizes and depths
    python bench/tree.py --peers ~/peers        beside SGLang, vLLM and Dynamo (see `--help` for the set-up)

A lifecycle is acquire + commit + release of one request with 32 in flight, in CPU time of one thread, so that a busy
machine does not count. The rate comes from passes without a clock inside; µs an operation from passes of their own.
"""

from __future__ import annotations

import csv
import ctypes
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tree_workloads import BLOCK_SIZE, IN_FLIGHT, WORKLOADS, Tokens, Workload

from radixpool import RadixCache, Sequence

console = Console(stderr=True)
OPERATIONS = ("acquire", "commit", "release")
SIZES = (1_000, 10_000, 100_000, 1_000_000)
DEPTHS = (1, 4, 16, 64, 256)
HIT_TOKENS = (4_096, 32_768, 131_072)
Row = dict[str, object]


def run_lifecycles(cache: RadixCache, prompts: Iterator[Tokens], count: int) -> float:
    """Run the next `count` prompts without a clock inside; return µs of CPU a lifecycle.

    Prompts are made in chunks outside the measured time, as many as are in flight: like a request that was just
    received, a prompt is still in the processor's cache when it is looked up.
    """
    in_flight: deque[Sequence] = deque()
    acquire, commit, release = cache.acquire, cache.commit, cache.release
    spent = done = 0
    while done < count:
        keys = [tokens.tobytes() for tokens in islice(prompts, min(IN_FLIGHT, count - done))]
        start = time.thread_time_ns()
        for key in keys:
            seq = acquire(key)
            commit(seq, seq.num_tokens)
            in_flight.append(seq)
            if len(in_flight) > IN_FLIGHT:
                release(in_flight.popleft())
        spent += time.thread_time_ns() - start
        done += len(keys)
    start = time.thread_time_ns()
    while in_flight:
        release(in_flight.popleft())
    return (spent + time.thread_time_ns() - start) / 1e3 / count


def operation_times(cache: RadixCache, prompts: Iterator[Tokens], count: int) -> dict[str, float]:
    """Run the next `count` prompts with a clock around each operation; return each median in µs."""
    times: dict[str, list[int]] = {name: [] for name in OPERATIONS}
    evict, evictions = cache._evict, []

    def timed_evict(count: int, *args: Any, **options: Any) -> None:
        start = clock()
        evict(count, *args, **options)
        evictions.append((clock() - start) / count)  # room was proven: all of them go

    clock = time.perf_counter_ns
    in_flight: deque[Sequence] = deque()
    cache._evict = timed_evict  # type: ignore[method-assign]
    try:
        for tokens in islice(prompts, count):
            key = tokens.tobytes()
            t0 = clock()
            seq = cache.acquire(key)
            t1 = clock()
            cache.commit(seq, seq.num_tokens)
            t2 = clock()
            times["acquire"].append(t1 - t0)
            times["commit"].append(t2 - t1)
            in_flight.append(seq)
            if len(in_flight) >= IN_FLIGHT:
                t0 = clock()
                cache.release(in_flight.popleft())
                times["release"].append(clock() - t0)
    finally:
        del cache._evict
    while in_flight:
        cache.release(in_flight.popleft())
    result = {f"{name}_us": statistics.median(values) / 1e3 for name, values in times.items()}
    return result | {"evict_us_per_block": statistics.median(evictions or [0]) / 1e3}


def measure_workload(workload: Workload, policy: str, seed: int) -> Row:
    """Measure one repeat of a workload in a fresh cache: fill, rate, operations; RSS after the fill."""
    settle()
    before = resident_bytes()
    cache = RadixCache(workload.num_blocks, BLOCK_SIZE, policy=policy)
    prompts = workload.prompts(seed)
    memory: Row = {}
    run_lifecycles(cache, prompts, workload.fill)
    if workload.name == "large":
        settle()
        memory["bytes_per_block"] = (resident_bytes() - before) / cache.stats().tree_blocks
    gc.freeze()
    before_run = cache.stats()
    spent = run_lifecycles(cache, prompts, workload.requests)
    after_run = cache.stats()
    row: Row = {
        "lifecycles_per_s": 1e6 / spent,
        "lifecycle_us": spent,
        "hit_ratio": (after_run.hit_tokens - before_run.hit_tokens)
        / (after_run.queried_tokens - before_run.queried_tokens),
    }
    row |= operation_times(cache, prompts, workload.requests)
    gc.unfreeze()
    cache.check()
    return row | memory


def measure_size(num_blocks: int, policy: str, seed: int) -> Row:
    """Measure one block's eviction and one hit in a full cache of `num_blocks` blocks, leaves of 32 blocks."""
    rng = np.random.default_rng(seed)
    cache = RadixCache(num_blocks, BLOCK_SIZE, policy=policy)
    prompt = rng.integers(0, 128_000, 16 * BLOCK_SIZE, dtype=np.uint32)
    while cache.stats().free_blocks > 0:
        room = min(cache.stats().free_blocks, 32) * BLOCK_SIZE
        tail = rng.integers(0, 128_000, room, dtype=np.uint32)
        seq = cache.acquire(np.concatenate([prompt, tail]), max_hit=len(prompt))
        cache.commit(seq, seq.num_tokens)
        cache.release(seq)
    gc.freeze()
    key = prompt.tobytes() + b"\1\0\0\0"
    hits = []
    for _ in range(300):
        start = time.perf_counter_ns()
        seq = cache.acquire(key)
        hits.append(time.perf_counter_ns() - start)
        cache.release(seq)
    singles = timed(lambda: cache.evict(1), 200)
    chunk = max(1, min(32, num_blocks // 200))
    many = timed(lambda: cache.evict(chunk), 100)
    gc.unfreeze()
    return {
        "hit_us": statistics.median(hits) / 1e3,
        "evict_one_us": statistics.median(singles) / 1e3,
        "evict_us_per_block": statistics.median(many) / 1e3 / chunk,
    }


def measure_depth(depth: int, policy: str, seed: int) -> Row:
    """Measure acquire, commit and release of a hit through `depth` one-block runs (a branch below each)."""
    rng = np.random.default_rng(seed)
    cache = RadixCache(4 * depth + 8, BLOCK_SIZE, policy=policy)
    prompt = rng.integers(0, 128_000, depth * BLOCK_SIZE, dtype=np.uint32).tobytes()
    stride = BLOCK_SIZE * 4
    for end in range(stride, len(prompt) + 1, stride):
        branch = rng.integers(0, 128_000, BLOCK_SIZE, dtype=np.uint32).tobytes()
        for key in (prompt[:end], prompt[:end] + branch):
            run_once(cache, key)
    return hit_times(cache, prompt) | {"runs": cache.stats().num_nodes}


def measure_hit(num_tokens: int, policy: str, seed: int) -> Row:
    """Measure a hit of `num_tokens` tokens that lie in one run."""
    cache = RadixCache(num_tokens // BLOCK_SIZE + 8, BLOCK_SIZE, policy=policy)
    prompt = np.random.default_rng(seed).integers(0, 128_000, num_tokens, dtype=np.uint32).tobytes()
    run_once(cache, prompt)
    return hit_times(cache, prompt)


def run_once(cache: RadixCache, key: bytes) -> None:
    seq = cache.acquire(key, max_hit=len(key) // 4)
    cache.commit(seq, seq.num_tokens)
    cache.release(seq)


def hit_times(cache: RadixCache, prompt: bytes, count: int = 200) -> Row:
    times: dict[str, list[int]] = {name: [] for name in OPERATIONS}
    clock = time.perf_counter_ns
    for i in range(count):
        key = prompt + i.to_bytes(4, "little")  # a fresh object each time, as from the wire
        t0 = clock()
        seq = cache.acquire(key)
        t1 = clock()
        cache.commit(seq, seq.num_tokens)
        t2 = clock()
        cache.release(seq)
        t3 = clock()
        for name, spent in zip(OPERATIONS, (t1 - t0, t2 - t1, t3 - t2), strict=True):
            times[name].append(spent)
    return {f"{name}_us": statistics.median(values) / 1e3 for name, values in times.items()}


def timed(call: Callable[[], object], count: int) -> list[int]:
    spent = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        spent.append(time.perf_counter_ns() - start)
    return spent


def settle() -> None:
    """Give freed memory back, so that RSS means something."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def summarise(question: str, case: object, repeats: list[Row], engine: str = "radixpool") -> list[Row]:
    """Return one row per figure: median, lowest and highest over the repeats."""
    rows: list[Row] = []
    for figure in repeats[0]:
        values = [float(row[figure]) for row in repeats]  # type: ignore[arg-type]
        rows.append(
            {
                "engine": engine,
                "question": question,
                "case": case,
                "figure": figure,
                "median": statistics.median(values),
                "low": min(values),
                "high": max(values),
                "repeats": len(values),
            }
        )
    return rows


def beside_peers(
    folder: Path | None, workload: str, requests: int, seed: int, repeats: int, progress: Progress
) -> list[Row]:
    """Measure all engines on one workload, alternating within each repeat, with their ratio to this cache."""
    from tree_peers import ENGINES, measure

    assert folder is not None
    found: dict[str, list[Row]] = {engine: [] for engine in ENGINES}
    task = progress.add_task(f"beside other engines: {workload}", total=repeats * len(ENGINES))
    for repeat in range(repeats):
        for engine in ENGINES:
            row: Row = dict(measure(engine, folder, workload, seed + repeat, requests))
            found[engine].append(row)
            own = found["radixpool"][repeat]["lifecycle_us"]
            row["times_slower"] = row["lifecycle_us"] / own  # type: ignore[operator]
            progress.advance(task)
    return [r for engine, own in found.items() for r in summarise("beside other engines", workload, own, engine)]


def show(rows: list[Row]) -> None:
    """Print one table per question: a line per case and engine, a column per figure."""
    out = Console(width=None if sys.stdout.isatty() else 140)
    for question in dict.fromkeys(row["question"] for row in rows):
        own = [row for row in rows if row["question"] == question]
        figures = list(dict.fromkeys(str(row["figure"]) for row in own))
        table = Table("case", "engine", title=str(question), title_justify="left")
        for figure in figures:
            table.add_column(figure.replace("_", " "), justify="right")
        for case, engine in dict.fromkeys((row["case"], row["engine"]) for row in own):
            cells = {str(r["figure"]): r for r in own if (r["case"], r["engine"]) == (case, engine)}
            table.add_row(str(case), str(engine), *(_cell(cells.get(figure)) for figure in figures))
        out.print(table)


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    median, low, high = (float(row[name]) for name in ("median", "low", "high"))  # type: ignore[arg-type]
    digits = 0 if median >= 1000 else 1 if median >= 10 else 2
    spread = f" ±{(high - low) / 2 / median:.0%}" if median else ""
    return f"{median:,.{digits}f}{spread}"


@click.command(help=__doc__)
@click.option("--workload", "names", multiple=True, type=click.Choice(list(WORKLOADS)), help="Only these workloads.")
@click.option("--only-workloads", is_flag=True, help="Leave out sizes, depths and long hits.")
@click.option(
    "--peers",
    "peers_folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Also measure SGLang, vLLM and Dynamo from this folder, alternating; make it with "
    "`python bench/tree_peers.py setup DIR` (released wheels, 3 GB).",
)
@click.option("--peer-requests", default=500, show_default=True, type=click.IntRange(1), help="Requests of each run.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Fresh caches per case.")
@click.option("--policy", default="lru", show_default=True, help="Eviction policy of the cache.")
@click.option("--seed", default=100, show_default=True, help="Seed of the first repeat's prompts.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write all rows as JSON.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False), help="Write all rows as CSV.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False), help="Draw the figures (PNG, SVG or PDF).")
def main(
    names: tuple[str, ...], only_workloads: bool, peers_folder: Path | None, peer_requests: int, repeats: int,
    policy: str, seed: int,
    json_file: str | None, csv_file: str | None, plot_file: str | None,
) -> None:  # fmt: skip
    """Run the benchmark."""
    cases: list[tuple[str, object, Callable[[int], Row]]] = [
        ("workload", name, lambda s, name=name: measure_workload(WORKLOADS[name], policy, s))  # type: ignore[misc]
        for name in (names or WORKLOADS)
    ]
    if not only_workloads:
        for question, measure, values in (
            ("blocks in the cache", measure_size, SIZES),
            ("one-block runs on the path", measure_depth, DEPTHS),
            ("tokens hit in one run", measure_hit, HIT_TOKENS),
        ):
            cases += [(question, v, lambda s, m=measure, v=v: m(v, policy, s)) for v in values]  # type: ignore[misc]
    rows: list[Row] = []
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=len(cases) * repeats)
        for question, case, measure_case in cases:
            results = []
            for repeat in range(repeats):
                progress.update(task, description=f"{question}: {case}")
                results.append(measure_case(seed + repeat))
                progress.advance(task)
            rows += summarise(question, case, results)
        for name in (names or WORKLOADS) if peers_folder else ():
            rows += beside_peers(peers_folder, name, peer_requests, seed, repeats, progress)
    show(rows)
    if json_file:
        Path(json_file).write_text(json.dumps(rows, indent=1) + "\n")
    if csv_file:
        with Path(csv_file).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    if plot_file:
        from tree_plot import draw

        draw(rows, plot_file)


if __name__ == "__main__":
    main()
