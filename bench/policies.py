"""Compare every eviction policy on the four default traces, and measure how fast each replays.

`make bench-policies` runs this. It writes results.csv, results.json, mrc.png, over_time.png, report.html and speed.csv
to out/policies; with --docs it also renews the tables and plots of docs/policies.md. Traces come from ../shared/traces
(or RADIXPOOL_SHARED) and are not part of the project.

Speed is measured in CPU time and apart from the grid: policies alternate within each round; the median and the range
of the rounds are reported.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.progress import track

from radixpool.rpc.bench import files, grid, plots, report, tables
from radixpool.rpc.bench.readers import read_trace
from radixpool.rpc.bench.replay import replay
from radixpool.rpc.bench.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("RADIXPOOL_SHARED", ROOT.parent / "shared"))
TRACES = ("mooncake_conversation_trace", "mooncake_synthetic_trace", "cc_64conv", "tau_airline")
SPEED_CAPACITY = 20_000


def main() -> None:
    options = arguments().parse_args()
    console = Console(stderr=True)
    paths = [SHARED / "traces" / f"{name}.jsonl.xz" for name in TRACES]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        sys.exit(f"no trace at {', '.join(missing)}; set RADIXPOOL_SHARED to the folder that has traces/")
    traces = [read_trace(str(path)) for path in paths]
    options.out.mkdir(parents=True, exist_ok=True)
    speed = measure_speed(traces[0], options.rounds, console)
    write_speed(options.out / "speed.csv", speed)
    results = run_grid(traces, options, console)
    tables.print_results(Console(), results)
    print_speed(speed)
    if options.docs:
        renew_docs(results, speed)
        console.print("renewed docs/policies.md and docs/images/policies_*.png")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "policies")
    parser.add_argument("--jobs", type=int, default=2, help="processes of the grid (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the speed measurement (default 5)")
    parser.add_argument("--docs", action="store_true", help="renew docs/policies.md with the results")
    return parser


def run_grid(traces: list[Trace], options: argparse.Namespace, console: Console) -> list[grid.TraceResult]:
    chosen = grid.GridOptions(jobs=options.jobs)
    with console.status("replaying") as status:
        results = grid.run_grid(traces, chosen, progress=lambda done, total: status.update(f"replayed {done}/{total}"))
    files.write_csv(options.out / "results.csv", results)
    files.write_json(options.out / "results.json", results, chosen)
    plots.save(plots.plot_curves(results), options.out / "mrc.png")
    plots.save(plots.plot_over_time(results), options.out / "over_time.png")
    (options.out / "report.html").write_text(report.render_report(results, chosen))
    return results


def measure_speed(trace: Trace, rounds: int, console: Console) -> dict[str, list[float]]:
    """Return block references a second of each policy in each round, one process, policies alternating."""
    speed: dict[str, list[float]] = {policy: [] for policy in grid.DEFAULT_POLICIES}
    for _ in track(range(rounds), "measuring speed", console=console, transient=True):
        for policy, figures in speed.items():
            figures.append(trace.num_refs / replay(trace, policy, SPEED_CAPACITY).seconds)
    return speed


def write_speed(path: Path, speed: dict[str, list[float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["policy", "capacity_blocks", "refs_per_s_median", "refs_per_s_min", "refs_per_s_max", "rounds"]
        )
        for policy, figures in speed.items():
            ends = statistics.median(figures), min(figures), max(figures)
            writer.writerow([policy, SPEED_CAPACITY, *(round(value) for value in ends), len(figures)])


def print_speed(speed: dict[str, list[float]]) -> None:
    print(f"block references/s, {TRACES[0]}, {SPEED_CAPACITY:,} blocks, one core: median (min to max)")
    for policy, figures in speed.items():
        print(f"  {policy:12s} {statistics.median(figures):>12,.0f} ({min(figures):,.0f} to {max(figures):,.0f})")


def renew_docs(results: list[grid.TraceResult], speed: dict[str, list[float]]) -> None:
    """Write tables between the markers of docs/policies.md and the plots beside it."""
    page, images = ROOT / "docs" / "policies.md", ROOT / "docs" / "images"
    images.mkdir(exist_ok=True)
    for name, figure in (("mrc", plots.plot_curves(results)), ("over_time", plots.plot_over_time(results))):
        path = images / f"policies_{name}.png"
        plots.save(figure, path, dpi=100)
        with Image.open(path) as image:
            image.convert("RGB").quantize(64).save(path, optimize=True)  # lines need few colours: a fifth of the size
    text = page.read_text()
    for name, table in (("hits", hit_tables(results)), ("speed", speed_table(speed))):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    page.write_text(text)


def hit_tables(results: list[grid.TraceResult]) -> str:
    """Return one Markdown table a trace: policies by capacity, the best of each column in bold."""
    parts = []
    for result in results:
        facts = result.facts
        capacities = sorted({row.capacity_blocks for row in result.rows})
        cells = {(row.policy, row.capacity_blocks): row for row in result.rows}
        best = tables.best_hits(result.rows)
        lines = [
            f"**{result.trace.name}**: {facts.num_requests:,} requests, {facts.num_refs:,} block references, "
            f"{facts.num_nodes:,} distinct blocks of {result.trace.block_size} tokens; the optimum's working set is "
            f"{facts.opt_working_set_blocks:,} blocks.",
            "",
            "| policy | " + " | ".join(f"{capacity:,}" for capacity in capacities) + " |",
            "| --- |" + " ---: |" * len(capacities),
        ]
        for name in tables.ranked(result.rows):
            rows = [cells[name, capacity] for capacity in capacities]
            shown = [
                f"**{row.hit_ratio:.4f}**"
                if row.kind == "policy" and row.hits == best[row.capacity_blocks]
                else f"{row.hit_ratio:.4f}"
                for row in rows
            ]
            label = name if rows[0].kind == "policy" else f"*{name}*"
            lines.append(f"| {label} | " + " | ".join(shown) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def speed_table(speed: dict[str, list[float]]) -> str:
    lines = ["| policy | block references/s, median | range |", "| --- | ---: | ---: |"]
    for policy, figures in speed.items():
        span = f"{min(figures):,.0f} to {max(figures):,.0f}"
        lines.append(f"| {policy} | {statistics.median(figures):,.0f} | {span} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
