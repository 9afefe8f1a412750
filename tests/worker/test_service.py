"""The worker's gRPC face, over a real socket, with the model without weights behind it."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from radixpool.radix import Namespace, UnknownSequence
from radixpool.rpc.client import WorkerClient
from radixpool.rpc.client.channel import CHANNEL_OPTIONS
from radixpool.rpc.errors import AddressInUse, LimitExceeded, ManagerUnavailable
from radixpool.rpc.generation import FinishReason, GenerateFinished, GenerateStarted, GenerateTokens, SamplingParams
from radixpool.rpc.operations import Acquire
from radixpool.rpc.pool_types import KvDtype, PoolLayout, PoolSpec
from radixpool.rpc.security.tokens import new_token
from radixpool.rpc.worker.server import start_server
from radixpool.rpc.worker.service import WorkerServicer
from radixpool.v1 import worker_pb2, worker_pb2_grpc

SPEC = PoolSpec(
    model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, num_blocks=64,
    dtype=KvDtype.FLOAT32, layout=PoolLayout.HND,
)  # fmt: skip


class Worker:
    """A served engine whose steps can be held back."""

    def __init__(self, harness, *, listen="127.0.0.1:0", max_requests=8, credentials=""):
        self.harness = harness
        self.running = threading.Event()
        self.running.set()
        self.ended = threading.Event()
        self.lock = threading.Lock()  # the cache has one owner at a time
        self.servicer = WorkerServicer(harness.engine, lambda: (SPEC, b"p" * 16), name="w", context_tokens=10_000)
        self.server = start_server(self.servicer, listen=listen, max_requests=max_requests, credentials=credentials)
        self.thread = threading.Thread(target=self._drive)
        self.thread.start()

    def _drive(self):
        while not self.ended.is_set():
            with self.lock:
                progressed = self.running.is_set() and self.harness.step()
            if not progressed:
                self.harness.engine.wait_for_work(0.005)
                time.sleep(0.001)

    def close(self):
        self.ended.set()
        self.thread.join()
        self.harness.engine.fail_all(ManagerUnavailable("the worker is stopping"))
        self.server.stop(1.0)


@pytest.fixture
def worker(make_harness):
    worker = Worker(make_harness())
    yield worker
    worker.close()


@pytest.fixture
def client(worker):
    with WorkerClient(worker.server.address) as client:
        yield client


def greedy(n):
    return SamplingParams(max_new_tokens=n)


def wait_until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)


def collect(stream, errors):
    try:
        list(stream)
    except ManagerUnavailable as error:
        errors.append(error)


def test_streams_started_tokens_finished(client, expected_tokens):
    prompt = list(range(9))
    events = list(client.generate(prompt, greedy(5)))
    assert events[0] == GenerateStarted(9, 0)
    assert [t for event in events[1:-1] for t in event.tokens] == expected_tokens(prompt, greedy(5))
    assert all(isinstance(event, GenerateTokens) for event in events[1:-1])
    assert events[-1] == GenerateFinished(FinishReason.LENGTH, 9, 0, 5)


def test_a_handle_is_generated_from_and_left_to_its_owner(worker, client, expected_tokens):
    prompt = list(range(9))
    with worker.lock:
        handle = worker.harness.port.batch([Acquire(prompt, Namespace())])[0].handle
    events = list(client.generate_sequence(handle, greedy(3)))
    assert [t for event in events[1:-1] for t in event.tokens] == expected_tokens(prompt, greedy(3))
    assert worker.harness.cache.stats().num_sequences == 1


def test_a_handle_of_another_tenant_is_answered_like_one_that_never_was(
    make_harness, expected_tokens, tmp_path, monkeypatch
):
    tokens = {name: new_token() for name in ("acme", "globex", "")}
    path = tmp_path / "credentials.toml"
    for tenant, token in tokens.items():
        role = f'roles = ["frontend"]\ntenant = "{tenant}"' if tenant else 'roles = ["operator"]'
        with path.open("a") as file:
            file.write(f'[[token]]\nid = "{token.token_id}"\nsha256 = "{token.sha256}"\nname = "of {tenant}"\n')
            file.write(f'{role}\nexpires = "never"\n')
    path.chmod(0o600)
    worker = Worker(make_harness(), credentials=str(path))
    prompt = list(range(9))

    def generate(tenant, handle):
        monkeypatch.setenv("RADIXPOOL_TOKEN", tokens[tenant].secret)
        with WorkerClient(worker.server.address) as client:
            events = list(client.generate_sequence(handle, greedy(3)))
        return [token for event in events[1:-1] for token in event.tokens]

    try:
        for caller in ("acme", ""):  # its own tenant, and an operator
            with worker.lock:
                handle = worker.harness.port.batch([Acquire(prompt, Namespace(tenant="acme"))])[0].handle
            before = worker.harness.cache.stats()
            with pytest.raises(UnknownSequence, match=rf"^unknown sequence '{handle[:4].hex()}…': it was released or "):
                generate("globex", handle)
            assert worker.harness.cache.stats() == before
            assert generate(caller, handle) == expected_tokens(prompt, greedy(3))
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("tokens", "sampling", "namespace", "message"),
    [
        ([], greedy(1), Namespace(), "tokens must hold at least 1 token, got 0"),
        ([99], greedy(1), Namespace(), r"tokens\[0\] must be below the vocabulary size 50, got 99"),
        ([1] * 300, greedy(1), Namespace(), "more than the pool's 256 tokens"),
        ([1], greedy(0), Namespace(), "max_new_tokens must be at least 1, got 0"),
        ([1], SamplingParams(max_new_tokens=1, top_p=2.0), Namespace(), "top_p must be above 0 and at most 1, got 2.0"),
        ([1], greedy(1), Namespace(model="other"), "namespace.model must be 'm' or left out, got 'other'"),
        ([1], greedy(1), Namespace(revision="x"), "namespace.revision must be 'r' or left out, got 'x'"),
    ],
)
def test_bad_requests_name_the_field_and_disturb_nothing(worker, client, tokens, sampling, namespace, message):
    with pytest.raises(ValueError, match=message):
        list(client.generate(tokens, sampling, namespace=namespace))
    assert worker.harness.cache.stats().admitted_requests == 0
    assert len(list(client.generate([1, 2], greedy(2)))) == 4


def test_malformed_messages_are_refused(worker):
    with grpc.insecure_channel(worker.server.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        sampling = worker_pb2.SamplingParams(max_new_tokens=1)
        for request, message in (
            (worker_pb2.GenerateRequest(sampling=sampling), "source must be a handle or a prompt"),
            (worker_pb2.GenerateRequest(handle=b"short", sampling=sampling), "handle must be 16 bytes, got 5"),
            (
                worker_pb2.GenerateRequest(prompt=worker_pb2.Prompt(tokens=b"12345"), sampling=sampling),
                "not a multiple of 4",
            ),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                list(stub.Generate(request))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert message in raised.value.details()


def test_an_unknown_handle_is_not_found(client):
    with pytest.raises(UnknownSequence):
        list(client.generate_sequence(bytes(16), greedy(1)))


def test_hanging_up_stops_the_generation_and_frees_its_blocks(worker, client):
    stream = client.generate([1] * 9, greedy(200))
    assert isinstance(next(stream), GenerateStarted)
    stream.close()
    wait_until(lambda: worker.harness.engine.status().running_sequences == 0)
    wait_until(lambda: worker.harness.cache.stats().held_blocks == 0)


def test_a_client_that_waits_for_a_token_may_ping(make_harness, monkeypatch):
    """At gRPC's default of one ping in 5 minutes a request that got nothing for long was cut off: too many pings."""
    told = {}
    make = grpc.server
    monkeypatch.setattr(grpc, "server", lambda *args, **rest: told.update(rest["options"]) or make(*args, **rest))
    Worker(make_harness()).close()
    sent = dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"]
    assert told["grpc.http2.min_ping_interval_without_data_ms"] < sent
    assert told["grpc.keepalive_permit_without_calls"] == 1


def test_hanging_up_while_waiting_leaves_the_queue(worker, client):
    worker.running.clear()
    stream = client.generate([1] * 9, greedy(5))
    errors = []
    thread = threading.Thread(target=collect, args=(stream, errors))
    thread.start()
    wait_until(lambda: worker.harness.engine.status().waiting_sequences == 1)
    client.close()
    thread.join()
    assert isinstance(errors[0], ManagerUnavailable)
    worker.running.set()
    wait_until(lambda: worker.harness.engine.status().waiting_sequences == 0)
    assert worker.harness.cache.stats().held_blocks == 0


def test_more_requests_than_slots_are_refused_at_once(make_harness):
    worker = Worker(make_harness(max_waiting=2))
    worker.running.clear()
    try:
        with WorkerClient(worker.server.address) as client:
            streams = [client.generate([1] * 5, greedy(1)) for _ in range(2)]
            threads = [threading.Thread(target=list, args=(stream,)) for stream in streams]
            for thread in threads:
                thread.start()
            wait_until(lambda: worker.harness.engine.status().waiting_sequences == 2)
            with pytest.raises(LimitExceeded, match="at most 2"):
                list(client.generate([1] * 5, greedy(1)))
            worker.running.set()
            for thread in threads:
                thread.join()
    finally:
        worker.running.set()
        worker.close()


def test_status_health_and_reflection(worker, client):
    list(client.generate(list(range(9)), greedy(2)))
    list(client.generate(list(range(9)), greedy(2)))
    status = client.status()
    assert (status.name, status.model, status.pool, status.pool_id) == ("w", "m", SPEC, b"p" * 16)
    assert (status.reused_tokens, status.computed_tokens) == (8, 10 + 2)
    with grpc.insecure_channel(worker.server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="radixpool.v1.WorkerService")
        assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {service.name for service in next(listing).list_services_response.service}
        assert "radixpool.v1.WorkerService" in names


def test_a_stopping_worker_ends_its_streams(make_harness):
    worker = Worker(make_harness())
    worker.running.clear()
    with WorkerClient(worker.server.address) as client:
        stream = client.generate([1], greedy(5))
        errors = []
        thread = threading.Thread(target=collect, args=(stream, errors))
        thread.start()
        wait_until(lambda: worker.harness.engine.status().waiting_sequences == 1)
        worker.close()
        thread.join()
    assert "the worker is stopping" in str(errors[0])


def test_addresses(make_harness):
    harness = make_harness()
    with pytest.raises(ValueError, match=r"listen must be a unix socket or a loopback address, got '0\.0\.0\.0:0'"):
        Worker(harness, listen="0.0.0.0:0")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory) / "w.sock"
        with socket.socket(socket.AF_UNIX) as killed:  # what a killed worker leaves
            killed.bind(str(path))
        first = Worker(harness, listen=f"unix:{path}")
        try:
            with pytest.raises(AddressInUse, match="another process serves"):
                Worker(harness, listen=f"unix:{path}")
            with WorkerClient(first.server.address) as client:
                assert client.status().name == "w"
        finally:
            first.close()
    taken = Worker(make_harness())
    try:
        with pytest.raises(AddressInUse):
            Worker(make_harness(), listen=taken.server.address)
    finally:
        taken.close()
