"""How much memory can callers make a manager take who only connect, or send what is too long?

    python bench/connections.py                      10,000 connections of each kind, over a unix socket and TCP
    python bench/connections.py --connections 1000 --max-connections 500

A manager runs as a process. Each kind of caller comes in turn, to a fresh manager: `silent` connects and says nothing,
`half` sends half of HTTP/2's first bytes, `idle` is a whole HTTP/2 connection without a call (as an idle gRPC channel),
`channels` are gRPC channels that made one call, `oversize` sends messages of 64 MiB over many channels at once, and
`largest` messages of the largest size that is allowed, `sessions` such messages in all sessions at once. The growth of
the manager's resident memory is what counts; the aim is at most 64 MiB. A client that was there before must go on being
answered all the while.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import grpc
import rpc_load as load
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from radixpool.rpc import limits
from radixpool.rpc import operations as ops
from radixpool.rpc.client import NO_RETRY, Client, ClientOptions, RetryOptions
from radixpool.v1 import cache_pb2, cache_pb2_grpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
OVERSIZE_BYTES = 64 << 20
OVERSIZE_CHANNELS, OVERSIZE_EACH = 16, 8
MAX_CHANNELS = 2_000
"""gRPC channels of one client process: it needs more memory for them than the manager."""
SETTLE_S = 2.0
PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """What one kind of caller did. Memory in MiB, calls of the bystander in ms."""

    kind: str
    transport: str
    asked: int
    open: int
    growth_mib: float
    growth_after_mib: float
    bystander_calls: int
    bystander_p50_ms: float
    bystander_max_ms: float


class Manager:
    """`radixpool serve` as a process, with a client that was there first."""

    def __init__(self, listen: str, max_connections: int) -> None:
        options = ("--max-connections", str(max_connections), "--log-level", "error")
        self._server = load.Manager(listen, 4096, options=options)
        self.address = self._server.address
        self.resident_mib = self._server.resident_mib
        self.latencies_ms: list[float] = []
        self._client = Client(self.address, options=ClientOptions(retry=NO_RETRY))
        for _ in range(200):
            self._call()
        self.latencies_ms.clear()
        self._stopped = threading.Event()
        self._bystander = threading.Thread(target=self._stand_by)
        self.base_mib = self.resident_mib()
        self._bystander.start()

    def open_sockets(self) -> int:
        links = Path(f"/proc/{self._server.pid}/fd").iterdir()
        return sum(str(link.readlink()).startswith("socket:") for link in links)

    def _call(self) -> None:
        started = time.perf_counter()
        self._client.acquire([1, 2, 3]).release()
        self.latencies_ms.append((time.perf_counter() - started) * 1e3)

    def _stand_by(self) -> None:
        while not self._stopped.wait(PAUSE_S):
            self._call()

    def stop(self) -> None:
        self._stopped.set()
        self._bystander.join()
        self._client.close()
        self._server.stop()


class RawConnections:
    """Sockets that send `first` and then nothing."""

    def __init__(self, address: str, count: int, first: bytes) -> None:
        self._sockets = [self._connect(address, first) for _ in range(count)]

    def _connect(self, address: str, first: bytes) -> socket.socket:
        if address.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX)
            target: str | tuple[str, int] = address.removeprefix("unix:")
        else:
            host, _, port = address.rpartition(":")
            connection, target = socket.socket(), (host, int(port))
        with contextlib.suppress(OSError):  # closed by the manager: there are enough
            connection.connect(target)
            connection.sendall(first)
        return connection

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()


class Channels:
    """gRPC channels that made one call each and keep their connection."""

    def __init__(self, address: str, count: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.insecure_channel(address, options=options) for _ in range(count)]
        for channel in self._channels:
            with contextlib.suppress(grpc.RpcError):
                cache_pb2_grpc.CacheServiceStub(channel).GetInfo(cache_pb2.GetInfoRequest(), timeout=5)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class Messages:
    """Calls with `payload` each, over many channels at once; every call must be answered, or refused."""

    def __init__(self, address: str, payload: bytes) -> None:
        def send(_number: int) -> None:
            with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
                match = channel.unary_unary("/radixpool.v1.CacheService/Match")
                for _ in range(OVERSIZE_EACH):
                    with contextlib.suppress(grpc.RpcError):
                        match(payload, timeout=60)

        with ThreadPoolExecutor(OVERSIZE_CHANNELS) as threads:
            list(threads.map(send, range(OVERSIZE_CHANNELS)))

    def close(self) -> None:
        """Everything has ended already."""


class Sessions:
    """As many sessions as there may be, all of which send messages of the largest size at the same time."""

    def __init__(self, address: str) -> None:
        match = ops.Match(bytes(limits.MAX_MESSAGE_BYTES - 1024))
        patient = ClientOptions(retry=RetryOptions(total_s=60, max_backoff_s=0.5))

        def send(_number: int) -> None:
            with client.session() as session:
                for _ in range(OVERSIZE_EACH):
                    session.batch([match])

        with Client(address, options=patient) as client, ThreadPoolExecutor(limits.MAX_SESSIONS) as threads:
            list(threads.map(send, range(limits.MAX_SESSIONS)))

    def close(self) -> None:
        """Everything has ended already."""


def largest_match() -> bytes:
    """Return a request of the largest size that is allowed: it is parsed, and the tree is asked for it."""
    return cache_pb2.MatchRequest(tokens=bytes(limits.MAX_MESSAGE_BYTES - 64)).SerializeToString()


def kinds(count: int) -> dict[str, tuple[int, Callable[[str], RawConnections | Channels | Messages | Sessions]]]:
    """Return how many there are of each kind, and what makes them."""
    calls = OVERSIZE_CHANNELS * OVERSIZE_EACH
    channels = min(count, MAX_CHANNELS)
    return {
        "silent": (count, lambda address: RawConnections(address, count, b"")),
        "half": (count, lambda address: RawConnections(address, count, PREFACE[:12])),
        "idle": (count, lambda address: RawConnections(address, count, PREFACE + SETTINGS)),
        "channels": (channels, lambda address: Channels(address, channels)),
        "oversize": (calls, lambda address: Messages(address, bytes(OVERSIZE_BYTES))),
        "largest": (calls, lambda address: Messages(address, largest_match())),
        "sessions": (limits.MAX_SESSIONS * OVERSIZE_EACH, Sessions),
    }


def measure(kind: str, listen: str, *, connections: int, max_connections: int) -> Row:
    """Let one kind of caller loose on a fresh manager."""
    asked, make = kinds(connections)[kind]
    manager = Manager(listen, max_connections)
    try:
        peak = _Peak(manager)
        callers = make(manager.address)
        time.sleep(SETTLE_S)
        is_open = manager.open_sockets() - 2  # the listener and the bystander
        growth = peak.stop() - manager.base_mib
        callers.close()
        time.sleep(SETTLE_S)
        after = manager.resident_mib() - manager.base_mib
    finally:
        manager.stop()
    times = manager.latencies_ms
    transport = "unix" if listen.startswith("unix:") else "tcp"
    p50 = statistics.median(times)
    return Row(
        kind, transport, asked, is_open, round(growth, 1), round(after, 1), len(times), round(p50, 2), max(times)
    )


class _Peak:
    """The most memory that a manager has had since."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._peak = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(PAUSE_S):
            self._peak = max(self._peak, self._manager.resident_mib())

    def stop(self) -> float:
        self._stopped.set()
        self._thread.join()
        return self._peak


@click.command(help=__doc__)
@click.option("--connections", default=10_000, show_default=True, help="How many of each kind.")
@click.option("--max-connections", default=limits.MAX_CONNECTIONS, show_default=True, help="As of radixpool serve.")
@click.option("--only", multiple=True, type=click.Choice(list(kinds(1))), help="Kinds to measure.  [default: all]")
@click.option("--transport", type=click.Choice(["unix", "tcp", "both"]), default="both", show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the rows to this file as well.")
def main(connections: int, max_connections: int, only: tuple[str, ...], transport: str, json_path: str | None) -> None:
    """Measure every kind and print a table."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = []
    with tempfile.TemporaryDirectory(prefix="rpconn", dir="/tmp") as folder:
        listens = {"unix": f"unix:{folder}/m.sock", "tcp": "127.0.0.1:0"}
        cases = [(kind, listens[name]) for kind in only or kinds(1) for name in listens if transport in (name, "both")]
        with Progress(console=Console(stderr=True)) as progress:
            for kind, listen in progress.track(cases, description="connections"):
                rows.append(measure(kind, listen, connections=connections, max_connections=max_connections))
    table = Table("callers", "over", "asked", "open", "growth, MiB", "after", "bystander calls", "p50, ms", "max, ms")
    for row in rows:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    Console().print(table)
    if json_path:
        Path(json_path).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
