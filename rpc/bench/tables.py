"""Print results as tables for people: one table a trace and, in it, one line a policy and one column a capacity."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixpool.rpc.bench.grid import TraceResult
from radixpool.rpc.bench.metrics import Row


def print_results(console: Console, results: list[TraceResult]) -> None:
    """Print each trace's facts, hit ratios, detail at the middle capacity, and warnings."""
    for result in results:
        console.print(_facts_line(result), highlight=False)
        console.print(_hit_ratios(result))
        console.print(_details(result))
        for warning in result.warnings:
            console.print("[yellow]warning:[/]", escape(warning), highlight=False)
        console.print()


def _facts_line(result: TraceResult) -> str:
    facts = result.facts
    return (
        f"[bold]{escape(result.trace.name)}[/]: {facts.num_requests:,} requests, {facts.num_refs:,} block references, "
        f"{facts.num_nodes:,} distinct blocks of {result.trace.block_size} tokens; largest request "
        f"{facts.largest_request_blocks:,}, live set {facts.live_set_blocks:,}, optimum's working set "
        f"{facts.opt_working_set_blocks:,} blocks"
    )


def ranked(rows: list[Row]) -> list[str]:
    """Return the policies and references by mean hit ratio over the capacities, best first; optima lead ties."""
    total: dict[str, float] = {}
    for row in rows:
        total[row.policy] = total.get(row.policy, 0.0) + row.hit_ratio
    return sorted(total, key=lambda name: (-total[name], not name.startswith("opt"), name))


def telling_capacity(rows: list[Row]) -> int:
    """Return the capacity at which LRU and the optimum are farthest apart, else the middle one."""
    capacities = sorted({row.capacity_blocks for row in rows})
    hits = {(row.policy, row.capacity_blocks): row.hits for row in rows}
    gaps = {c: hits["opt", c] - hits["lru", c] for c in capacities if ("opt", c) in hits and ("lru", c) in hits}
    return max(gaps, key=gaps.__getitem__) if gaps else capacities[len(capacities) // 2]


def best_hits(rows: list[Row]) -> dict[int, int]:
    """Return the most hits of any policy at each capacity."""
    best: dict[int, int] = {}
    for row in rows:
        if row.kind == "policy":
            best[row.capacity_blocks] = max(best.get(row.capacity_blocks, 0), row.hits)
    return best


def _hit_ratios(result: TraceResult) -> Table:
    capacities = sorted({row.capacity_blocks for row in result.rows})
    cells = {(row.policy, row.capacity_blocks): row for row in result.rows}
    best = best_hits(result.rows)
    table = Table(title="block hit ratio by capacity in blocks", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("policy", no_wrap=True)
    for capacity in capacities:
        table.add_column(f"{capacity:,}", justify="right", no_wrap=True)
    for name in ranked(result.rows):
        line = [cells[name, capacity] for capacity in capacities]
        table.add_row(name, *(_ratio(row, best) for row in line), style="" if line[0].kind == "policy" else "dim")
    return table


def _ratio(row: Row, best: dict[int, int]) -> str:
    text = f"{row.hit_ratio:.4f}"
    return f"[bold]{text}[/]" if row.kind == "policy" and row.hits == best[row.capacity_blocks] else text


def _details(result: TraceResult) -> Table:
    """Everything else at one capacity; hit ratios in percent, so that it fits 80 columns."""
    capacity = telling_capacity(result.rows)
    title = f"at {capacity:,} blocks: % hit, % of the LRU to OPT gap, TTFT p50/p90/p99 in ms"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for column in ("blocks", "tokens", "FLOPs", "gap", "=LRU at", "TTFT", "refs/s"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = {row.policy: row for row in result.rows if row.capacity_blocks == capacity}
    for name in ranked(list(rows.values())):
        row = rows[name]
        table.add_row(
            name,
            *(f"{value:.1%}"[:-1] for value in _ratios(row)),
            "" if row.gap_closed is None else f"{row.gap_closed:.0%}"[:-1],
            _count(row.equal_lru_capacity_blocks),
            f"{row.ttft_ms_p50:.0f}/{row.ttft_ms_p90:.0f}/{row.ttft_ms_p99:.0f}",
            "" if row.refs_per_s is None else f"{row.refs_per_s / 1e6:.1f}M",
            style="" if row.kind == "policy" else "dim",
        )
    return table


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _ratios(row: Row) -> tuple[float, float, float]:
    return row.hit_ratio, row.token_hit_ratio, row.flops_hit_ratio
