"""The worker process: load the model, attach to the pool, serve, and go on through restarts of the manager."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.address import parse_address
from radixpool.rpc.errors import ManagerUnavailable
from radixpool.rpc.worker.cache_port import CacheLost
from radixpool.rpc.worker.engine import Engine
from radixpool.rpc.worker.errors import InternalError
from radixpool.rpc.worker.limits import EngineLimits
from radixpool.rpc.worker.manager_link import ManagerLink
from radixpool.rpc.worker.model import ModelRunner, end_of_sequence_ids, load_model
from radixpool.rpc.worker.model_source import ModelSource
from radixpool.rpc.worker.server import require_local, start_server
from radixpool.rpc.worker.service import WorkerServicer

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.05
_STOP_GRACE_S = 5.0
_RECONNECT_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a worker behaves.

    manager, listen: addresses (`unix:/path` or HOST:PORT; port 0 takes a free one).
    name: shown to operators.
    credentials: file of the tokens that callers need, as a manager's; empty lets in whoever can reach the address.
    token_budget, reserve_tokens, max_running, max_waiting: see `EngineLimits`.
    connect_timeout_s: how long manager and pool may be out of reach at the start.
    """

    manager: str
    listen: str
    name: str = "worker"
    credentials: str = ""
    token_budget: int = 256
    reserve_tokens: int = 64
    max_running: int = 64
    max_waiting: int = 256
    connect_timeout_s: float = 60.0
    stop: threading.Event = field(default_factory=threading.Event)


def check_options(options: WorkerOptions) -> None:
    """Raise ValueError for an address that is malformed, or that `listen` must not be."""
    parse_address(options.manager)
    require_local(options.listen)


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
        servicer = WorkerServicer(
            engine, lambda: (link.pool.spec, link.pool_id), name=options.name, context_tokens=source.context_tokens
        )
        max_requests = options.max_running + options.max_waiting
        server = start_server(
            servicer, listen=options.listen, max_requests=max_requests, credentials=options.credentials
        )
        try:
            on_ready(server.address)
            _drive(engine, runner, link, options.stop)
        finally:
            engine.fail_all(ManagerUnavailable("the worker is stopping"))
            server.stop(_STOP_GRACE_S)
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
            _reconnect(runner, link, stop)
        except Exception:
            log.exception("a step failed; its requests end, the worker goes on")
            engine.fail_all(InternalError("the worker failed; see its log"))
            _reconnect(runner, link, stop)  # gives back what the requests held


def _reconnect(runner: ModelRunner, link: ManagerLink, stop: threading.Event) -> None:
    if stop.wait(_RECONNECT_PAUSE_S):
        return
    try:
        link.connect()
    except RadixPoolError:
        if stop.is_set():
            return
        raise
    runner.use_pool(link.pool)  # refuses one of another shape
    log.info("connected again")
