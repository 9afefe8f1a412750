"""The worker process: load the model, attach to the pool, serve, and go on through restarts of the manager."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc import limits
from radixpool.rpc.address import TcpAddress, UnixAddress, parse_address
from radixpool.rpc.errors import AddressInUse, ManagerUnavailable
from radixpool.rpc.pool.sockets import remove_stale_socket
from radixpool.rpc.worker.cache_port import CacheLost
from radixpool.rpc.worker.engine import Engine
from radixpool.rpc.worker.limits import EngineLimits
from radixpool.rpc.worker.manager_link import ManagerLink
from radixpool.rpc.worker.model import ModelRunner, end_of_sequence_ids, load_model
from radixpool.rpc.worker.model_source import ModelSource
from radixpool.rpc.worker.service import WorkerServicer
from radixpool.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.05
_STOP_GRACE_S = 5.0
_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a worker behaves.

    manager, listen: addresses (`unix:/path` or HOST:PORT; port 0 takes a free one).
    name: shown to operators.
    token_budget, reserve_tokens, max_running, max_waiting: see `EngineLimits`.
    connect_timeout_s: how long manager and pool may be out of reach at the start.
    """

    manager: str
    listen: str
    name: str = "worker"
    token_budget: int = 256
    reserve_tokens: int = 64
    max_running: int = 64
    max_waiting: int = 256
    connect_timeout_s: float = 60.0
    stop: threading.Event = field(default_factory=threading.Event)


def run_worker(source: ModelSource, options: WorkerOptions, *, on_ready: Callable[[str], None]) -> None:
    """Serve until `options.stop` is set; `on_ready` is called once with the address.

    Raises `ModelUnavailable`, `PoolMismatch`, `ManagerUnavailable`, `AddressInUse`.
    """
    link = ManagerLink(options.manager, source, name=options.name, stop=options.stop)
    try:
        link.connect(options.connect_timeout_s)  # before the weights: a pool that does not fit shows at once
        model = load_model(source)
        runner = ModelRunner(model, link.pool)
        engine = Engine(link, runner, limits=_engine_limits(source, options, link, end_of_sequence_ids(model)))
        server, address = _start_server(engine, link, source, options)
        try:
            on_ready(address)
            _drive(engine, runner, link, options.stop)
        finally:
            engine.fail_all(ManagerUnavailable("the worker is stopping"))
            server.stop(_STOP_GRACE_S).wait()
    finally:
        link.close()


def _engine_limits(
    source: ModelSource, options: WorkerOptions, link: ManagerLink, eos_token_ids: frozenset[int]
) -> EngineLimits:
    return EngineLimits(
        num_blocks=link.pool.spec.num_blocks,
        block_size=link.pool.spec.block_size,
        context_tokens=source.context_tokens,
        vocab_size=source.vocab_size,
        eos_token_ids=eos_token_ids,
        token_budget=options.token_budget,
        reserve_tokens=options.reserve_tokens,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
    )


def _drive(engine: Engine, runner: ModelRunner, link: ManagerLink, stop: threading.Event) -> None:
    """Step until stopped. When the manager is lost, wait for it and go on with the requests that can be redone."""
    while not stop.is_set():
        try:
            if not engine.step():
                engine.wait_for_work(_IDLE_WAIT_S)
        except CacheLost as lost:
            log.warning("lost the manager: %s", lost)
            engine.interrupt(ManagerUnavailable(f"the sequence was lost with the manager: {lost}"))
            try:
                link.connect()
            except RadixPoolError:
                if not stop.is_set():
                    raise
            runner.use_pool(link.pool)  # refuses one of another shape
            log.info("connected again")


def _start_server(
    engine: Engine, link: ManagerLink, source: ModelSource, options: WorkerOptions
) -> tuple[grpc.Server, str]:
    """Start serving; return the server and the address that clients use."""
    threads = options.max_running + options.max_waiting
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="radixpool-rpc"),
        maximum_concurrent_rpcs=threads,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
        ],
    )
    servicer = WorkerServicer(
        engine, lambda: (link.pool.spec, link.pool_id), name=options.name, context_tokens=source.context_tokens
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    health_servicer = health.HealthServicer()
    health_servicer.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = _bind(server, options.listen)
    server.start()
    return server, address


def _bind(server: grpc.Server, listen: str) -> str:
    """Bind to a local address. Raises ValueError for one that others can reach, `AddressInUse` for a taken one."""
    parsed = parse_address(listen)
    if not parsed.is_local:
        raise ValueError(f"listen must be a unix socket or a loopback address, got {listen!r}")
    try:
        if isinstance(parsed, UnixAddress):
            remove_stale_socket(parsed.path)
        port = server.add_insecure_port(parsed.target)
    except (RuntimeError, OSError) as error:
        raise AddressInUse(f"listen: cannot serve at {listen}: {error}") from error
    return TcpAddress(parsed.host, port).target if isinstance(parsed, TcpAddress) else parsed.target
