"""`radixpool check`."""

from __future__ import annotations

import click

from radixpool.rpc.cli.json_printer import print_json
from radixpool.rpc.cli.lazy import EXIT_OPERATING_ERROR
from radixpool.rpc.cli.options import address_option, json_option, operator_client
from radixpool.rpc.cli.table_printer import print_check


@click.command()
@address_option
@json_option
@click.pass_context
def check(context: click.Context, address: str, as_json: bool) -> None:
    """Prove the invariants of a running manager.

    Every block is in exactly one state, every count agrees with what it counts, every handle has an owner. Other calls
    wait meanwhile, about a second per million blocks. Exit code 1 when something is violated.
    """
    with operator_client(address) as client:
        report = client.check()
    (print_json if as_json else print_check)(report)
    if report.violations:
        context.exit(EXIT_OPERATING_ERROR)
