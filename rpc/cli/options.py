"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from radixpool.rpc.client import NO_RETRY, Client, ClientOptions, ClientRole

_OPERATOR = ClientOptions(role=ClientRole.OPERATOR, retry=NO_RETRY)
"""A person at a terminal wants to know at once that nobody answers."""

Command = TypeVar("Command", bound=Callable[..., Any])


def default_address() -> str:
    """Return the address that `serve` and its clients use when none is given: a socket only this user can open."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return f"unix:{Path(runtime) / 'radixpool.sock'}" if runtime else "127.0.0.1:7300"


def address_option(command: Command) -> Command:
    """Add --address."""
    return click.option(
        "--address",
        metavar="ADDRESS",
        envvar="RADIXPOOL_ADDRESS",
        default=default_address,
        show_default="unix:$XDG_RUNTIME_DIR/radixpool.sock, else 127.0.0.1:7300",
        show_envvar=True,
        help="Where the manager listens: unix:/path or HOST:PORT.",
    )(command)


def json_option(command: Command) -> Command:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


@contextmanager
def operator_client(address: str) -> Iterator[Client]:
    """Connect as an operator. Turns a malformed value into a usage error."""
    with usage_errors(), Client(address, options=_OPERATOR) as client:
        yield client


@contextmanager
def usage_errors() -> Iterator[None]:
    """Show a caller's mistake (ValueError) as a usage error, exit code 2."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
