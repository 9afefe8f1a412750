"""Does a client that dies with 100,000 blocks stall the others?

    python bench/expiry.py                     1,563 sequences of 64 blocks, 12 of 8,192 and 60,000 of one

A manager runs as a process, with a directory. One client acquires all the blocks and falls silent; another one acquires
and releases a short prompt all the while. Its latencies before the expiry and during it (from the end of the lease to
the last block that came back) stand side by side: an expiry is swept in slices (`rpc/limits.py`), between which others
get the lock. Report of such a stall elsewhere: Mooncake #3940.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import rpc_load as load
from rich.console import Console
from rich.table import Table

from radixpool.rpc import operations as ops
from radixpool.rpc.client import Client, ClientOptions

NUM_BLOCKS, LEASE_MS = 131_072, 10_000
SHAPES = {"64 blocks each": (1_563, 64), "8,192 blocks each": (12, 8_192), "1 block each": (60_000, 1)}
BATCH = 256
BATCH_BLOCKS = 8_192
MIN_CALLS = 2_000


@dataclass(frozen=True, slots=True)
class Row:
    """One expiry; latencies of an acquire with its release, in ms."""

    held: str
    blocks: int
    before_p50: float
    before_p99: float
    during_p50: float
    during_p99: float
    during_max: float
    calls_during: int
    expiry_ms: float


def measure(held: str, sequences: int, blocks_each: int) -> Row:
    """Let one client die and another one go on."""
    with tempfile.TemporaryDirectory(prefix="rpexp", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        options = ("--lease-ttl-ms", str(LEASE_MS), "--log-level", "error")
        directory = Path(folder) / "directory"
        with load.running(f"unix:{folder}/m.sock", NUM_BLOCKS, directory=directory, options=options) as manager:
            return _measure(manager.address, held, sequences, blocks_each)


def _measure(address: str, held: str, sequences: int, blocks_each: int) -> Row:
    with Client(address) as living, Client(address, options=ClientOptions(name="dying")) as dying:
        _acquire_all(dying, sequences, blocks_each)
        before = [_call(living) for _ in range(MIN_CALLS)]
        assert dying._heartbeat is not None
        dying._heartbeat.stop()
        while not living.stats().service.expired_leases:
            time.sleep(0.001)
        started = time.perf_counter()
        during = [_call(living)]
        while living.stats().cache.num_sequences:
            during.append(_call(living))
        expiry_ms = (time.perf_counter() - started) * 1e3
    return Row(
        held,
        sequences * blocks_each,
        statistics.median(before),
        float(np.percentile(before, 99)),
        statistics.median(during),
        float(np.percentile(during, 99)),
        max(during),
        len(during),
        expiry_ms,
    )


def _acquire_all(client: Client, sequences: int, blocks_each: int) -> None:
    """Acquire and commit distinct prompts, many in one call."""
    at_once = max(1, min(BATCH, BATCH_BLOCKS // blocks_each))
    base = np.arange(blocks_each * load.BLOCK_SIZE, dtype=np.uint32)
    for first in range(0, sequences, at_once):
        numbers = range(first, min(first + at_once, sequences))
        acquired = client.batch(ops.Acquire(base + np.uint32(70_000 * n)) for n in numbers)
        client.batch(ops.Commit(each.handle, len(base)) for each in acquired if isinstance(each, ops.Acquired))


def _call(client: Client) -> float:
    started = time.perf_counter()
    client.acquire([1, 2, 3]).release()
    return (time.perf_counter() - started) * 1e3


@click.command(help=__doc__)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the rows to this file as well.")
def main(json_path: str | None) -> None:
    """Measure every shape and print a table."""
    rows = [measure(held, *shape) for held, shape in SHAPES.items()]
    table = Table("held", "blocks", "before p50", "p99", "during p50", "p99", "max, ms", "calls", "expiry, ms")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    Console().print(table)
    if json_path:
        Path(json_path).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
