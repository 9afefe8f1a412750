"""How wrong is live advice, and what does it cost? The sampled shadow against exact replay on the default traces.

Every trace is replayed at full length through `radixpool.radix.advise.Advisor` with its default sample, once looking at
all groups of requests and once at as few as it ever does, and each of its estimates is compared with an exact replay
through the real cache. Prints one line an estimate and, for each trace, the CPU time of a request, the memory, and the
requests a second at which 1 % of a core is used up; writes out/advise/advise.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
import tracemalloc
from pathlib import Path

from radixpool.radix.advise import Advice, Advisor
from radixpool.rpc.bench.readers import read_trace
from radixpool.rpc.bench.replay import replay
from radixpool.rpc.bench.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("RADIXPOOL_SHARED", ROOT.parent / "shared"))
CAPACITIES = {
    "mooncake_conversation_trace": (10_000, 40_000),
    "mooncake_synthetic_trace": (8_000,),
    "cc_64conv": (5_000,),
    "tau_airline": (1_600,),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "advise")
    out = parser.parse_args().out
    missing = [name for name in CAPACITIES if not (SHARED / "traces" / f"{name}.jsonl.xz").is_file()]
    if missing:
        sys.exit(f"no trace {', '.join(missing)} under {SHARED}/traces; set RADIXPOOL_SHARED")
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, capacities in CAPACITIES.items():
        trace = read_trace(str(SHARED / "traces" / f"{name}.jsonl.xz"))
        for capacity in capacities:
            for groups in ("all", "fewest"):
                rows += compare(trace, capacity, groups)
    with (out / "advise.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for groups in ("all", "fewest"):
        errors = [abs(float(row["error"])) for row in rows if row["groups"] == groups]
        mean = sum(errors) / len(errors)
        print(f"{groups} groups: mean error {mean:.4f}, worst {max(errors):.4f} of {len(errors)} estimates")


def compare(trace: Trace, capacity: int, groups: str) -> list[dict[str, object]]:
    """Return one row an estimate, and print them."""
    cpu_us, mib = cost(trace, capacity, groups)
    advisor = shadow(trace, capacity, groups)
    state = advisor.state()
    print(
        f"{trace.name}, {capacity:,} blocks: {cpu_us:.0f} µs of CPU a request ({1e4 / cpu_us:,.0f} requests/s are 1 % "
        f"of a core), {mib:.1f} MiB, {state.block_rate:.1%} of the blocks of {state.group_rate:.0%} of the groups"
    )
    return [row(trace, capacity, groups, advice) for advice in advisor.advice()]


def row(trace: Trace, capacity: int, groups: str, advice: Advice) -> dict[str, object]:
    exact = int(replay(trace, advice.policy, advice.capacity_blocks).hits.sum()) / trace.num_refs
    estimate = advice.hit_ratio or 0.0
    print(
        f"  {advice.policy:8s} x {advice.multiple:<5g} {estimate:.4f}, exact {exact:.4f}, error {estimate - exact:+.4f}"
    )
    return {
        "trace": trace.name,
        "num_blocks": capacity,
        "groups": groups,
        "policy": advice.policy,
        "multiple": advice.multiple,
        "estimate": round(estimate, 5),
        "exact": round(exact, 5),
        "error": round(estimate - exact, 5),
    }


def shadow(trace: Trace, capacity: int, groups: str) -> Advisor:
    """Return a shadow that has seen the whole trace, all the time at one rate."""
    advisor = Advisor(capacity, 1, clock=lambda: 0.0, cpu_clock=lambda: 0.0)
    if groups == "fewest":
        advisor._start_miniatures(advisor._smallest_group_rate)
    for path in trace.packed_paths():
        advisor.observe(path)
    return advisor


def cost(trace: Trace, capacity: int, groups: str) -> tuple[float, float]:
    """Return CPU microseconds a request, and MiB that the shadow holds at the end (measured apart)."""
    start = time.thread_time()
    shadow(trace, capacity, groups)
    cpu_us = (time.thread_time() - start) / trace.num_requests * 1e6
    tracemalloc.start()
    kept = shadow(trace, capacity, groups)
    mib = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    assert kept.state().observed_requests == trace.num_requests
    return cpu_us, mib


if __name__ == "__main__":
    main()
