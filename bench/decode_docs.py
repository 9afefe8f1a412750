"""Make the documentation of a run of decode.py: data, plot and the tables of docs/performance-kernels.md."""

from __future__ import annotations

import argparse
import csv
import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
LABELS = {
    "radixpool_no_sharing": "radixpool, plan without sharing",
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "fi_cascade": "FlashInfer cascade",
    "vllm_triton": "vLLM Triton",
    "sglang_triton": "SGLang Triton",
}
BOTH = ("fa3", "flashinfer")
# What each case should reach, and against the better of whom (0: no goal was set).
PLAIN_GOALS = [
    *((f"8/1 B={b} 4k", BOTH, 1.1 if b <= 64 else 1.0) for b in (1, 16, 64, 256)),
    *((f"32/8 B={b} 4k", BOTH, 1.0) for b in (1, 16, 64)), ("32/8 B=1 64k", BOTH, 1.0),
    *((f"fp8 {h} B=64 4k", *g) for h in ("8/1", "32/8") for g in ((("fa3",), 1.4), (("flashinfer",), 1.5))),
    *((f"32/8 B=64 4k block {b}", BOTH, 1.0) for b in (8, 32, 64)),
    *((name, BOTH, 1.0) for name in ("8/1 B=256 1k", "32/8 B=256 1k", "32/8 B=8 32k", "32/8 B=64 ragged 64..16k")),
]  # fmt: skip
# What sharing should reach against FlashAttention-3 and against the best peer.
SHARED_GOALS = {
    "32/8 B=64 sharing 4k + 256": (4, 3), "32/8 B=64 sharing 16k + 256": (8, 5), "32/8 B=64 8 x 4k + 256": (2.5, 0),
    "32/8 B=256 tree 2k, 8 x 2k, 64 x 1k + 128": (4, 0), "32/8 B=64 binary tree 6 x 512 + 128": (0, 0),
    "32/8 B=128 16 roots x 1k, 64 x 512 + 256": (0, 0), "8/1 B=64 sharing 4k + 256": (0, 0),
}  # fmt: skip
PEERS = ("fa3", "flashinfer", "fi_cascade", "vllm_triton", "sglang_triton", "torch")
TRITON = ("vllm_triton", "sglang_triton")
Times = dict[str, dict[str, float]]


def load(path: Path) -> dict[str, Times]:
    """Return case -> implementation -> column -> number of a decode.csv; what failed has NaN."""
    cases: dict[str, Times] = {}
    with path.open(newline="") as f:
        for row in csv.DictReader(f):
            numbers = {k: float(v) for k, v in row.items() if k not in ("case", "name", "failed")}
            cases.setdefault(row["case"], {})[row["name"]] = numbers
    return cases


def time_of(times: Times, name: str, column: str) -> float:
    return times.get(name, {}).get(column, math.nan)


def best(times: Times, column: str, names: Iterable[str] = PEERS) -> float:
    """Return the least time of the peers in one column."""
    return min((t for n in names if not math.isnan(t := time_of(times, n, column))), default=math.nan)


def cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def with_range(times: Times) -> str:
    """Return our eager median, and the slowest round where the rounds differ by more than 5 %."""
    ours = times["radixpool"]
    spread = ours["eager_high_us"] > 1.05 * ours["eager_us"]
    return f"{ours['eager_us']:.1f}" + (f" (to {ours['eager_high_us']:.1f})" if spread else "")


def verdict(goal: float, ratios: Iterable[float]) -> str:
    """Return what was aimed at and whether the eager call and the replayed graph reach it."""
    if not goal:
        return ""
    eager, graph = (r >= goal for r in ratios)
    met = {(True, True): "met", (False, False): "missed", (True, False): "eager only", (False, True): "graph only"}
    return f"{goal:g}: {met[eager, graph]}"


def ratio_cells(times: Times, goal: float, peers: Iterable[str]) -> tuple[str, str, str]:
    """Return eager / graph ratios against the best of `peers`, the same with a clean L2, and the verdict."""
    peers = tuple(peers)
    eager, graph, clean = (
        best(times, c, peers) / time_of(times, "radixpool", c) for c in ("eager_us", "graph_us", "clean_us")
    )
    return f"{eager:.2f} / {graph:.2f}", f"{clean:.2f}", verdict(goal, (eager, graph))


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.count("|") - 1
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + " --- |" * columns, *lines])


def plain_table(cases: dict[str, Times]) -> str:
    head = (
        "| case (query / KV heads) | read | radixpool eager | graph | FA3 eager | graph | FlashInfer 0.5.3 eager "
        "| graph | against the better, eager / graph | clean L2 | goal |"
    )
    rows = []
    for case, peers, goal in PLAIN_GOALS:
        if case not in cases:
            continue
        t = cases[case]
        ratio, clean, met = ratio_cells(t, goal, peers)
        pairs = [cell(time_of(t, n, c)) for n in BOTH for c in ("eager_us", "graph_us")]
        name = case if peers == BOTH else f"{case}, against {LABELS[peers[0]]}"
        read = cell(time_of(t, "plain_read", "graph_us"))
        rows.append([name, read, with_range(t), cell(t["radixpool"]["graph_us"]), *pairs, ratio, clean, met])
    return table(head, rows)


def shared_table(cases: dict[str, Times]) -> str:
    head = (
        "| case | read | radixpool eager | graph | FA3 | FlashInfer | its cascade | against FA3, eager / graph | goal "
        "| against the best | goal | clean L2, against FA3 | against the best |"
    )
    rows = []
    for case, (over_fa3, over_best) in SHARED_GOALS.items():
        if case not in cases:
            continue
        t = cases[case]
        fa3, fa3_clean, fa3_met = ratio_cells(t, over_fa3, ("fa3",))
        peer, peer_clean, peer_met = ratio_cells(t, over_best, PEERS)
        times = [cell(time_of(t, n, "eager_us")) for n in ("fa3", "flashinfer", "fi_cascade")]
        read = cell(time_of(t, "plain_read", "graph_us"))
        ours = [with_range(t), cell(t["radixpool"]["graph_us"])]
        rows.append([case, read, *ours, *times, fa3, fa3_met, peer, peer_met, fa3_clean, peer_clean])
    return table(head, rows)


def host_table(cases: dict[str, Times]) -> str:
    """Microseconds of CPU of one call, on the first case of each kind of launch."""
    names = ("radixpool", "fa3", "flashinfer")
    rows = [
        [case, *(cell(time_of(cases[case], n, "host_us")) for n in names)]
        for case in ("8/1 B=1 4k", "32/8 B=64 4k", "32/8 B=64 sharing 4k + 256")
        if case in cases
    ]
    return table("| CPU of one call, µs | radixpool | FA3 | FlashInfer |", rows)


def span(values: Iterable[float], form: str) -> str:
    """Return the least and the greatest of the numbers there are, as `low to high`."""
    known = [v for v in values if not math.isnan(v)]
    return f"{min(known):{form}} to {max(known):{form}}" if known else "-"


def notes(cases: dict[str, Times]) -> str:
    """Return what the tables leave out: the price of looking for sharing, the Triton peers, errors."""
    alone = [t for c, t in cases.items() if c not in SHARED_GOALS]
    plans = span(
        (time_of(t, "radixpool", "eager_us") / time_of(t, "radixpool_no_sharing", "eager_us") for t in alone), ".2f"
    )
    lines = [
        f"On batches that share nothing, the plan with sharing takes {plans} of the time of the plan without (goal: at "
        "most 1.02): it is the same plan."
    ]
    triton = [time_of(t, n, "eager_us") / time_of(t, "radixpool", "eager_us") for t in cases.values() for n in TRITON]
    if any(not math.isnan(ratio) for ratio in triton):
        lines.append(f"vLLM's and SGLang's Triton kernels take {span(triton, '.1f')} times as long as ours.")
    for kind, quantised in (("bf16", False), ("fp8 KV", True)):
        group = [t for c, t in cases.items() if c.startswith("fp8") == quantised]
        named = (("ours", "radixpool"), ("FA3", "fa3"), ("FlashInfer", "flashinfer"))
        errors = [f"{label} {span((time_of(t, name, 'error') for t in group), '.1e')}" for label, name in named]
        lines.append(f"Relative errors against float64, {kind}: " + ", ".join(errors) + ".")
    return "\n".join(lines)


def replace_between(text: str, name: str, block: str, *, script: str = "decode_docs.py") -> str:
    """Return `text` with what stands between the marks of `name`, made by `script`, replaced."""
    begin, end = f"<!-- {name}: made by bench/{script} -->\n", f"\n<!-- end of {name} -->"
    before, rest = text.split(begin, 1)
    return before + begin + "\n" + block + "\n" + end + rest.split(end, 1)[1]


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Plot eager time relative to ours: a row per case, a mark per implementation (ratios have no zero to start at)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(r["case"] for r in results))
    ours = {r["case"]: r["eager_us"] for r in results if r["name"] == "radixpool"}
    figure, axes = plt.subplots(figsize=(10, 0.3 * len(cases) + 1.6))
    for name, marker in zip(LABELS, "|os^vD", strict=True):
        timed = [r for r in results if r["name"] == name and r["eager_us"] > 0]
        points = [(r["eager_us"] / ours[r["case"]], cases.index(r["case"])) for r in timed]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, s=42, label=LABELS[name], zorder=3)
    axes.axvline(1, color="black", linewidth=1.5, label="radixpool")
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.set_xlabel("time relative to radixpool (right of the line: slower)")
    axes.set_xscale("log")
    ticks = [0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.07), ncols=4, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out"), help="holds decode.csv and decode.json")
    parser.add_argument("commit", nargs="?", default="", help="what was measured")
    options = parser.parse_args()
    folder, commit = options.folder, f"; measured at commit {options.commit}" if options.commit else ""
    cases = load(folder / "decode.csv")
    meta = json.loads((folder / "decode.json").read_text())["meta"]
    page, data, image = DOCS / "performance-kernels.md", DOCS / "data" / "decode.csv", DOCS / "images" / "decode.png"
    text = page.read_text()
    blocks = {
        "machine": f"Measured read bandwidth: {meta['read_bandwidth_tb_s']:.2f} TB/s; torch {meta['torch']}{commit}.",
        "plain": plain_table(cases),
        "shared": shared_table(cases),
        "host": host_table(cases),
        "notes": notes(cases),
    }
    for name, block in blocks.items():
        text = replace_between(text, name, block)
    page.write_text(text)
    shutil.copy(folder / "decode.csv", data)
    plot([{"case": c, "name": n, **t} for c, times in cases.items() for n, t in times.items()], image)
    print(f"wrote {page}, {data}, {image}")


if __name__ == "__main__":
    main()
