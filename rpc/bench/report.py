"""Write report.html: tables, plots, warnings and how they were made, in one file that needs no network."""

from __future__ import annotations

import base64
import io
from dataclasses import asdict
from importlib import resources
from typing import TYPE_CHECKING

from radixpool._version import __version__
from radixpool.rpc.bench import plots
from radixpool.rpc.bench.grid import GridOptions, TraceResult
from radixpool.rpc.bench.tables import best_hits, ranked

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render_report(results: list[TraceResult], options: GridOptions) -> str:
    """Return the report as HTML. Needs jinja2 and matplotlib (extra bench)."""
    import jinja2

    source = resources.files("radixpool.rpc.bench").joinpath("report.html").read_text()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(
        version=__version__,
        options=options,
        model=asdict(options.model),
        curves=_embed(plots.plot_curves(results)),
        over_time=_embed(plots.plot_over_time(results)),
        traces=[_section(result) for result in results],
    )


def _section(result: TraceResult) -> dict[str, object]:
    capacities = sorted({row.capacity_blocks for row in result.rows})
    cells = {(row.policy, row.capacity_blocks): row for row in result.rows}
    return {
        "trace": result.trace,
        "facts": result.facts,
        "warnings": result.warnings,
        "capacities": capacities,
        "best": best_hits(result.rows),
        "lines": [(name, [cells[name, capacity] for capacity in capacities]) for name in ranked(result.rows)],
    }


def _embed(figure: Figure) -> str:
    import matplotlib.pyplot as plt

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110, metadata={"Software": None})
    plt.close(figure)
    return base64.b64encode(png.getvalue()).decode()
