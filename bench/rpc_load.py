"""The manager process and the loads that bench/rpc.py puts on it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console

from radixpool.rpc import operations as ops
from radixpool.rpc.client import AsyncClient, Client, Session, Step

BLOCK_SIZE = 16
PROMPT_TOKENS = 4096
SHARED_TOKENS = 3584
NUM_PREFIXES = 64
WARM_UP_LIFECYCLES = 4800
"""Until the shared beginnings are cached, blocks are evicted and the advisor has found its rate."""


class Manager:
    """`radixpool serve` as a process, pinned to one core on request, with further command-line options."""

    def __init__(
        self,
        listen: str,
        num_blocks: int,
        *,
        directory: Path | None = None,
        core: int | None = None,
        options: Sequence[str] = (),
    ) -> None:
        command = [sys.executable, "-m", "radixpool.rpc.cli", "serve", "--json", "--listen", listen]
        command += ["--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE)]
        if directory is not None:
            command += ["--directory", str(directory)]
        command += options
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})
        assert self._process.stdout is not None
        self.address: str = json.loads(self._process.stdout.readline())["address"]

    def cpu_s(self) -> float:
        """Return the CPU time that the process has used, all threads together."""
        return cpu_s(self._process.pid)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def resident_mib(self) -> float:
        """Return the resident memory."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate(timeout=60)


@contextmanager
def running(
    listen: str,
    num_blocks: int,
    *,
    directory: Path | None = None,
    core: int | None = None,
    options: Sequence[str] = (),
) -> Iterator[Manager]:
    """Run a manager for the time of the block."""
    manager = Manager(listen, num_blocks, directory=directory, core=core, options=options)
    try:
        yield manager
    finally:
        manager.stop()


def wide_console() -> Console:
    """Return a console that does not fold tables in a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def cpu_s(pid: int) -> float:
    """Return the CPU time of the living threads of a process, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def prompts() -> Iterator[bytes]:
    """Yield prompts of 4,096 packed token ids, for ever: one of 64 shared beginnings, then 512 of their own."""
    random = np.random.default_rng(7)
    prefixes = [random.integers(0, 128_000, SHARED_TOKENS, dtype=np.uint32).tobytes() for _ in range(NUM_PREFIXES)]
    while True:
        own = random.integers(0, 128_000, PROMPT_TOKENS - SHARED_TOKENS, dtype=np.uint32)
        yield prefixes[int(random.integers(NUM_PREFIXES))] + own.tobytes()


def fill(client: Client, num_blocks: int, *, progress: object = None) -> None:
    """Commit so many blocks of content that nothing else shares."""
    random = np.random.default_rng(11)
    run_blocks = 2048
    for _ in range(-(-num_blocks // run_blocks)):
        tokens = random.integers(128_000, 2**32, run_blocks * BLOCK_SIZE, dtype=np.uint32)
        with client.acquire(tokens) as seq:
            seq.commit(len(tokens))


def unary_lifecycles(client: Client, source: Iterator[bytes], count: int) -> list[float]:
    """Run lifecycles of three calls; return the seconds of every call."""
    took = []
    for _ in range(count):
        prompt = next(source)
        start = time.perf_counter()
        seq = client.acquire(prompt)
        acquired = time.perf_counter()
        seq.commit(PROMPT_TOKENS)
        committed = time.perf_counter()
        seq.release()
        took += [acquired - start, committed - acquired, time.perf_counter() - committed]
    return took


def short_unary_lifecycles(client: Client, source: Iterator[bytes], count: int) -> list[float]:
    """Run lifecycles of two calls, the commit going along with the release; return the seconds of every call."""
    took = []
    for _ in range(count):
        prompt = next(source)
        start = time.perf_counter()
        seq = client.acquire(prompt)
        acquired = time.perf_counter()
        seq.release(commit_upto=PROMPT_TOKENS)
        took += [acquired - start, time.perf_counter() - acquired]
    return took


def session_lifecycles(session: Session, source: Iterator[bytes], count: int) -> list[float]:
    """Run lifecycles of three messages over one stream; return the seconds of every message."""
    took = []
    for _ in range(count):
        prompt = next(source)
        start = time.perf_counter()
        (acquired,) = session.batch([ops.Acquire(prompt)])
        second = time.perf_counter()
        session.batch([ops.Commit(acquired.handle, PROMPT_TOKENS)])
        third = time.perf_counter()
        session.batch([ops.Release(acquired.handle)])
        took += [second - start, third - second, time.perf_counter() - third]
    return took


def commit_and_release(handles: list[bytes]) -> list[ops.Operation]:
    """Return the ends of lifecycles, an operation for each of the two."""
    commits: list[ops.Operation] = [ops.Commit(handle, PROMPT_TOKENS) for handle in handles]
    return [*commits, *(ops.Release(handle) for handle in handles)]


def commit_with_release(handles: list[bytes]) -> list[ops.Operation]:
    """Return the ends of lifecycles, one operation for both."""
    return [ops.Release(handle, commit_upto=PROMPT_TOKENS) for handle in handles]


def batched_lifecycles(
    session: Session | Client,
    source: Iterator[bytes],
    count: int,
    *,
    size: int,
    ends: Callable[[list[bytes]], list[ops.Operation]] = commit_and_release,
) -> list[float]:
    """Run lifecycles `size` at a time in two messages; return the seconds of every pair of messages."""
    took = []
    for _ in range(count // size):
        acquires = [ops.Acquire(next(source)) for _ in range(size)]
        start = time.perf_counter()
        acquired = session.batch(acquires)
        session.batch(ends([one.handle for one in acquired]))
        took.append(time.perf_counter() - start)
    return took


class DecodeLoad:
    """Sequences of 1,024 tokens and more, evenly spread over a block, that are decoded step by step.

    A step appends a token to each and commits those that fill a block, in either form.
    """

    def __init__(self, session: Session, source: Iterator[bytes], num_sequences: int) -> None:
        self._session = session
        self._lengths = 1024 + np.arange(num_sequences, dtype=np.uint32) % BLOCK_SIZE
        self._tokens = np.full(num_sequences, 5, np.uint32)
        self._step = 0
        self._handles: list[bytes] = []
        for length in self._lengths.tolist():
            (acquired,) = session.batch([ops.Acquire(next(source)[: 4 * length])])
            session.batch([ops.Commit(acquired.handle, 1024)])
            self._handles.append(acquired.handle)

    def operations(self, count: int) -> list[float]:
        """Run steps of an operation a sequence; return the seconds of every message."""
        token, took = self._tokens[:1].tobytes(), []
        for _ in range(count):
            report = self._advance()
            operations: list[ops.Operation] = [ops.Extend(handle, token) for handle in self._handles]
            full = np.flatnonzero(self._lengths % BLOCK_SIZE == 0).tolist()
            operations += [ops.Commit(self._handles[row], int(self._lengths[row])) for row in full]
            start = time.perf_counter()
            self._session.batch(operations, steps=report)
            took.append(time.perf_counter() - start)
        return took

    def columns(self, count: int) -> list[float]:
        """Run steps in columns; return the seconds of every message."""
        took = []
        for _ in range(count):
            report = self._advance()
            upto = np.where(self._lengths % BLOCK_SIZE == 0, self._lengths, 0)
            start = time.perf_counter()
            step = Step(handles=self._handles, tokens=self._tokens, commit_upto_tokens=upto)
            stepped = self._session.step(step, steps=report)
            took.append(time.perf_counter() - start)
            assert not stepped.errors
        return took

    def _advance(self) -> ops.StepReport:
        self._lengths += 1
        self._step += 1
        return ops.StepReport(self._step - 1, self._step)


async def outstanding_calls(address: str, source: Iterator[bytes], count: int, *, outstanding: int) -> list[float]:
    """Run `count` lifecycles of unary calls, so many at a time; return the seconds of every call."""
    took: list[float] = []
    wanted = iter([next(source) for _ in range(count)])

    async def timed(call: object) -> object:
        start = time.perf_counter()
        result = await call  # type: ignore[misc]
        took.append(time.perf_counter() - start)
        return result

    async with AsyncClient(address) as client:

        async def one_after_the_other() -> None:
            for prompt in wanted:
                seq = await timed(client.acquire(prompt))
                await timed(seq.commit(PROMPT_TOKENS))  # type: ignore[attr-defined]
                await timed(seq.release())  # type: ignore[attr-defined]

        await asyncio.gather(*(one_after_the_other() for _ in range(outstanding)))
    return took
