"""A file system that is really full: a small tmpfs in a mount namespace of the manager's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixpool.radix.namespace import Namespace
from radixpool.rpc.client import Client, ClientOptions, ClientRole
from radixpool.rpc.directory.errors import DirectoryNoSpace
from radixpool.rpc.pool_types import KvDtype, MemfdAttachment, Pool, PoolLayout, PoolSpec

NUM_BLOCKS, BLOCK_SIZE = 512, 4
SPEC = PoolSpec(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    dtype=KvDtype.FLOAT32,
    layout=PoolLayout.HND,
)
POOL = Pool(b"p" * 16, SPEC, MemfdAttachment("@nowhere", 1))
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
TMPFS_BYTES = 512 << 10


def can_unshare() -> bool:
    try:
        return subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(
    not can_unshare(), reason="needs unshare and user namespaces; test_kill.py limits the size of files instead"
)


class Lives:
    """Managers that follow one another over one small file system, which lasts as long as their shell."""

    def __init__(self, folder: Path, count: int) -> None:
        self.address = f"unix:{folder}/m.sock"
        self.disk = folder / "disk"
        self.disk.mkdir(mode=0o700)
        serve = [sys.executable, "-m", "radixpool.rpc.cli", "serve", "--json", "--listen", self.address]
        serve += ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE)]
        serve += ["--directory", str(self.disk / "directory")]
        script = f'mount -t tmpfs -o size={TMPFS_BYTES},mode=700 tmpfs "$0" || exit 9\n' + '"$@"\n' * count
        self.shell = subprocess.Popen(
            [*UNSHARE, "sh", "-c", script, str(self.disk), *serve],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pid = 0

    def wait_ready(self) -> None:
        line = self.shell.stdout.readline()
        assert line, "the manager does not start"
        self.pid = json.loads(line)["pid"]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def file(self, name: str) -> Path:
        """Return where a file of the small file system is seen from outside."""
        return Path(f"/proc/{self.pid}/root{self.disk}/{name}")

    def client(self, role: ClientRole = ClientRole.WORKER) -> Client:
        return Client(self.address, options=ClientOptions(role=role, client_id=role.name.encode().ljust(16, b"\0")))

    def register_pool(self) -> None:
        with self.client(ClientRole.POOL_HOLDER) as holder:
            holder.register_pool(POOL)


@pytest.fixture
def lives() -> Iterator[Lives]:
    with tempfile.TemporaryDirectory(prefix="rp", dir="/tmp") as folder:
        lives = Lives(Path(folder), count=2)
        yield lives
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                os.kill(lives.pid, signal.SIGKILL)
            if lives.shell.poll() is None and (line := lives.shell.stdout.readline()):
                lives.pid = json.loads(line)["pid"]
        lives.shell.communicate(timeout=30)


def fill(file: Path) -> None:
    """Take all the space that is left."""
    with file.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


def namespace(number: int) -> Namespace:
    return Namespace(tenant="t" * 500, cache_salt=f"{number}" * 100)


def prompt(number: int) -> list[int]:
    return [number * 10 + token for token in range(2 * BLOCK_SIZE)] + [1]


def store(client: Client, number: int) -> None:
    with client.acquire(prompt(number), namespace=namespace(number)) as sequence:
        sequence.commit(2 * BLOCK_SIZE)


def cached(client: Client, number: int) -> int:
    return client.match(prompt(number), namespace=namespace(number)).cached_tokens


def test_a_full_file_system_refuses_new_keys_and_loses_nothing(lives: Lives) -> None:
    lives.wait_ready()
    lives.register_pool()
    with lives.client() as client:
        for number in range(5):
            store(client, number)
        fill(lives.file("filler"))
        stored = 5
        with pytest.raises(DirectoryNoSpace, match="No space left on device"):
            for stored in range(5, 100):
                store(client, stored)
        for number in range(stored):  # what is known goes on: hits, and new blocks in known namespaces
            assert cached(client, number) == 2 * BLOCK_SIZE
            with client.acquire([*prompt(number), *range(50)], namespace=namespace(number)) as sequence:
                sequence.commit(40)
        assert cached(client, stored) == 0
        assert client.check().violations == ()
        assert client.stats().cache.held_blocks == 0
        lives.file("filler").unlink()
        store(client, stored)
        fill(lives.file("filler"))
        lives.kill()

    lives.wait_ready()
    lives.register_pool()
    with lives.client() as client:
        assert [cached(client, number) for number in range(stored + 1)] == [2 * BLOCK_SIZE] * (stored + 1)
        assert client.check().violations == ()
