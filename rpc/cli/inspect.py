"""`radixpool inspect tree | block | sequence | clients`."""

from __future__ import annotations

import click

from radixpool.rpc import limits
from radixpool.rpc.cli import table_printer
from radixpool.rpc.cli.json_printer import print_json
from radixpool.rpc.cli.options import address_option, json_option, operator_client


@click.group()
def inspect() -> None:
    """Look at the tree, one block, sequences or clients.

    Token ids and cache salts are never shown.
    """


@inspect.command(short_help="Draw the radix tree.")
@click.option(
    "--max-nodes",
    type=click.IntRange(1, limits.MAX_INSPECTED),
    default=limits.DEFAULT_INSPECTED,
    show_default=True,
    help="Stop after this many runs of blocks.",
)
@address_option
@json_option
def tree(address: str, as_json: bool, max_nodes: int) -> None:
    """Draw the radix tree.

    One line is one run of blocks that no branch divides: its state, its block ids, how many sequences and pins go
    through it, and when it was used last (a greater number is later; the smallest leaf is evicted first).
    """
    with operator_client(address) as client:
        view = client.inspect_tree(max_nodes=max_nodes)
    (print_json if as_json else table_printer.print_tree)(view)


@inspect.command(short_help="Explain one block.")
@click.argument("block_id", type=click.IntRange(0))
@address_option
@json_option
def block(address: str, as_json: bool, block_id: int) -> None:
    """Explain one block: its state, its place, and the sequences that hold it."""
    with operator_client(address) as client:
        view = client.inspect_block(block_id)
    (print_json if as_json else table_printer.print_block)(view)


@inspect.command(short_help="Explain one sequence, or list all of them.")
@click.argument("sequence_id", required=False)
@address_option
@json_option
def sequence(address: str, as_json: bool, sequence_id: str | None) -> None:
    """Explain one sequence, or list all of them.

    SEQUENCE_ID is the number that the list shows, or a handle as 32 hex digits. With a handle or a number the block
    table is shown too.
    """
    with operator_client(address) as client:
        if sequence_id is None:
            listing = client.list_sequences()
            (print_json if as_json else table_printer.print_sequences)(listing)
            return
        info = client.inspect_sequence(_sequence_name(sequence_id))
    (print_json if as_json else table_printer.print_sequence)(info)


@inspect.command(short_help="List the registered clients.")
@address_option
@json_option
def clients(address: str, as_json: bool) -> None:
    """List the registered clients and how long their leases still last."""
    with operator_client(address) as client:
        listing = client.list_clients()
    (print_json if as_json else table_printer.print_clients)(listing)


def _sequence_name(text: str) -> bytes | int:
    if len(text) == 2 * limits.HANDLE_BYTES:
        return bytes.fromhex(text)
    if text.isascii() and text.isdigit():
        return int(text)
    digits = 2 * limits.HANDLE_BYTES
    raise ValueError(f"SEQUENCE_ID must be a number or a handle of {digits} hex digits, got {text!r}")
