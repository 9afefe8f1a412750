"""Which server should carry the service? One servicer and engine behind several servers, under the same loads.

    python bench/rpc_models.py                     every model that is installed, three times, interleaved
    python bench/rpc_models.py --model sync --model aio --rounds 500

Models: `sync` is grpcio's server with a thread pool and the interceptors that `radixpool serve` has; `bare` is the same
without interceptors; `aio` is grpc.aio, one event loop and no lock to wait for; `native` is the PyPI package
pygrpc-native, which takes grpcio's interceptors. Each runs with gRPC's event engine and without it, as far as it uses
it. Figures are work over CPU time of the server process, which is pinned to one core, the client to another.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import click
import grpc
import rpc_load as load
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.progress import track
from rich.table import Table

from radixpool.rpc import limits
from radixpool.rpc.cli.serve import calm_collector
from radixpool.rpc.client import Client, ClientOptions, ClientRole
from radixpool.rpc.manager.cache_service import CacheService
from radixpool.rpc.manager.engine import Engine
from radixpool.rpc.manager.interceptor import ErrorInterceptor
from radixpool.rpc.manager.options import ManagerOptions
from radixpool.rpc.manager.recovery import open_former_life
from radixpool.rpc.metrics import ObserverInterceptor, RpcMetrics
from radixpool.rpc.security.interceptor import AuthInterceptor
from radixpool.v1 import cache_pb2_grpc

MODELS = ("sync", "bare", "aio", "native")
ENGINES = {"event engine": "", "polling": "-event_engine_listener,-event_engine_client"}
NUM_BLOCKS = 65_536
SIZE = 16
_OPTIONS = (("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),)


@dataclass(frozen=True, slots=True)
class Figures:
    """Lifecycles a second and server core under each load, and the median milliseconds of a sequential call."""

    unary: float
    outstanding: float
    session: float
    batch: float
    p50_ms: float


class _Async:
    """A servicer for grpc.aio: every handler runs in the loop, one at a time."""

    def __init__(self, service: CacheService) -> None:
        for name in dir(cache_pb2_grpc.CacheServiceServicer):
            if name[0].isupper() and name != "Session":
                setattr(self, name, _in_loop(getattr(service, name)))
        self._service = service

    async def Session(self, requests: Any, context: Any) -> Any:  # noqa: N802 - the method as the descriptor has it
        async for request in requests:
            for reply in self._service.Session(iter((request,)), context):
                yield reply


def _in_loop(handler: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: Any) -> Any:
        return handler(request, context)

    return handle


def _serve(model: str, address: str, directory: str) -> None:
    options = ManagerOptions(
        listen=address,
        num_blocks=NUM_BLOCKS,
        block_size=load.BLOCK_SIZE,
        directory=directory,
        lease_ttl_ms=600_000,
    )
    service = CacheService(Engine(options, former_life=open_former_life(options)))
    if model == "aio":
        asyncio.run(_serve_aio(service, address))
        return
    interceptors = (ObserverInterceptor(RpcMetrics(CollectorRegistry())), AuthInterceptor(None), ErrorInterceptor())
    make: Callable[..., Any] = grpc.server
    if model == "native":
        import pygrpc_native

        make = pygrpc_native.server
    server = make(
        ThreadPoolExecutor(limits.UNARY_THREADS),
        interceptors=() if model == "bare" else interceptors,
        options=_OPTIONS,
    )
    cache_pb2_grpc.add_CacheServiceServicer_to_server(service, server)
    server.add_insecure_port(address)
    server.start()
    _ready()
    server.wait_for_termination()


def _ready() -> None:
    calm_collector()
    print("ready", flush=True)


async def _serve_aio(service: CacheService, address: str) -> None:
    server = grpc.aio.server(options=_OPTIONS)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(_Async(service), server)
    server.add_insecure_port(address)
    await server.start()
    _ready()
    await server.wait_for_termination()


def measure(model: str, experiments: str, rounds: int) -> Figures:
    """Put every load on one server in a process of its own."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="rpmodels") as folder:
        address = f"unix:{folder}/s.sock"
        command = [sys.executable, __file__, "--serve", model, address, f"{folder}/directory"]
        environment = {**os.environ, "GRPC_EXPERIMENTS": experiments, "GRPC_VERBOSITY": "ERROR"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            os.sched_setaffinity(process.pid, {cores[0]})
            assert process.stdout is not None and process.stdout.readline() == "ready\n", "the server did not start"
            return _loads(process.pid, address, rounds)
        finally:
            process.kill()
            process.communicate()


def _loads(pid: int, address: str, rounds: int) -> Figures:
    source = load.prompts()
    figures: dict[str, float] = {}

    def per_core(name: str, units: int, run: Callable[[], list[float]]) -> list[float]:
        before = load.cpu_s(pid)
        took = run()
        figures[name] = units / (load.cpu_s(pid) - before)
        return took

    with Client(address, options=ClientOptions(role=ClientRole.WORKER)) as client, client.session() as session:
        load.batched_lifecycles(session, source, load.WARM_UP_LIFECYCLES, size=SIZE)
        took = per_core("unary", rounds, lambda: load.unary_lifecycles(client, source, rounds))
        count = 4 * rounds // SIZE * SIZE
        per_core("session", count, lambda: load.batched_lifecycles(session, source, count, size=SIZE))
        per_core("batch", count, lambda: load.batched_lifecycles(client, source, count, size=SIZE))
    calls = lambda: asyncio.run(load.outstanding_calls(address, source, rounds, outstanding=64))  # noqa: E731
    per_core("outstanding", rounds, calls)
    return Figures(p50_ms=1e3 * statistics.median(took), **figures)


def show(results: dict[tuple[str, str], list[Figures]], console: Console) -> None:
    """Print the medians, with the lowest and the highest of each."""
    table = Table(title="lifecycles a second and server core, 4,096-token requests, directory on, unix socket")
    for column in ("server", "sockets by", "unary", "unary, 64 outstanding", "Batch of 16", "Session of 16", "p50 ms"):
        table.add_column(column, justify="left" if column in ("server", "sockets by") else "right")
    for (model, engine), runs in results.items():
        cells = []
        for field in ("unary", "outstanding", "batch", "session", "p50_ms"):
            values = sorted(getattr(run, field) for run in runs)
            form = "{:.2f}" if field == "p50_ms" else "{:,.0f}"
            middle, low, high = (form.format(v) for v in (statistics.median(values), values[0], values[-1]))
            cells.append(f"{middle} ({low}-{high})")
        table.add_row(model, engine, *cells)
    console.print(table)


@click.command(help=__doc__)
@click.option("--model", "models", type=click.Choice(MODELS), multiple=True, help="Only these.")
@click.option("--rounds", default=600, show_default=True, help="Lifecycles of each measurement.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each model.")
@click.option("--serve", nargs=3, hidden=True, help="Be one server: model, address, directory.")
def main(models: tuple[str, ...], rounds: int, repeats: int, serve: tuple[str, str, str] | None) -> None:
    """Run the comparison."""
    if serve:
        _serve(*serve)
        return
    console = Console()
    if find_spec("pygrpc_native") is None:
        if "native" in models:
            raise click.UsageError("pygrpc-native is not installed: pip install pygrpc-native")
        console.print("pygrpc-native is not installed and left out")
        models = models or MODELS[:-1]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise click.UsageError("two cores are needed, one for the server and one for the client")
    os.sched_setaffinity(0, set(cores[1:]))
    cases = [(model, engine) for model in models or MODELS for engine in ENGINES]
    results: dict[tuple[str, str], list[Figures]] = {case: [] for case in cases}
    for model, engine in track(cases * repeats, description="measuring", console=Console(stderr=True)):
        results[model, engine].append(measure(model, ENGINES[engine], rounds))
    show(results, load.wide_console())


if __name__ == "__main__":
    main()
