"""What commands that run until they are stopped have in common: signals, and saying that they are ready."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import click

from radixpool.rpc.metrics.logs import LOG_LEVELS, LogFormat, configure_logging

Command = TypeVar("Command", bound=Callable[..., Any])


def ready_fd_option(command: Command) -> Command:
    """Add --ready-fd."""
    return click.option(
        "--ready-fd", type=int, help="Write the address and a newline to this file descriptor once ready."
    )(command)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set.

    Another thread sets it: a handler runs in the middle of whatever the main thread does, and if that is the beginning
    of a wait for this very event, setting it there would wait for ever for the lock that the wait holds.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _thread.start_new_thread(stop.set, ()))
    return stop


def announce(message: str, address: str, *, ready_fd: int | None) -> None:
    """Print one line on stdout, and the address to `ready_fd` if there is one."""
    click.echo(message)
    sys.stdout.flush()
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as ready:
            ready.write(f"{address}\n")


def log_options(command: Command) -> Command:
    """Add --log-level and --log-format, for `log_as`."""
    add_level = click.option(
        "--log-level",
        type=click.Choice(LOG_LEVELS),
        default="info",
        show_default=True,
        help="Least severe level to write to stderr.",
    )
    add_format = click.option(
        "--log-format",
        type=click.Choice([form.value for form in LogFormat]),
        default=LogFormat.CONSOLE.value,
        show_default=True,
        help="console for people, json for machines: one object a line.",
    )
    return add_level(add_format(command))


def log_as(kind: str, name: str, *, level: str, form: str) -> None:
    """Log as a manager does; each line has the kind of process, and its name if it has one of its own."""
    configure_logging(level=level, form=LogFormat(form), process=kind if name == kind else f"{kind} {name}")
