"""A manager in this process behind a real socket, and managers as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixpool.rpc.client import Client, ClientOptions
from radixpool.rpc.manager import ManagerOptions, ManagerServer

BLOCK_SIZE = 4
NUM_BLOCKS = 64


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Any]:
    """Wait for a condition: returns its first true value, fails when it stays false for 30 s."""

    def wait(condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 30
        while not (value := condition()):
            assert time.monotonic() < deadline, "the condition did not become true in time"
            time.sleep(0.01)
        return value

    return wait


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """Make a directory with a short path: a unix socket's name has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="rp", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def make_server(socket_dir: Path) -> Iterator[Callable[..., ManagerServer]]:
    servers: list[ManagerServer] = []

    def make(**changes: Any) -> ManagerServer:
        listen = f"unix:{socket_dir}/m{len(servers)}.sock"
        values = {"listen": listen, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, **changes}
        server = ManagerServer(ManagerOptions(**values))
        server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.engine.check()
        server.stop(0)


@pytest.fixture
def server(make_server: Callable[..., ManagerServer]) -> ManagerServer:
    return make_server()


@pytest.fixture
def make_client(server: ManagerServer) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(**options: Any) -> Client:
        client = Client(server.address, options=ClientOptions(**options))
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client(name="test")


class ManagerProcess:
    """`radixpool serve` as a process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "radixpool.rpc.cli", "serve", "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate(timeout=10)
            raise RuntimeError(errors)
        self.ready = json.loads(line)
        self.address: str = self.ready["address"]

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def terminate(self) -> tuple[int, str]:
        """Return the exit code and what it wrote on stderr."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


@pytest.fixture
def serve() -> Iterator[Callable[..., ManagerProcess]]:
    processes: list[ManagerProcess] = []

    def start(*arguments: str) -> ManagerProcess:
        processes.append(ManagerProcess(*arguments))
        return processes[-1]

    yield start
    for process in processes:
        if process.process.poll() is None:
            process.kill()


@pytest.fixture
def run_cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "radixpool.rpc.cli", *arguments]
        environment = {**os.environ, "COLUMNS": "160", "TERM": "dumb"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)

    return run
