"""The asyncio client of a worker, with the same names as the blocking `WorkerClient`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from radixpool.radix import Namespace
from radixpool.radix.namespace import DEFAULT_NAMESPACE
from radixpool.rpc.client.aio_sequence import AsyncSequence
from radixpool.rpc.client.channel import open_async_channel
from radixpool.rpc.client.continuing import continue_through_losses_async
from radixpool.rpc.client.worker import handle_request, prompt_request
from radixpool.rpc.convert import generate_event_from_wire, worker_status_from_wire
from radixpool.rpc.generation import GenerateEvent, SamplingParams, WorkerStatus
from radixpool.rpc.operations import Tokens
from radixpool.rpc.security.client import ClientSecurity
from radixpool.rpc.status import error_from_rpc
from radixpool.v1 import worker_pb2, worker_pb2_grpc


class AsyncWorkerClient:
    """A connection to one worker, for one event loop; an async context manager."""

    def __init__(self, address: str, *, timeout_s: float = 10.0, security: ClientSecurity | None = None) -> None:
        """`timeout_s` is for calls that do not stream; `security` None means what the environment says."""
        self._address = address
        self._channel = open_async_channel(address, security)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> AsyncWorkerClient:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, which stops generations that still stream."""
        await self._channel.close(None)

    def generate(
        self, tokens: Tokens, sampling: SamplingParams, *, namespace: Namespace = DEFAULT_NAMESPACE
    ) -> AsyncIterator[GenerateEvent]:
        """Continue a prompt that the worker acquires and releases. Closing the iterator stops the generation."""
        return self._stream(prompt_request(tokens, sampling, namespace))

    def generate_sequence(
        self, sequence: bytes | AsyncSequence, sampling: SamplingParams
    ) -> AsyncIterator[GenerateEvent]:
        """Continue a sequence that the caller acquired and releases afterwards.

        Given by its handle alone, the generation ends with `SequenceLost` or `UnknownSequence` when the manager
        restarts or the caller's lease is lost. Given the sequence itself, it is acquired again and goes on, with the
        same tokens as if nothing had happened (with a temperature: if there is a seed).
        """
        if isinstance(sequence, AsyncSequence):
            return continue_through_losses_async(self._continue, sequence, sampling)
        return self._continue(sequence, sampling)

    async def status(self) -> WorkerStatus:
        """Return what the worker runs and how busy it is."""
        try:
            reply = await self._stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, address=self._address) from None
        return worker_status_from_wire(reply)

    def _continue(self, handle: bytes, sampling: SamplingParams) -> AsyncGenerator[GenerateEvent, None]:
        return self._stream(handle_request(handle, sampling))

    async def _stream(self, request: worker_pb2.GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        call = self._stub.Generate(request)
        try:
            async for message in call:
                yield generate_event_from_wire(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error, address=self._address) from None
        finally:
            call.cancel()
