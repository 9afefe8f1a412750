"""`radixpool advise`."""

from __future__ import annotations

import click
from rich import box
from rich.console import Console
from rich.table import Table

from radixpool.rpc.advice import Advice, AdviceReport
from radixpool.rpc.cli.json_printer import print_json
from radixpool.rpc.cli.options import address_option, json_option, operator_client


@click.command()
@address_option
@json_option
def advise(address: str, as_json: bool) -> None:
    """Say what another pool size, or another eviction policy, would hit.

    The manager keeps a small sampled shadow of the requests that it admits, and replays them at a quarter to four times
    its size and under other policies. The figures are estimates, over full blocks, since the manager started or last
    had to thin its sample: within about 0.02 of exact replay on public traces (docs/policies.md). `radixpool bench
    policies` gives exact figures on a recorded trace.
    """
    with operator_client(address) as client:
        report = client.advice()
    (print_json if as_json else _print)(report)


def _print(report: AdviceReport) -> None:
    console = Console()
    if not report.advice:
        console.print("this manager keeps no shadow: start it with --advice-cpu-share above 0")
        return
    running = report.advice[0].policy
    present = next((a.hit_ratio for a in report.advice if a.multiple == 1.0), None)
    table = Table("pool", "blocks", "policy", "hit ratio", "against now", box=box.SIMPLE_HEAD)
    for advice in report.advice:
        size = f"x {advice.multiple:g}"
        mark = " (now)" if advice.multiple == 1.0 and advice.policy == running else ""
        table.add_row(
            size, f"{advice.capacity_blocks:,}", advice.policy + mark, _ratio(advice), _change(advice, present)
        )
    console.print(table)
    state = report.state
    console.print(
        f"from {state.sampled_blocks:,} sampled of {state.observed_blocks:,} block references in "
        f"{state.observed_requests:,} requests; {state.block_rate:.1%} of the blocks of {state.group_rate:.0%} of the "
        f"requests, {state.skipped_requests:,} requests skipped, {state.cpu_seconds:.2f} s of CPU",
        highlight=False,
    )


def _ratio(advice: Advice) -> str:
    return "not enough yet" if advice.hit_ratio is None else f"{advice.hit_ratio:.1%}"


def _change(advice: Advice, present: float | None) -> str:
    if advice.hit_ratio is None or present is None or advice.hit_ratio == present:
        return ""
    return f"{(advice.hit_ratio - present) * 100:+.1f}"
