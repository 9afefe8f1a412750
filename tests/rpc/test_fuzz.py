"""Messages made at random from the descriptors, against a live manager: a typed error or an answer, and no harm done.

CI runs a short time; `make fuzz EXAMPLES=100000` runs long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixpool.rpc import limits
from radixpool.rpc.manager import ManagerOptions, ManagerServer
from radixpool.v1 import admin_pb2, cache_pb2, common_pb2, pool_pb2

EXAMPLES = int(os.environ.get("RADIXPOOL_FUZZ_EXAMPLES", "200"))
TYPED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
}
SERVICES = [
    module.DESCRIPTOR.services_by_name[name]
    for module, name in ((cache_pb2, "CacheService"), (pool_pb2, "PoolService"), (admin_pb2, "AdminService"))
]
METHODS = [method for service in SERVICES for method in service.methods if not method.server_streaming]
CLIENT = b"f" * 16
VALID_EPOCH = 2**53
"""Stands for the client's epoch of the moment."""
SLOTS = [b"handle slot %03d." % n for n in range(20)]
"""Stand for the handles of the last acquires, in messages that are drawn before it is known what they are."""


class Target:
    """A manager, a client that it knows, and handles that were alive at some time."""

    def __init__(self) -> None:
        self.server = ManagerServer(ManagerOptions(listen="127.0.0.1:0", num_blocks=32, block_size=4))
        self.server.start()
        self.channel = grpc.insecure_channel(self.server.address)
        self.handles = {slot: bytes(limits.HANDLE_BYTES) for slot in SLOTS}
        self.num_acquired = 0

    def remember(self, reply: bytes) -> None:
        """Put the handle of an acquire into the next slot."""
        handle = cache_pb2.AcquireResponse.FromString(reply).handle
        if handle:
            self.handles[SLOTS[self.num_acquired % len(SLOTS)]] = handle
            self.num_acquired += 1

    def payload(self, request: Message) -> bytes:
        """Return the message's bytes with what stands for handles and epochs replaced."""
        if "header" in request.DESCRIPTOR.fields_by_name and request.header.epoch == VALID_EPOCH:
            request.header.epoch = self.header().epoch
        packed = request.SerializeToString()
        for slot, handle in self.handles.items():
            packed = packed.replace(slot, handle)
        return packed

    def header(self) -> common_pb2.RequestHeader:
        epochs = [lease.epoch for lease in self.server.engine.leases if lease.client_id == CLIENT]
        if not epochs:
            epochs = [self.server.engine.register_client(CLIENT, name="fuzz", role=cache_pb2.CLIENT_ROLE_WORKER)]
        return common_pb2.RequestHeader(client_id=CLIENT, epoch=epochs[0])

    def call(self, method: MethodDescriptor, payload: bytes) -> tuple[grpc.StatusCode, str, bytes]:
        path = f"/{method.containing_service.full_name}/{method.name}"
        try:
            reply = self.channel.unary_unary(path)(payload, timeout=20)
        except grpc.RpcError as error:
            return error.code(), error.details() or "", b""
        return grpc.StatusCode.OK, "", reply

    def close(self) -> None:
        self.channel.close()
        self.server.stop(0)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.close()


@pytest.fixture(autouse=True)
def one_pool_only(monkeypatch):
    """Keep inspections small, so that a run is about messages and not about work."""
    monkeypatch.setattr(limits, "MAX_INSPECTED", 100)


INTEGERS = st.sampled_from([0, 1, 2, 3, 4, 7, 31, 32, 33, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
PACKED = st.lists(st.integers(0, 3), max_size=40).map(lambda ids: b"".join(i.to_bytes(4, "little") for i in ids))


def value(field: FieldDescriptor, depth: int) -> st.SearchStrategy:
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            return message(field.message_type, depth + 1)
        case FieldDescriptor.TYPE_BYTES:
            return st.one_of(PACKED, st.sampled_from(SLOTS), st.binary(max_size=70), st.just(CLIENT))
        case FieldDescriptor.TYPE_STRING:
            return st.one_of(st.just(""), st.text(max_size=8), st.just("x" * 600))
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_ENUM:
            return st.integers(0, 9)
        case FieldDescriptor.TYPE_UINT32:
            return INTEGERS.map(lambda number: number & 0xFFFF_FFFF)
        case FieldDescriptor.TYPE_INT32:
            return INTEGERS.map(lambda number: (number & 0xFFFF_FFFF) - 2**31)
        case _:
            return INTEGERS


@st.composite
def step_update(draw: st.DrawFn) -> cache_pb2.StepUpdate:
    """Columns that fit together: random ones would almost never get past the first check."""
    handles = draw(st.lists(st.sampled_from(SLOTS), unique=True, max_size=8))
    counts = [draw(st.integers(0, 5)) for _ in handles]
    columns = {"token_counts": counts, "commit_upto_tokens": [draw(INTEGERS) & 0xFFFF_FFFF for _ in handles]}
    packed = {name: b"".join(n.to_bytes(4, "little") for n in column) for name, column in columns.items()}
    return cache_pb2.StepUpdate(handles=b"".join(handles), tokens=bytes(4 * sum(counts)), **packed)


@st.composite
def message(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    if descriptor is common_pb2.RequestHeader.DESCRIPTOR and draw(st.integers(0, 9)):
        return common_pb2.RequestHeader(client_id=CLIENT, epoch=VALID_EPOCH)
    if descriptor is cache_pb2.StepUpdate.DESCRIPTOR and draw(st.integers(0, 3)):
        return draw(step_update())
    built = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.message_type is not None and depth > 4:
            continue
        if not draw(st.booleans() if field.name not in ("header", "handle", "tokens") else st.integers(0, 9)):
            continue
        drawn = value(field, depth)
        if field.is_repeated:
            for item in draw(st.lists(drawn, max_size=4)):
                getattr(built, field.name).append(item)
        elif field.message_type is not None:
            getattr(built, field.name).CopyFrom(draw(drawn))
        else:
            setattr(built, field.name, draw(drawn))
    return built


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_message_gets_a_typed_answer_and_does_no_harm(target, data):
    method = data.draw(st.sampled_from(METHODS), label="method")
    request = data.draw(message(method.input_type), label="request")
    code, details, reply = target.call(method, target.payload(request))
    assert code in TYPED, details
    if method.name == "Acquire":
        target.remember(reply)
    target.server.engine.check()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_bytes_are_refused_or_read_as_some_message(target, data):
    method = data.draw(st.sampled_from(METHODS), label="method")
    payload = bytearray(target.payload(data.draw(message(method.input_type), label="request")))
    for _ in range(data.draw(st.integers(0, 3))):
        if payload:
            payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    del payload[data.draw(st.integers(0, len(payload))) :]
    code, details, _ = target.call(method, bytes(payload))
    assert code in TYPED, details
    target.server.engine.check()


def test_malformed_requests_do_not_use_up_the_connection(target):
    method = SERVICES[0].methods_by_name["Acquire"]
    for _ in range(limits.MAX_CONCURRENT_RPCS + 100):
        code, details, _ = target.call(method, b"\xff\xff")
        assert (code, details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the request's bytes are not a message of its type",
        )
    stream = target.channel.stream_stream("/radixpool.v1.CacheService/Session")
    with pytest.raises(grpc.RpcError, match="not a message of its type"):
        next(stream(iter([b"\xff\xff"])))


def test_a_million_empty_operations_are_refused_at_once(target):
    request = cache_pb2.BatchRequest(header=target.header(), operations=[cache_pb2.Operation()] * 1_000_000)
    code, details, _ = target.call(SERVICES[0].methods_by_name["Batch"], request.SerializeToString())
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "operations: the limit is 4096, got 1000000")
    target.server.engine.check()


def test_64_mib_messages_are_cut_off(target):  # how much memory they take: test_connections.py
    method = SERVICES[0].methods_by_name["Match"]
    for _ in range(3):
        assert target.call(method, bytes(64 << 20))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    target.server.engine.check()


def test_streams_that_never_read_stop_nobody(target):
    stub = target.channel.stream_stream(
        "/radixpool.v1.CacheService/Session", request_serializer=cache_pb2.SessionRequest.SerializeToString
    )
    big = cache_pb2.Operation(match=cache_pb2.MatchRequest(tokens=bytes(4096)))
    requests = [cache_pb2.SessionRequest(header=target.header(), operations=[big] * 100) for _ in range(200)]
    calls = [stub(iter(requests)) for _ in range(8)]
    for _ in range(20):
        assert target.call(SERVICES[0].methods_by_name["GetInfo"], b"")[0] is grpc.StatusCode.OK
    for call in calls:
        call.cancel()
    target.server.engine.check()
