"""Two managers that start at the same moment: exactly one gets the address or the directory, the other says who has it.

CI tries a few times, `make races TRIES=100` many times. Both processes have loaded everything and wait for a line
before they go on, so that they race for the address and not for the disk.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixpool.rpc.client import Client

TRIES = int(os.environ.get("RADIXPOOL_RACES", "3"))
READY = "waiting\n"
RACER = """
import sys
from radixpool.rpc.cli import main
from radixpool.rpc.cli.serve import serve
import radixpool.rpc.directory
print("waiting", flush=True)
sys.stdin.readline()
main(sys.argv[1:], prog_name="radixpool")
"""


class Racer:
    """A manager that is about to start; `line` is what it prints when it serves, empty when it does not."""

    def __init__(self, *arguments: str) -> None:
        command = [
            sys.executable,
            "-c",
            RACER,
            "serve",
            "--json",
            "--num-blocks",
            "64",
            "--block-size",
            "4",
            *arguments,
        ]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.line = ""

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        self.line = self.process.stdout.readline()
        return self.line

    def end(self) -> tuple[int, str]:
        """Return the exit code and what it wrote on stderr."""
        if self.line:
            self.process.terminate()
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def race() -> Iterator[object]:
    racers: list[Racer] = []

    def start(*each: tuple[str, ...]) -> tuple[Racer, Racer]:
        """Let managers start at once; return the one that serves and the one that does not."""
        started = [Racer(*arguments) for arguments in each]
        racers.extend(started)
        assert [racer.hear() for racer in started] == [READY, READY]
        for racer in started:
            racer.go()
        lines = [racer.hear() for racer in started]
        assert sorted(map(bool, lines)) == [False, True], [racer.end() for racer in started]
        return started[bool(lines[1])], started[bool(lines[0])]

    yield start
    for racer in racers:
        racer.process.kill()
        racer.process.communicate()


def prove(winner: Racer, loser: Racer, message: str) -> None:
    """The loser has said what is taken and is gone; the winner serves, and ends well."""
    code, errors = loser.end()
    assert (code, errors.count("Error: ")) == (4, 1), errors
    assert re.search(message, errors), errors
    with Client(json.loads(winner.line)["address"]) as client, client.acquire([1, 2, 3]):
        assert client.info().num_blocks == 64
    code, errors = winner.end()
    assert code == 0, errors


def test_one_unix_socket(race, socket_dir):
    address = f"unix:{socket_dir}/m.sock"
    for _ in range(TRIES):
        winner, loser = race(("--listen", address), ("--listen", address))
        prove(winner, loser, rf"another manager serves {address}\n")
        assert list(socket_dir.iterdir()) == []


def test_one_port(race):
    for _ in range(TRIES):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        winner, loser = race(("--listen", address), ("--listen", address))
        prove(winner, loser, rf"(another process serves|cannot listen on) {address}")


def test_one_directory(race, socket_dir):
    directory = socket_dir / "directory"
    for number in range(TRIES):
        each = [("--listen", f"unix:{socket_dir}/{name}.sock", "--directory", str(directory)) for name in "ab"]
        winner, loser = race(*each)
        prove(winner, loser, rf"directory {directory} is open in another manager \(process (\d+|unknown)\)")
        assert {path.name for path in socket_dir.iterdir()} == {"directory"}
        if number % 2:  # half of the races are for a directory that is not there yet
            for path in directory.iterdir():
                path.unlink()
            Path(directory).rmdir()
