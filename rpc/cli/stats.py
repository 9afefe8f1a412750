"""`radixpool stats`."""

from __future__ import annotations

import click

from radixpool.rpc.cli.json_printer import print_json
from radixpool.rpc.cli.options import address_option, json_option, operator_client
from radixpool.rpc.cli.table_printer import print_stats


@click.command()
@address_option
@json_option
def stats(address: str, as_json: bool) -> None:
    """Show block states, hit ratio and counters.

    free + cached + held + quarantined is always the size of the pool. Cached blocks are committed and held by nobody,
    so they count as room; the hit ratio is over the prompt tokens of admitted requests.
    """
    with operator_client(address) as client:
        result = client.stats()
    (print_json if as_json else print_stats)(result)
