"""Plot hit ratio against capacity and over time, one panel a trace, fit for a slide. Needs matplotlib (extra bench)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixpool.rpc.bench.grid import TraceResult
from radixpool.rpc.bench.metrics import over_time
from radixpool.rpc.bench.tables import ranked, telling_capacity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "lru": "#111111",
    "fifo": "#8c8c8c",
    "random": "#bdbdbd",
    "request": "#d9d9d9",
    "lfu": "#8c564b",
    "lfu-da": "#c49c94",
    "gdsf": "#e377c2",
    "slru": "#2ca02c",
    "2q": "#98df8a",
    "arc": "#17becf",
    "s3fifo": "#d62728",
    "sieve": "#ff7f0e",
    "w-tinylfu": "#9467bd",
    "tail-lru": "#1f77b4",
    "priority": "#aec7e8",
}
_EXTRA_COLOURS = ("#bcbd22", "#7f7f7f", "#393b79", "#637939", "#8c6d31", "#843c39")
_REFERENCE_STYLES: dict[str, dict[str, Any]] = {
    "opt": {"color": "#111111", "linestyle": "--", "linewidth": 2.2},
    "opt-bypass": {"color": "#777777", "linestyle": ":", "linewidth": 1.8},
    "infinite": {"color": "#777777", "linestyle": "-.", "linewidth": 1.0},
    "whole-sequence-lru": {"color": "#777777", "linestyle": (0, (1, 2)), "linewidth": 1.4},
}
_TOP_OVER_TIME = 4


def plot_curves(results: list[TraceResult]) -> Figure:
    """Return the hit ratio against capacity: one line a policy, the optimum dashed, best first in the legend."""
    figure, axes = _panels(len(results))
    for axis, result in zip(axes, results, strict=False):
        for order, name in enumerate(_drawn(result)):
            rows = sorted((r for r in result.rows if r.policy == name), key=lambda r: r.capacity_blocks)
            axis.plot(
                [row.capacity_blocks for row in rows],
                [row.hit_ratio for row in rows],
                label=name,
                **_style(name, order),
            )
        axis.set_xscale("log")
        _capacity_ticks(axis, sorted({row.capacity_blocks for row in result.rows}))
        _finish(axis, result.trace.name, "capacity (blocks)")
    _legend(figure, axes, len(results))
    return figure


def plot_over_time(results: list[TraceResult]) -> Figure:
    """Return the hit ratio over time at the capacity where LRU is farthest from the optimum, best policies only.

    Time begins after the warm-up.
    """
    figure, axes = _panels(len(results))
    for axis, result in zip(axes, results, strict=False):
        capacity = telling_capacity(result.rows)
        runs = {run.policy: run for run in result.runs if run.capacity_blocks == capacity}
        label = "time (minutes)"
        for order, name in enumerate(_leaders(result, capacity)):
            curve = over_time(result.trace, runs[name].hits, first_request=result.first_request)
            label = "time (minutes)" if curve.unit == "minutes" else "requests served"
            axis.plot(curve.ends, curve.hit_ratio, label=name, **_style(name, order, marker=""))
        _finish(axis, f"{result.trace.name}, {capacity:,} blocks", label)
    _legend(figure, axes, len(results))
    return figure


def save(figure: Figure, path: Path, *, dpi: int = 130) -> None:
    """Write the figure as PNG and release it."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    plt.close(figure)


def _drawn(result: TraceResult) -> list[str]:
    """Return what gets a line, best first; no cache, running-only and request-level at zero say nothing as lines."""
    empty = {
        name for name in {r.policy for r in result.rows} if not any(r.hits for r in result.rows if r.policy == name)
    }
    return [name for name in ranked(result.rows) if name not in empty]


def _leaders(result: TraceResult, capacity: int) -> list[str]:
    """Return LRU, the optimum and the best policies that differ from LRU, best first."""
    rows = {row.policy: row for row in result.rows if row.capacity_blocks == capacity}
    base = rows["lru"].hits if "lru" in rows else -1
    best = [name for name in ranked(list(rows.values())) if rows[name].kind == "policy" and rows[name].hits != base]
    chosen = {*best[:_TOP_OVER_TIME], "lru", "opt"}
    return [name for name in ranked(list(rows.values())) if name in chosen]


def _style(name: str, order: int, *, marker: str = "o") -> dict[str, Any]:
    if name in _REFERENCE_STYLES:
        return _REFERENCE_STYLES[name]
    base = name.partition(":")[0]
    colour = _COLOURS.get(name) or _EXTRA_COLOURS[order % len(_EXTRA_COLOURS)]
    width = 2.6 if base == "lru" else 1.5
    return {
        "color": colour,
        "linewidth": width,
        "marker": marker,
        "markersize": 3.5,
        "zorder": 3 if base == "lru" else 2,
    }


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = 1 if count == 1 else 2
    rows = -(-count // columns)
    size = (9.0, 5.4) if count == 1 else (12.5, 4.3 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes


def _capacity_ticks(axis: Axes, capacities: list[int]) -> None:
    axis.set_xticks(capacities, [f"{c / 1000:g}k" if c >= 1000 else str(c) for c in capacities])
    axis.minorticks_off()


def _finish(axis: Axes, title: str, x_label: str) -> None:
    axis.set_title(title, fontsize=12, loc="left")
    axis.set_xlabel(x_label)
    axis.set_ylabel("block hit ratio")
    low, high = axis.get_ylim()
    axis.set_ylim(bottom=0.0 if low < high / 3 else low)
    axis.grid(visible=True, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, axes: list[Axes], count: int) -> None:
    """Put one legend to the right, in the order of the last panel's first appearance, each label once."""
    entries: dict[str, Any] = {}
    for axis in axes[:count]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(list(entries.values()), list(entries), loc="outside right upper", frameon=False, fontsize=10)
