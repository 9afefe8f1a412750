"""What commands that run until they are stopped have in common: signals, and saying that they are ready."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import click

from radixpool.rpc.metrics.logs import LOG_LEVELS, LogFormat, configure_logging

Command = TypeVar("Command", bound=Callable[..., Any])
_STOPPING = frozenset((signal.SIGTERM, signal.SIGINT))


def ready_fd_option(command: Command) -> Command:
    """Add --ready-fd."""
    return click.option(
        "--ready-fd", type=int, help="Write the address and a newline to this file descriptor once ready."
    )(command)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set.

    A thread sets it, woken by the byte that the interpreter writes the moment a signal arrives. A handler would run in
    the main thread alone, once that is awake: a signal that comes to another thread, or just before the main thread
    begins to wait, does not wake it. And setting the event from there may wait for ever for the lock of the very wait
    that the handler interrupts.
    """
    stop = threading.Event()
    receive, send = os.pipe()
    os.set_blocking(send, False)
    signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    for number in _STOPPING:
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_set_on_signal, args=(stop, receive), name="signals", daemon=True).start()
    return stop


def _set_on_signal(stop: threading.Event, receive: int) -> None:
    while _STOPPING.isdisjoint(os.read(receive, 64)):
        pass
    stop.set()


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
