"""Run manager, pool holder and workers as processes of their own, and leave nothing behind.

Sockets and logs lie in a fresh directory, which is removed at the end; one that a killed demo left is removed by the
next. If this process is killed the kernel ends its children (PR_SET_PDEATHSIG), and their memory has no name.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from radixpool.radix.errors import RadixPoolError

_PREFIX = "radixpool-demo-"
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0
_LOG_TAIL_LINES = 5
_TIED_TO_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent was gone before the call")
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes the command given after the parent's process id, and is killed with the parent. No preexec_fn: that runs
Python between fork and exec, where the locks of gRPC's threads may be held for ever."""


class ProcessFailed(RadixPoolError):
    """A process ended or was not ready in time. The message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Process:
    """A running process; `address` is where it serves."""

    name: str
    popen: subprocess.Popen[bytes]
    address: str

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.popen.poll() is None

    def kill(self) -> None:
        """Kill it as a crash would (SIGKILL) and wait until it is gone."""
        self.popen.kill()
        self.popen.wait()


class Supervisor:
    """Start processes with `start` and `start_all`; leaving the context stops them, the last started first."""

    def __init__(self, *, parent_dir: Path | None = None) -> None:
        parent = parent_dir or Path(tempfile.gettempdir())
        _remove_leftovers(parent)
        self._directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        self._spawned: list[list[subprocess.Popen[bytes]]] = []  # what was started together

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def socket_address(self, name: str) -> str:
        """Return an address for a server of that name."""
        return f"unix:{self._directory / f'{name}.sock'}"

    def log_of(self, name: str) -> str:
        """Return what a process has written so far."""
        path = self._directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, name: str, arguments: list[str]) -> Process:
        """Run `radixpool ARGUMENTS` and return when it is ready. Raises `ProcessFailed`."""
        return self.start_all({name: arguments})[0]

    def start_all(
        self, commands: dict[str, list[str]], on_ready: Callable[[str], None] = lambda _: None
    ) -> list[Process]:
        """Run several at once and return, in order, when all are ready; `on_ready` hears of each."""
        self._spawned.append([])
        pipes = {name: self._spawn(name, arguments) for name, arguments in commands.items()}
        try:
            addresses = dict(self._wait_ready({name: pipe for name, (_, pipe) in pipes.items()}, on_ready))
        finally:
            for _, pipe in pipes.values():
                os.close(pipe)
        return [Process(name, popen, addresses[name]) for name, (popen, _) in pipes.items()]

    def stop(self) -> None:
        """Stop everything, by force where it takes too long, and remove the directory. Idempotent."""
        for together in reversed(self._spawned):
            for popen in together:
                popen.terminate()
            for popen in together:
                try:
                    popen.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    popen.kill()
                    popen.wait()
        self._spawned.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _spawn(self, name: str, arguments: list[str]) -> tuple[subprocess.Popen[bytes], int]:
        """Start a process; return it with the pipe that it writes its address to once it is ready."""
        receive, send = os.pipe()
        tied = [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid())]
        command = [sys.executable, "-m", "radixpool.rpc.cli", *arguments, "--ready-fd", str(send)]
        try:
            with (self._directory / f"{name}.log").open("wb") as log:
                popen = subprocess.Popen(
                    [*tied, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[send],
                    start_new_session=True,  # Ctrl-C reaches this process alone, which stops the others in order
                )
        finally:
            os.close(send)
        self._spawned[-1].append(popen)
        return popen, receive

    def _wait_ready(self, pipes: dict[str, int], on_ready: Callable[[str], None]) -> Iterator[tuple[str, str]]:
        deadline = time.monotonic() + _START_TIMEOUT_S
        waiting = {pipe: name for name, pipe in pipes.items()}
        while waiting:
            readable, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise ProcessFailed(f"{', '.join(waiting.values())}: not ready within {_START_TIMEOUT_S:g} s")
            for pipe in readable:
                name = waiting.pop(pipe)
                address = os.read(pipe, 4096).decode().strip()
                if not address:
                    raise ProcessFailed(f"{name} did not start: {self._last_words(name)}")
                on_ready(name)
                yield name, address

    def _last_words(self, name: str) -> str:
        lines = [line for line in self.log_of(name).splitlines() if line.strip()]
        return " / ".join(lines[-_LOG_TAIL_LINES:]) or "it said nothing"


def _remove_leftovers(parent: Path) -> None:
    """Remove the directories of demos that are not running any more."""
    for directory in parent.glob(f"{_PREFIX}*"):
        pid = directory.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)
