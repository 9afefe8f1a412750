"""What does the block directory cost, and how long does a recovery take?

    python bench/directory.py                       all questions, on a memory file system where there is one
    python bench/directory.py --folder /var/tmp     the same on a disk's file system

The cost is measured side by side: two caches of one process run the same prompts in turns, one with a directory and
one without, and the ratio is taken turn by turn. A recovery is what a start after `kill -9` does: open, scan the
records, plan the tree and build it; then, once the former life is over, its fence is lifted in slices, the longest of
which is how long a call can wait for it. Lifecycles and recoveries are in CPU time of one
thread, so that a busy machine does not count; single calls are too short for that clock.
"""

from __future__ import annotations

import csv
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import tee
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from rich.progress import Progress
from tree import Row, console, run_lifecycles, show, summarise
from tree_workloads import BLOCK_SIZE, VOCABULARY, WORKLOADS, Workload

from radixpool import RadixCache
from radixpool.radix.namespace import DEFAULT_NAMESPACE
from radixpool.radix.rebuild import lift_fence, restore_blocks
from radixpool.radix.restore import plan_restore
from radixpool.rpc.directory import BlockDirectory
from radixpool.rpc.manager.recovery import collector_paused

TURNS = 7
RUN_LENGTHS = (1, 4, 32, 256)
SHAPES = (
    "workload large",
    "runs of 256 blocks",
    "runs of 8 blocks",
    "runs of 1 block",
    "a fork at every block",
    "paths of 1,000 runs of 1 block",
)


@contextmanager
def opened(folder: str | None, num_blocks: int) -> Iterator[BlockDirectory]:
    """Open a directory of its own and remove it afterwards."""
    path = Path(tempfile.mkdtemp(prefix="radixpool-bench-", dir=folder))
    directory = BlockDirectory.open(path / "directory", num_blocks=num_blocks, block_size=BLOCK_SIZE)
    try:
        yield directory
    finally:
        directory.close()
        shutil.rmtree(path)


def measure_lifecycles(workload: Workload, seed: int, folder: str | None) -> Row:
    """Measure a lifecycle with and without a directory, in turns over the same prompts."""
    with opened(folder, workload.num_blocks) as directory:
        caches = (
            RadixCache(workload.num_blocks, BLOCK_SIZE),
            RadixCache(workload.num_blocks, BLOCK_SIZE, persistence=directory),
        )
        streams = tee(workload.prompts(seed))
        for cache, prompts in zip(caches, streams, strict=True):
            run_lifecycles(cache, prompts, workload.fill)
        gc.freeze()
        evicted = caches[1].stats().evicted_blocks
        committed = caches[1].stats().committed_blocks
        turns = []
        for _ in range(TURNS):
            turns.append(
                [run_lifecycles(c, p, workload.requests // TURNS) for c, p in zip(caches, streams, strict=True)]
            )
        gc.unfreeze()
        requests = workload.requests // TURNS * TURNS
        stats = caches[1].stats()
        caches[1].check()
        directory.check()
    without, with_directory = (statistics.median(column) for column in zip(*turns, strict=True))
    return {
        "without_us": without,
        "with_us": with_directory,
        "ratio": statistics.median(b / a for a, b in turns),
        "extra_us_per_committed_block": (with_directory - without) * requests / (stats.committed_blocks - committed),
        "evicted_blocks_per_request": (stats.evicted_blocks - evicted) / requests,
    }


def measure_run(length: int, seed: int, folder: str | None) -> Row:
    """Measure the directory's own calls for a run of `length` blocks scattered over 65,536."""
    rng = np.random.default_rng(seed)
    num_blocks = 65_536
    blocks = rng.permutation(num_blocks).astype("<i4")
    times: dict[str, list[int]] = {"handed_out": [], "stored": [], "touched": [], "returned": []}
    clock = time.perf_counter_ns
    with opened(folder, num_blocks) as directory:
        for start in range(0, num_blocks - length, length):
            ids = blocks[start : start + length].tobytes()
            tokens = rng.integers(0, VOCABULARY, length * BLOCK_SIZE, dtype="<u4").tobytes()
            t0 = clock()
            directory.handed_out(ids)
            t1 = clock()
            directory.prepare(DEFAULT_NAMESPACE)
            directory.stored(ids, tokens, parent=-1, position=0, namespace=DEFAULT_NAMESPACE, last_use=start)
            t2 = clock()
            directory.touched(int(blocks[start]), start)
            t3 = clock()
            directory.returned(ids)
            t4 = clock()
            for name, spent in zip(times, (t1 - t0, t2 - t1, t3 - t2, t4 - t3), strict=True):
                times[name].append(spent)
    row: Row = {f"{name}_us": statistics.median(values) / 1e3 for name, values in times.items()}
    return row | {"stored_us_per_block": statistics.median(times["stored"]) / 1e3 / length}


def fill(directory: BlockDirectory, shape: str, seed: int, num_blocks: int) -> None:
    """Put `num_blocks` committed blocks into the directory, in trees of the shape."""
    if shape == "workload large":
        cache = RadixCache(num_blocks, BLOCK_SIZE, persistence=directory)
        large = WORKLOADS["large"]
        run_lifecycles(cache, large.prompts(seed), large.fill * num_blocks // large.num_blocks)
        return
    rng = np.random.default_rng(seed)
    blocks: npt.NDArray[np.int64] = rng.permutation(num_blocks)
    length = int(shape.split()[2]) if shape.startswith("runs") else 1
    directory.prepare(DEFAULT_NAMESPACE)
    for start in range(0, num_blocks, length):
        run = blocks[start : start + length]
        parent, position, last_use = hung_on(shape, start, rng)
        tokens = rng.integers(0, VOCABULARY, run.size * BLOCK_SIZE, dtype="<u4").tobytes()
        directory.handed_out(run)
        directory.stored(
            run,
            tokens,
            parent=int(blocks[parent]) if parent >= 0 else -1,
            position=position,
            namespace=DEFAULT_NAMESPACE,
            last_use=last_use,
        )


def hung_on(shape: str, index: int, rng: np.random.Generator) -> tuple[int, int, int]:
    """Return parent (index of a block, or -1), position and last use of the run that begins with block `index`."""
    if shape == "a fork at every block":
        return (index + 1) // 2 - 1, (index + 1).bit_length() - 1, int(rng.integers(1, 1 << 30))
    if shape.startswith("paths"):  # read to a different depth each time, so that no two blocks have one last use
        position = index % 1_000
        return index - 1 if position else -1, position, (1 << 30) - index
    return (-1, 0, 1) if index == 0 else (0, 1, int(rng.integers(1, 1 << 30)))


def measure_recovery(shape: str, seed: int, folder: str | None, num_blocks: int) -> Row:
    """Measure the CPU time of each step of a recovery of `num_blocks` blocks, scaled to a million."""
    path = Path(tempfile.mkdtemp(prefix="radixpool-bench-", dir=folder)) / "directory"
    try:
        directory = BlockDirectory.open(path, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        fill(directory, shape, seed, num_blocks)
        directory.close()
        gc.collect()
        marks = [time.thread_time()]
        directory = BlockDirectory.open(path, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        scan = directory.scan()
        marks.append(time.thread_time())
        plan = plan_restore(scan.loose)
        marks.append(time.thread_time())
        cache = RadixCache(num_blocks, BLOCK_SIZE, persistence=directory)
        with collector_paused():
            restore_blocks(cache, plan, namespaces=scan.namespaces(), media=scan.keys, quarantined=scan.private)
        marks.append(time.thread_time())
        slices = list(lift_in_slices(cache))
        restored = cache.stats().tree_blocks
        directory.close()
    finally:
        gc.unfreeze()
        shutil.rmtree(path.parent)
    steps = np.diff(marks) * 1e6 / restored
    row: Row = {name: float(step) for name, step in zip(("scan_s", "plan_s", "build_s"), steps, strict=True)}
    return row | {
        "total_s_per_million": float(steps.sum()),
        "unfence_s_per_million": sum(slices) * 1e6 / restored,
        "longest_slice_ms": max(slices) * 1e3,
        "runs": plan.num_runs,
        "restored_blocks": restored,
    }


def lift_in_slices(cache: RadixCache) -> Iterator[float]:
    """Lift the fence of the former life; yield the seconds that each slice takes."""
    more = True
    while more:
        start = time.thread_time()
        more = lift_fence(cache)
        yield time.thread_time() - start


@click.command(help=__doc__)
@click.option("--folder", type=click.Path(exists=True, file_okay=False), help="Where the files lie.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Fresh directories per case.")
@click.option("--recovery-blocks", default=1_000_000, show_default=True, type=click.IntRange(16_384), help="Pool size.")
@click.option(
    "--only", multiple=True, type=click.Choice(("lifecycle", "calls", "recovery")), help="Only these questions."
)
@click.option("--seed", default=100, show_default=True, help="Seed of the first repeat.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write all rows as JSON.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False), help="Write all rows as CSV.")
def main(
    folder: str | None,
    repeats: int,
    recovery_blocks: int,
    only: tuple[str, ...],
    seed: int,
    json_file: str | None,
    csv_file: str | None,
) -> None:
    """Run the benchmark."""
    if folder is None and Path("/dev/shm").is_dir():
        folder = "/dev/shm"
    cases: list[tuple[str, object, Callable[[int], Row]]] = []
    for name in ("shared", "random", "chat"):
        cases.append(("lifecycle", name, partial(measure_lifecycles, WORKLOADS[name], folder=folder)))
    for length in RUN_LENGTHS:
        cases.append(("calls for a run of blocks", length, partial(measure_run, length, folder=folder)))
    for shape in SHAPES:
        measure = partial(measure_recovery, shape, folder=folder, num_blocks=recovery_blocks)
        cases.append(("recovery", shape, measure))
    cases = [case for case in cases if not only or case[0].split()[0] in only]
    rows: list[Row] = []
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=len(cases) * repeats)
        for question, case, measure in cases:
            results = []
            for repeat in range(repeats):
                progress.update(task, description=f"{question}: {case}")
                results.append(measure(seed + repeat))
                progress.advance(task)
            rows += summarise(question, case, results)
    show(rows)
    if json_file:
        Path(json_file).write_text(json.dumps(rows, indent=1) + "\n")
    if csv_file:
        with Path(csv_file).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
