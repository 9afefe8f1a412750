"""The worker process: load the model, attach to the pool, serve, and go on through restarts of the manager."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from radixpool.kernels.spec import Backend
from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.address import parse_address
from radixpool.rpc.errors import ManagerUnavailable, SequenceLost
from radixpool.rpc.pool.cuda import CudaDevice, CudaUnavailable
from radixpool.rpc.pool.device import CPU, Device
from radixpool.rpc.pool.tensors import KvPool
from radixpool.rpc.worker.cache_port import CacheLost
from radixpool.rpc.worker.engine import Engine
from radixpool.rpc.worker.errors import DeviceLost, InternalError
from radixpool.rpc.worker.limits import EngineLimits
from radixpool.rpc.worker.manager_link import ManagerLink
from radixpool.rpc.worker.model import ModelRunner, computed_in, end_of_sequence_ids, load_model
from radixpool.rpc.worker.model_source import ModelSource
from radixpool.rpc.worker.server import require_local, start_server
from radixpool.rpc.worker.service import WorkerServicer

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.05
_STOP_GRACE_S = 5.0
_RECONNECT_PAUSE_S = 0.2
_CPU_TOKEN_BUDGET = 256
_GPU_TOKEN_BUDGET = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a worker behaves.

    manager, listen: addresses (`unix:/path` or HOST:PORT; port 0 takes a free one).
    name: shown to operators.
    credentials: file of the tokens that callers need, as a manager's; empty lets in whoever can reach the address.
    device: where the model runs, and the pool lies.
    attention: which kernels attend; None: plain torch on the CPU, Triton on a GPU.
    graphed_tokens: steps of up to so many tokens run as CUDA graphs; 0 for none, None for as many as it pays.
    token_budget: see `EngineLimits`; 0: 256 on the CPU, 4096 on a GPU.
    reserve_tokens, max_running, max_waiting: see `EngineLimits`.
    connect_timeout_s: how long manager and pool may be out of reach at the start.
    """

    manager: str
    listen: str
    name: str = "worker"
    credentials: str = ""
    device: Device = CPU
    attention: Backend | None = None
    graphed_tokens: int | None = None
    token_budget: int = 0
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
    """Serve until `options.stop` is set; `on_ready` is called once with the address, unless it is stopped before.

    Raises `ModelUnavailable`, `PoolMismatch`, `ManagerUnavailable`, `AddressInUse`, `CudaUnavailable`, `DeviceLost`.
    """
    require_device(options.device)
    link = ManagerLink(options.manager, source, name=options.name, stop=options.stop, device=options.device)
    try:
        log.info("waiting for the manager at %s and its pool", options.manager)
        if not _connect(link, options.stop, options.connect_timeout_s):  # before the weights: a misfit shows at once
            return
        log.info("attached to pool %s; loading %s onto %s", link.pool_id.hex(), source.name, options.device)
        model = _load(source, options.device, link.pool)
        runner = ModelRunner(model, link.pool, backend=options.attention)
        if options.device.is_cuda:
            _prepare(runner, options)
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


def require_device(device: Device) -> None:
    """Raise `CudaUnavailable` unless torch can run on `device`."""
    if device.cuda_index is None:
        return
    CudaDevice(device.cuda_index)
    if not torch.cuda.is_available():
        raise CudaUnavailable(f"device {device}: torch {torch.__version__} cannot use the CUDA driver of this machine")


def _load(source: ModelSource, device: Device, pool: KvPool) -> Any:
    """Load the model in the element type that it computes in over `pool`."""
    if device.cuda_index is not None:
        torch.cuda.set_device(device.cuda_index)
    return load_model(source, dtype=computed_in(pool.k[0].dtype, device), device=str(device))


def _prepare(runner: ModelRunner, options: WorkerOptions) -> None:
    """Compile and capture before the first request comes."""
    started = time.monotonic()
    graphed = 0
    if options.attention != "torch":  # which plans on the host, anew for each step
        graphed = capture_graphs(runner, options.graphed_tokens, token_budget=_token_budget(options))
    runner.warm_up(_token_budget(options))
    ready_s = time.monotonic() - started
    log.info("kernels are ready after %.1f s, and graphs for steps of up to %d tokens", ready_s, graphed)


def capture_graphs(runner: ModelRunner, graphed_tokens: int | None, *, token_budget: int) -> int:
    """Capture CUDA graphs for steps of up to `graphed_tokens`, by default as many as it pays; return for how many."""
    if graphed_tokens is None:
        graphed_tokens = runner.launch_bound_tokens(token_budget)
    graphed = min(graphed_tokens, token_budget)
    if graphed:
        runner.capture_graphs(graphed)
    return graphed


def _token_budget(options: WorkerOptions) -> int:
    return options.token_budget or (_GPU_TOKEN_BUDGET if options.device.is_cuda else _CPU_TOKEN_BUDGET)


def _engine_limits(
    source: ModelSource, options: WorkerOptions, link: ManagerLink, eos_token_ids: frozenset[int]
) -> EngineLimits:
    return EngineLimits(
        num_blocks=link.pool.spec.num_blocks,
        block_size=link.pool.spec.block_size,
        context_tokens=source.context_tokens,
        vocab_size=source.vocab_size,
        eos_token_ids=eos_token_ids,
        token_budget=_token_budget(options),
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
            engine.interrupt(SequenceLost(f"the sequence was lost with the manager: {lost}"))
            _reconnect(runner, link, stop)
        except DeviceLost:
            raise
        except Exception:
            log.exception("a step failed; its requests end, the worker goes on")
            engine.fail_all(InternalError("the worker failed; see its log"))
            _reconnect(runner, link, stop)  # gives back what the requests held


def _connect(link: ManagerLink, stop: threading.Event, timeout_s: float | None = None) -> bool:
    """Connect, waiting for manager and pool; False when stopped meanwhile."""
    try:
        link.connect(timeout_s)
    except RadixPoolError:
        if not stop.is_set():
            raise
        return False
    return True


def _reconnect(runner: ModelRunner, link: ManagerLink, stop: threading.Event) -> None:
    if stop.wait(_RECONNECT_PAUSE_S) or not _connect(link, stop):
        return
    runner.use_pool(link.pool)  # refuses one of another shape
    log.info("connected again")
