"""Make the documentation of a run of extend.py: data, plot and the tables of docs/performance-extend.md."""

from __future__ import annotations

import argparse
import csv
import math
import shutil
from pathlib import Path

from decode_docs import replace_between, table
from extend_cases import FP8, SUITES, Case

DOCS = Path(__file__).parents[1] / "docs"
CEILING = "dense matrix product"
LABELS = {
    "radixpool": "radixpool", "radixpool_fp8": "radixpool, fp8 products", "fa3": "FlashAttention-3",
    "flashinfer_fa3": "FlashInfer fa3", "flashinfer_fa2": "FlashInfer fa2", "vllm_triton": "vLLM Triton",
    "sglang_triton": "SGLang Triton", "dense_cudnn": "dense cuDNN", "radixpool_plain": "radixpool, plain Triton",
}  # fmt: skip
PEERS = ("fa3", "flashinfer_fa3", "flashinfer_fa2", "vllm_triton", "sglang_triton", "dense_cudnn")
Row = dict[str, float]
Times = dict[str, Row]


def load(path: Path) -> tuple[dict[str, Times], dict[str, float]]:
    """Return case -> implementation -> column -> number of an extend.csv, and the ceilings in TFLOP/s by dtype."""
    cases: dict[str, Times] = {}
    ceilings: dict[str, float] = {}
    with path.open(newline="") as f:
        for row in csv.DictReader(f):
            numbers = {k: float(v) for k, v in row.items() if k not in ("case", "name", "failed")}
            if row["case"] == CEILING:
                dtype = row["name"].removeprefix("dense_")
                if not math.isnan(numbers["tflops"]):
                    ceilings[dtype] = max(ceilings.get(dtype, 0.0), numbers["tflops"])
            else:
                cases.setdefault(row["case"], {})[row["name"]] = numbers
    return cases, ceilings


def value(times: Times, name: str, column: str) -> float:
    return times.get(name, {}).get(column, math.nan)


def cell(number: float, digits: int = 0) -> str:
    return "-" if math.isnan(number) else f"{number:.{digits}f}"


def speed(times: Times, name: str) -> float:
    """Return how much faster than FlashAttention-3 an implementation was."""
    return value(times, "fa3", "us") / value(times, name, "us")


def case_row(case: Case, times: Times, ceilings: dict[str, float]) -> list[str]:
    us, low, high = (value(times, "radixpool", c) for c in ("us", "low_us", "high_us"))
    tflops = value(times, "radixpool", "tflops")
    plain = value(times, "radixpool_plain", "us") / us
    share = cell(100 * tflops / ceilings.get("bf16", math.nan))
    peers = [cell(value(times, name, "tflops")) for name in PEERS]
    return [
        case.name, f"{us:.0f} ({low:.0f} to {high:.0f})", cell(tflops), f"{share} %" if share != "-" else share,
        f"**{cell(speed(times, 'radixpool'), 2)}**", cell(plain, 2), *peers,
    ]  # fmt: skip


def main_table(cases: dict[str, Times], ceilings: dict[str, float]) -> str:
    """Return the table of the cases with bf16 pools."""
    names = " | ".join(LABELS[name] for name in PEERS)
    ours = "radixpool, µs | TFLOP/s | of the dense product | speed against FA3 | against the plain kernel"
    head = f"| case | {ours} | {names} |"
    known = [c for suite in SUITES.values() for c in suite if c.dtype != FP8 and c.name in cases]
    return table(head, [case_row(c, cases[c.name], ceilings) for c in known])


def fp8_table(cases: dict[str, Times], ceilings: dict[str, float]) -> str:
    """Return the table of the cases with fp8 pools: exact and fp8 products, their errors, the same case in bf16."""
    head = (
        "| case | full: µs | TFLOP/s | error | against FA3 | against a bf16 pool | fp8: µs | TFLOP/s "
        "| of the dense fp8 product | error | against FA3 | against a bf16 pool | FA3: µs | TFLOP/s | error "
        "| FlashInfer fa2: TFLOP/s | vLLM Triton: TFLOP/s |"
    )
    rows = []
    for case in (c for suite in SUITES.values() for c in suite if c.dtype == FP8 and c.name in cases):
        t = cases[case.name]

        def own(name: str, t: Times = t) -> list[str]:
            return [cell(value(t, name, "us")), cell(value(t, name, "tflops"))]

        def error(name: str, t: Times = t) -> str:
            return f"{value(t, name, 'error'):.1e}"

        bf16 = value(cases.get(case.name.removeprefix("fp8 "), {}), "radixpool", "us")
        against_bf16 = {name: cell(bf16 / value(t, name, "us"), 2) for name in ("radixpool", "radixpool_fp8")}
        share = 100 * value(t, "radixpool_fp8", "tflops") / ceilings.get("fp8", math.nan)
        rows.append([
            case.name, *own("radixpool"), error("radixpool"), cell(speed(t, "radixpool"), 2), against_bf16["radixpool"],
            *own("radixpool_fp8"), f"{cell(share)} %", error("radixpool_fp8"),
            f"**{cell(speed(t, 'radixpool_fp8'), 2)}**", against_bf16["radixpool_fp8"], *own("fa3"), error("fa3"),
            *(cell(value(t, name, "tflops")) for name in ("flashinfer_fa2", "vllm_triton")),
        ])  # fmt: skip
    return table(head, rows) if rows else "(no such case in this run)"


def plot(cases: dict[str, Times], ceilings: dict[str, float], path: Path) -> None:
    """Plot TFLOP/s: a row per case, a mark per implementation, the dense products as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(cases)
    figure, axes = plt.subplots(figsize=(10, 0.38 * len(names) + 1.8))
    for name, marker in zip(LABELS, "oP|sD^vx*", strict=True):
        points = [(value(t, name, "tflops"), i) for i, t in enumerate(cases.values())]
        points = [(x, i) for x, i in points if not math.isnan(x)]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, s=48, label=LABELS[name], zorder=3)
    for dtype, tflops in ceilings.items():
        axes.axvline(tflops, color="grey", linewidth=1, linestyle="--")
        axes.text(tflops, -0.9, f"dense {dtype}", ha="center", va="bottom", fontsize="small")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.set_xlim(left=0)
    axes.set_xlabel("TFLOP/s of the visible part (right is faster)")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out"), help="holds extend.csv")
    folder = parser.parse_args().folder
    cases, ceilings = load(folder / "extend.csv")
    page, data, image = DOCS / "performance-extend.md", DOCS / "data" / "extend.csv", DOCS / "images" / "extend.png"
    text = page.read_text()
    dense = ", ".join(f"{cell(tflops)} TFLOP/s in {dtype}" for dtype, tflops in ceilings.items()) or "not timed"
    blocks = {
        "ceiling": f"Dense products of 8192 by 8192 matrices in the same run: {dense}.",
        "cases": main_table(cases, ceilings),
        "fp8": fp8_table(cases, ceilings),
    }
    for name, block in blocks.items():
        text = replace_between(text, name, block, script="extend_docs.py")
    page.write_text(text)
    if (folder / "extend.csv").resolve() != data.resolve():
        shutil.copy(folder / "extend.csv", data)
    plot(cases, ceilings, image)
    print(f"wrote {page}, {data}, {image}")


if __name__ == "__main__":
    main()
