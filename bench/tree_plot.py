"""Draw the figures of the tree benchmark."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]
LINES = {
    "blocks in the cache": ("hit_us", "evict_one_us", "evict_us_per_block"),
    "one-block runs on the path": ("acquire_us", "commit_us", "release_us"),
    "tokens hit in one run": ("acquire_us", "commit_us", "release_us"),
}


def _series(rows: list[Row], question: str, figure: str) -> dict[str, list[Row]]:
    """Return the rows of one figure by engine."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["question"] == question and row["figure"] == figure:
            found.setdefault(row["engine"], []).append(row)
    return found


def _bars(axes: Any, rows: list[Row], question: str) -> None:
    series = _series(rows, question, "lifecycles_per_s")
    cases = list(dict.fromkeys(row["case"] for own in series.values() for row in own))
    width = 0.8 / max(1, len(series))
    for number, (engine, own) in enumerate(series.items()):
        at = [cases.index(row["case"]) + number * width for row in own]
        errors = [[row["median"] - row["low"] for row in own], [row["high"] - row["median"] for row in own]]
        axes.bar(at, [row["median"] for row in own], width, yerr=errors, label=engine)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(cases))], cases)
    if len(series) > 1:
        axes.set_yscale("log")  # peers are one to two orders of magnitude apart
    axes.set_ylabel("lifecycles per CPU second")
    axes.set_title(question)
    axes.legend(fontsize="small")


def _lines(axes: Any, rows: list[Row], question: str, figures: tuple[str, ...]) -> None:
    for figure in figures:
        for own in _series(rows, question, figure).values():
            axes.plot([row["case"] for row in own], [row["median"] for row in own], marker="o", label=figure)
            axes.fill_between(
                [row["case"] for row in own], [row["low"] for row in own], [row["high"] for row in own], alpha=0.2
            )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(question)
    axes.set_ylabel("µs")
    axes.legend(fontsize="small")


def draw(rows: list[Row], path: str) -> None:
    """Write one picture with a panel per question that was asked."""
    asked = {row["question"] for row in rows}
    panels = [question for question in ("workload", "beside other engines", *LINES) if question in asked]
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 4 * len(panels)), squeeze=False)
    for panel, question in zip(axes[:, 0], panels, strict=True):
        if question in LINES:
            _lines(panel, rows, question, LINES[question])
        else:
            _bars(panel, rows, question)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
