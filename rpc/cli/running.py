"""What commands that run until they are stopped have in common: signals, and saying that they are ready."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def ready_fd_option(command: Command) -> Command:
    """Add --ready-fd."""
    return click.option(
        "--ready-fd", type=int, help="Write the address and a newline to this file descriptor once ready."
    )(command)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def announce(message: str, address: str, *, ready_fd: int | None) -> None:
    """Print one line on stdout, and the address to `ready_fd` if there is one."""
    click.echo(message)
    sys.stdout.flush()
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as ready:
            ready.write(f"{address}\n")


def log_to_stderr(level: str = "INFO") -> None:
    """Log one line per event to stderr."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
