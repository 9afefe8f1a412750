"""How fast is the wire? Calls a second and latency, unary, streamed and batched, over a unix socket and TCP.

    python bench/rpc.py                         all of it, with a directory, one core each
    python bench/rpc.py --rounds 300 --large 0  a quick look, without the tree of a million blocks

Manager and client are processes of their own, each pinned to a core. `per core` is what one core of the manager could
serve: units of work over the CPU time that the manager spent on them, so that other load on the machine counts little;
the latencies are wall time and do suffer from it. A lifecycle is acquire + commit + release of a 4,096-token prompt,
of which 3,584 are one of 64 shared beginnings; "commit with release" says both ends in one operation. A decode step
appends a token to each sequence and commits those that fill a block: as single operations, and in columns
(`Session.step`). Every load runs several times: the median, lowest and highest are told.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import rpc_load as load
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from radixpool.rpc.client import Client, ClientOptions, ClientRole

STEP_SIZES = (1, 32, 256)
BATCH_SIZES = (16, 64)
SMALL_POOL_BLOCKS = 65_536


@dataclass(frozen=True, slots=True)
class Row:
    """One load. `unit` is what `per_s` and `per_core` count; the percentiles are of one message.

    All are medians of the runs; `lowest_per_core` and `highest_per_core` are of single runs.
    """

    transport: str
    tree: str
    load: str
    unit: str
    per_s: float
    per_core: float
    lowest_per_core: float
    highest_per_core: float
    p50_ms: float
    p99_ms: float


class Bench:
    """Measures one manager."""

    def __init__(self, manager: load.Manager, transport: str, tree: str, *, repeats: int) -> None:
        self._manager = manager
        self._transport = transport
        self._tree = tree
        self._repeats = repeats
        self.rows: list[Row] = []

    def measure(self, name: str, unit: str, units: int, run: Callable[[], list[float]]) -> None:
        """Run a load that does `units` of work as often as asked, and keep its row."""
        runs = [self._run(units, run) for _ in range(self._repeats)]
        per_s, per_core, p50, p99 = (statistics.median(column) for column in zip(*runs, strict=True))
        low, high = min(run[1] for run in runs), max(run[1] for run in runs)
        self.rows.append(Row(self._transport, self._tree, name, unit, per_s, per_core, low, high, p50, p99))

    def _run(self, units: int, run: Callable[[], list[float]]) -> tuple[float, float, float, float]:
        cpu, start = self._manager.cpu_s(), time.perf_counter()
        took = run()
        wall, cpu = time.perf_counter() - start, self._manager.cpu_s() - cpu
        cuts = statistics.quantiles(took, n=100, method="inclusive")
        return units / wall, units / cpu, 1e3 * cuts[49], 1e3 * cuts[98]


def measure_manager(bench: Bench, address: str, rounds: int) -> None:
    """Put every load on one manager."""
    source = load.prompts()
    with Client(address, options=ClientOptions(role=ClientRole.WORKER)) as client, client.session() as session:
        load.batched_lifecycles(session, source, load.WARM_UP_LIFECYCLES, size=16)
        bench.measure("unary", "lifecycles", rounds, lambda: load.unary_lifecycles(client, source, rounds))
        short = lambda: load.short_unary_lifecycles(client, source, rounds)  # noqa: E731
        bench.measure("unary, commit with release", "lifecycles", rounds, short)
        bench.measure("session", "lifecycles", rounds, lambda: load.session_lifecycles(session, source, rounds))
        for size in BATCH_SIZES:
            count = 4 * rounds // size * size
            run = lambda count=count, size=size: load.batched_lifecycles(session, source, count, size=size)  # noqa: E731
            bench.measure(f"session, batches of {size}", "lifecycles", count, run)
        count = 4 * rounds // 16 * 16
        calls_of_16 = lambda: load.batched_lifecycles(client, source, count, size=16)  # noqa: E731
        bench.measure("Batch calls of 16", "lifecycles", count, calls_of_16)
        ends = load.commit_with_release
        short_calls = lambda: load.batched_lifecycles(client, source, count, size=16, ends=ends)  # noqa: E731
        bench.measure("Batch calls of 16, commit with release", "lifecycles", count, short_calls)
    for outstanding in (1, 64):
        calls = lambda n=outstanding: asyncio.run(load.outstanding_calls(address, source, rounds, outstanding=n))  # noqa: E731
        bench.measure(f"asyncio, {outstanding} outstanding", "lifecycles", rounds, calls)
    for size in STEP_SIZES:
        for form in ("operations", "columns"):
            with Client(address, options=ClientOptions(role=ClientRole.WORKER)) as client, client.session() as session:
                steps = getattr(load.DecodeLoad(session, source, size), form)
                bench.measure(f"decode step of {size}, {form}", "steps", rounds, lambda steps=steps: steps(rounds))


def show(rows: list[Row], console: Console) -> None:
    """Print the table."""
    table = Table(title="the wire: 4,096-token requests, manager and client on one core each")
    for column in ("transport", "tree", "load", "unit", "per s", "per core", "(from - to)", "p50 ms", "p99 ms"):
        table.add_column(column, justify="left" if column in ("transport", "tree", "load", "unit") else "right")
    for row in rows:
        spread = f"{row.lowest_per_core:,.0f} - {row.highest_per_core:,.0f}"
        figures = (f"{row.per_s:,.0f}", f"{row.per_core:,.0f}", spread, f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}")
        table.add_row(row.transport, row.tree, row.load, row.unit, *figures)
    console.print(table)


@click.command(help=__doc__)
@click.option("--rounds", default=600, show_default=True, help="Lifecycles or steps of each run.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each load.")
@click.option("--large", default=1_000_000, show_default=True, help="Blocks of the large tree; 0 leaves it out.")
@click.option("--no-directory", is_flag=True, help="Without the block directory.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the rows here too.")
def main(rounds: int, repeats: int, large: int, no_directory: bool, json_path: Path | None) -> None:
    """Run the benchmark."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1] if len(cores) > 1 else None  # the first one often has the machine's interrupts as well
    rows: list[Row] = []
    trees = [("empty", SMALL_POOL_BLOCKS, 0)] + ([(f"{large:,} blocks", large, large)] if large else [])
    with tempfile.TemporaryDirectory(prefix="rpbench") as folder, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=2 * len(trees))
        for tree, num_blocks, filled in trees:
            for transport, listen in (("unix", f"unix:{folder}/m.sock"), ("tcp", "127.0.0.1:0")):
                progress.update(task, description=f"{transport}, {tree}")
                directory = None if no_directory else Path(folder) / f"{transport}-{filled}"
                with load.running(listen, num_blocks, directory=directory, core=core) as manager:
                    if core is not None:
                        os.sched_setaffinity(0, set(cores[:-1]))
                    with Client(manager.address) as client:
                        load.fill(client, filled)
                    bench = Bench(manager, transport, tree, repeats=repeats)
                    measure_manager(bench, manager.address, rounds)
                    rows += bench.rows
                progress.advance(task)
    show(rows, load.wide_console())
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
