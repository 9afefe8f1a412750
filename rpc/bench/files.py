"""Write results as files: results.csv (one row a run) and results.json (the same, with how they were made)."""

from __future__ import annotations

import csv
import json
import platform
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from radixpool._version import __version__
from radixpool.rpc.bench.grid import GridOptions, TraceResult
from radixpool.rpc.bench.metrics import Row


def to_json(results: list[TraceResult], options: GridOptions) -> list[dict[str, Any]]:
    """Return one flat object a run: its row, the parameters, the seed, the version and the trace's SHA-256. Pure."""
    made_with = {
        "timing": options.timing,
        "warmup": options.warmup,
        "seed": options.seed,
        "prefill_model": asdict(options.model),
        "radixpool_version": __version__,
        "python": platform.python_version(),
    }
    return [
        {
            **asdict(row),
            "block_size": result.trace.block_size,
            "trace_sha256": result.trace.sha256,
            "trace_facts": asdict(result.facts),
            **made_with,
        }
        for result in results
        for row in result.rows
    ]


def write_json(path: Path, results: list[TraceResult], options: GridOptions) -> None:
    """Write results.json: a list of objects, see `to_json`."""
    path.write_text(json.dumps(to_json(results, options), indent=1) + "\n")


def write_csv(path: Path, results: list[TraceResult]) -> None:
    """Write results.csv: a header of `Row`'s fields and one line a run; undefined figures are empty."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for result in results for row in result.rows)
