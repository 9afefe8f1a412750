"""The blocking client of a worker: streams generated tokens, asks how busy it is."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from radixpool.radix import Namespace
from radixpool.radix.namespace import DEFAULT_NAMESPACE
from radixpool.radix.tokens import pack_tokens
from radixpool.rpc.client.channel import open_channel
from radixpool.rpc.client.continuing import continue_through_losses
from radixpool.rpc.client.sequence import RemoteSequence
from radixpool.rpc.convert import (
    generate_event_from_wire,
    namespace_to_wire,
    sampling_to_wire,
    worker_status_from_wire,
)
from radixpool.rpc.generation import GenerateEvent, SamplingParams, WorkerStatus
from radixpool.rpc.operations import Tokens
from radixpool.rpc.security.client import ClientSecurity
from radixpool.rpc.status import error_from_rpc
from radixpool.v1 import worker_pb2, worker_pb2_grpc


def prompt_request(tokens: Tokens, sampling: SamplingParams, namespace: Namespace) -> worker_pb2.GenerateRequest:
    """Return the message that asks to continue a prompt."""
    prompt = worker_pb2.Prompt(tokens=pack_tokens(tokens), namespace=namespace_to_wire(namespace))
    return worker_pb2.GenerateRequest(prompt=prompt, sampling=sampling_to_wire(sampling))


def handle_request(handle: bytes, sampling: SamplingParams) -> worker_pb2.GenerateRequest:
    """Return the message that asks to continue a sequence of the caller's."""
    return worker_pb2.GenerateRequest(handle=handle, sampling=sampling_to_wire(sampling))


class WorkerClient:
    """A connection to one worker; a context manager."""

    def __init__(self, address: str, *, timeout_s: float = 10.0, security: ClientSecurity | None = None) -> None:
        """`timeout_s` is for calls that do not stream; `security` None means what the environment says."""
        self._address = address
        self._channel = open_channel(address, security)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._timeout_s = timeout_s

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, which stops generations that still stream."""
        self._channel.close()

    def generate(
        self, tokens: Tokens, sampling: SamplingParams, *, namespace: Namespace = DEFAULT_NAMESPACE
    ) -> Iterator[GenerateEvent]:
        """Continue a prompt that the worker acquires and releases. Closing the iterator stops the generation."""
        return self._stream(prompt_request(tokens, sampling, namespace))

    def generate_sequence(self, sequence: bytes | RemoteSequence, sampling: SamplingParams) -> Iterator[GenerateEvent]:
        """Continue a sequence that the caller acquired and releases afterwards.

        Given by its handle alone, the generation ends with `SequenceLost` or `UnknownSequence` when the manager
        restarts or the caller's lease is lost. Given the sequence itself, it is acquired again and goes on, with the
        same tokens as if nothing had happened (with a temperature: if there is a seed).
        """
        if isinstance(sequence, RemoteSequence):
            return continue_through_losses(self._continue, sequence, sampling)
        return self._continue(sequence, sampling)

    def _continue(self, handle: bytes, sampling: SamplingParams) -> Iterator[GenerateEvent]:
        return self._stream(handle_request(handle, sampling))

    def status(self) -> WorkerStatus:
        """Return what the worker runs and how busy it is."""
        try:
            reply = self._stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, address=self._address) from None
        return worker_status_from_wire(reply)

    def _stream(self, request: worker_pb2.GenerateRequest) -> Iterator[GenerateEvent]:
        call = self._stub.Generate(request)
        try:
            for message in call:
                yield generate_event_from_wire(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error, address=self._address) from None
        finally:
            call.cancel()  # type: ignore[no-untyped-call]
