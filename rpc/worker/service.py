"""`WorkerService` over an engine: requests in, streams of tokens out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NoReturn

import grpc
import numpy as np
from grpc_status import rpc_status

from radixpool.radix import Namespace
from radixpool.radix.tokens import pack_tokens
from radixpool.rpc import limits
from radixpool.rpc.convert import (
    generate_event_to_wire,
    namespace_from_wire,
    pool_spec_to_wire,
    sampling_from_wire,
)
from radixpool.rpc.generation import GenerateFinished
from radixpool.rpc.pool_types import PoolSpec
from radixpool.rpc.security.identity import current_tenant
from radixpool.rpc.status import status_from_error
from radixpool.rpc.worker.engine import Engine
from radixpool.rpc.worker.requests import GenerateCall, HandleSource, PromptSource
from radixpool.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)


class _Hangup(Exception):
    """The caller has gone: wakes the thread that streams to it."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serve one engine. `pool` returns what it is attached to now, with its id."""

    def __init__(
        self, engine: Engine, pool: Callable[[], tuple[PoolSpec, bytes]], *, name: str, context_tokens: int
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._name = name
        self._context_tokens = context_tokens

    def Generate(
        self, request: worker_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.GenerateResponse]:
        """Queue the request and stream its events; a caller that hangs up cancels it."""
        try:
            call = self._call_from_wire(request)
            self._engine.submit(call)
        except Exception as error:
            _abort(context, error)
        if not context.add_callback(lambda: self._hang_up(call)):
            self._hang_up(call)  # it was gone already
        while True:
            event = call.events.get()
            if isinstance(event, _Hangup):
                return
            if isinstance(event, Exception):
                _abort(context, event)
            yield generate_event_to_wire(event)
            if isinstance(event, GenerateFinished):
                return

    def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> worker_pb2.GetStatusResponse:
        """Return what the worker runs and how busy it is."""
        status = self._engine.status()
        spec, pool_id = self._pool()
        return worker_pb2.GetStatusResponse(
            name=self._name,
            model=spec.model,
            pool=pool_spec_to_wire(spec),
            pool_id=pool_id,
            max_model_tokens=self._context_tokens,
            running_sequences=status.running_sequences,
            waiting_sequences=status.waiting_sequences,
            completed_steps=status.completed_steps,
            computed_tokens=status.computed_tokens,
            reused_tokens=status.reused_tokens,
        )

    def _hang_up(self, call: GenerateCall) -> None:
        self._engine.cancel(call)
        call.events.put(_Hangup())

    def _call_from_wire(self, request: worker_pb2.GenerateRequest) -> GenerateCall:
        """Return the engine's form of a request. Raises ValueError naming the field that is wrong."""
        sampling = sampling_from_wire(request.sampling)
        match request.WhichOneof("source"):
            case "prompt":
                tokens = np.frombuffer(pack_tokens(request.prompt.tokens), dtype="<u4")
                namespace = self._own_namespace(namespace_from_wire(request.prompt.namespace))
                return GenerateCall(PromptSource(tokens, namespace), sampling)
            case "handle":
                if len(request.handle) != limits.HANDLE_BYTES:
                    raise ValueError(f"handle must be {limits.HANDLE_BYTES} bytes, got {len(request.handle)}")
                return GenerateCall(HandleSource(request.handle, current_tenant()), sampling)
            case _:
                raise ValueError("source must be a handle or a prompt, got neither")

    def _own_namespace(self, namespace: Namespace) -> Namespace:
        """Return `namespace` for the model that runs here; another model's is refused."""
        spec, _ = self._pool()
        for field, own in (("model", spec.model), ("revision", spec.revision)):
            asked = getattr(namespace, field)
            if asked not in ("", own):
                raise ValueError(f"namespace.{field} must be {own!r} or left out, got {asked!r}")
        return Namespace(
            model=spec.model,
            revision=spec.revision,
            adapter=namespace.adapter,
            adapter_generation=namespace.adapter_generation,
            tenant=namespace.tenant,
            cache_salt=namespace.cache_salt,
        )


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    status = status_from_error(error)
    if status.code == grpc.StatusCode.INTERNAL.value[0]:
        log.error("a request failed", exc_info=error)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status does not return")
