"""A manager with a directory, a pool holder, two workers and four frontends as processes, to be hurt one at a time.

Everything that a process may leave behind is looked for by name: what is in the folder, which is on /dev/shm as a
directory should be, the holder's abstract sockets, processes whose command line names the folder, other shared memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.client import Client, ClientOptions, RetryOptions
from radixpool.rpc.pool_types import MemfdAttachment

NUM_BLOCKS, BLOCK_SIZE = 96, 4
TTL_S = 0.6
DEADLINE_S = 60.0
MORE_TOKENS = 50
"""What each client must find right after a round."""
LOAD = {"worker-1": "worker", "worker-2": "worker"} | {f"frontend-{n}": "frontend" for n in range(1, 5)}
MODEL = {
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 8,
    "max_position_embeddings": 64,
    "vocab_size": 4,
}
"""A pool of one layer and one head of 8 floats: 32 bytes of keys a token."""
MORTAL = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
"""Begins a process that the kernel kills with its parent (PR_SET_PDEATHSIG): not by preexec_fn, because gRPC's threads
do not survive a fork and abort the child now and then."""


@dataclass
class Member:
    """One process of the house; a killed one is started again under its name."""

    name: str
    log: Path
    process: subprocess.Popen[str]

    @property
    def is_frozen(self) -> bool:
        """Whether it is stopped by a signal."""
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"


class House:
    """All processes around one manager. `folder` is empty and its path short; `seed` is for what clients ask for."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.address = f"unix:{folder}/m.sock"
        self._token = os.urandom(8).hex()
        self._holders = 0
        self._socket = ""
        self._started = seed * 1_000_000
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        self.counters = folder / "verified"
        self.counters.write_bytes(bytes(8 * len(LOAD)))
        self.members: dict[str, Member] = {}
        retry = RetryOptions(total_s=2.0, max_backoff_s=0.2)
        self.client = Client(self.address, options=ClientOptions(retry=retry, timeout_s=5.0))
        self.start("manager")
        self.start("holder")
        for name in LOAD:
            self.start(name)

    # One process.

    def start(self, name: str, *, failpoints: str = "") -> Member:
        """Start a process, under the name of one that has ended; it is not waited for."""
        self._started += 1
        log = self.folder / f"{name}.log"
        command = [sys.executable, "-c", MORTAL, *self._command(name)]
        with log.open("a") as output:
            print(f"--- {failpoints}", file=output, flush=True)
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "RADIXPOOL_FAILPOINTS": failpoints, "OMP_NUM_THREADS": "1"},
            )
        self.members[name] = Member(name, log, process)
        return self.members[name]

    def _command(self, name: str) -> list[str]:
        radixpool = [sys.executable, "-m", "radixpool.rpc.cli"]
        if name == "manager":
            sizes = ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE)]
            life = ["--lease-ttl-ms", str(int(TTL_S * 1000)), "--directory", str(self.folder / "directory")]
            return [*radixpool, "serve", "--listen", self.address, *sizes, *life, "--drain-timeout", "1"]
        if name.startswith("holder"):
            self._holders += 1
            self._socket = f"@{self._token}-{self._holders}"
            return [
                *radixpool,
                "pool",
                "--address",
                self.address,
                "--model",
                f"{self.folder}/model",
                "--socket",
                self._socket,
            ]
        script = str(Path(__file__).with_name("load.py"))
        index = str(list(LOAD).index(name))
        return [sys.executable, script, LOAD[name], self.address, str(self.counters), index, str(self._started)]

    def kill(self, name: str) -> None:
        """Kill a process and wait until it is gone."""
        self.members[name].process.kill()
        self.members[name].process.wait()

    def freeze(self, name: str) -> None:
        """Stop a process until every lease is long over."""
        self.members[name].process.send_signal(signal.SIGSTOP)
        self.thaw(name)

    def thaw(self, name: str) -> None:
        """Let a stopped process go on when every lease is long over."""
        time.sleep(3 * TTL_S)
        self.members[name].process.send_signal(signal.SIGCONT)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; fail with all logs when it does not."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                self._show_stacks()
                raise AssertionError(f"{what} is not reached; found right {self.verified_tokens()}\n{self.logs()}")
            time.sleep(0.01)

    def _show_stacks(self) -> None:
        """Let every client write where it is."""
        for name in LOAD:
            if name in self.members:
                self.members[name].process.send_signal(signal.SIGUSR1)
        time.sleep(1)

    def logs(self) -> str:
        """Return the end of what every process has written."""
        return "\n".join(f"== {m.name}\n{m.log.read_text()[-3000:]}" for m in self.members.values())

    # The whole.

    def verified_tokens(self) -> npt.NDArray[np.int64]:
        """Return how many cached tokens each client has found right so far."""
        return np.frombuffer(self.counters.read_bytes(), dtype=np.int64)

    def prove(self) -> None:
        """Fail unless every process is well, every client goes on, the invariants hold, and nothing is left behind."""
        self.wait_for(self._is_whole, "a whole service")
        admitted = self._admitted() + 20
        self.wait_for(lambda: self._admitted() >= admitted, "20 more requests")
        verified = self.verified_tokens() + MORE_TOKENS
        self.wait_for(lambda: bool((self.verified_tokens() >= verified).all()), "more tokens read by each client")
        self._is_whole()
        self.check()

    def _is_whole(self) -> bool:
        """Whether the manager answers and has the holder's pool; a process that has ended fails the test at once."""
        for member in self.members.values():
            code = member.process.poll()
            assert code is None, f"{member.name} has ended with {code}\n{self.logs()}"
        try:
            pool = self.client.get_pool()
        except RadixPoolError:
            return False
        return pool is not None and pool.attachment == MemfdAttachment(self._socket, pool.attachment.size_bytes)

    def _admitted(self) -> int:
        return self.client.stats().cache.admitted_requests

    def check(self) -> None:
        """Fail unless the manager's invariants hold and only living processes have left traces."""
        assert self.client.check().violations == ()
        alive = {member.process.pid for member in self.members.values() if member.process.poll() is None}
        assert self._processes() == alive, self.logs()
        expected = {"model", "verified", "directory", "m.sock", "m.sock.lock"}
        assert {path.name for path in self.folder.iterdir() if path.suffix != ".log"} == expected
        kept = {path.name.partition(".")[0] for path in (self.folder / "directory").iterdir()}
        assert kept == {"blocks", "interned", "lock"}
        assert len(list((self.folder / "directory").iterdir())) == 3
        assert self._abstract_sockets() == 1
        assert self._named_memory() == set()

    def _processes(self) -> set[int]:
        """Return the processes whose command line names the folder."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if os.fsencode(self.folder) in path.read_bytes():
                    found.add(int(path.parent.name))
            except OSError:  # it ended just now
                continue
        return found

    def _abstract_sockets(self) -> int:
        """Return how many sockets of pool holders listen (flags 00010000)."""
        lines = Path("/proc/net/unix").read_text().splitlines()
        return sum(f"@{self._token}-" in line and line.split()[3] == "00010000" for line in lines)

    def _named_memory(self) -> set[str]:
        """Return what processes have open or mapped in /dev/shm outside the folder: it could stay there."""
        places: set[str] = set()
        for member in self.members.values():
            here = Path(f"/proc/{member.process.pid}")
            places |= {line.split(maxsplit=5)[-1] for line in (here / "maps").read_text().splitlines()}
            with contextlib.suppress(FileNotFoundError):  # one was closed meanwhile
                places |= {str(link.readlink()) for link in (here / "fd").iterdir()}
        return {place for place in places if place.startswith("/dev/shm/") and str(self.folder) not in place}

    def end(self) -> None:
        """Stop everything; prove that all blocks came back and that nothing is left behind."""
        for name in LOAD:
            self.kill(name)
        self.wait_for(self._is_idle, "every block given back")
        assert self.client.check().violations == ()
        self.client.close()
        for name in reversed([name for name in self.members if name not in LOAD]):
            process = self.members[name].process
            process.terminate()
            assert process.wait(timeout=DEADLINE_S) == 0, self.logs()
        assert self._processes() == set()
        left = {path.name for path in self.folder.iterdir() if path.suffix != ".log"}
        assert left == {"model", "verified", "directory"}
        assert self._abstract_sockets() == 0

    def _is_idle(self) -> bool:
        cache = self.client.stats().cache
        return cache.held_blocks == cache.quarantined_blocks == 0

    def destroy(self) -> None:
        """Kill whatever still runs."""
        self.client.close()
        for member in self.members.values():
            if member.process.poll() is None:
                member.process.kill()
                member.process.wait()
