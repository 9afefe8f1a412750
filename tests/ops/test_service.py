"""The whole manager as it is configured: metrics of real traffic, every RPC with bad credentials, tenants apart."""

from __future__ import annotations

import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client.parser import text_string_to_metric_families

from radixpool.radix import Namespace
from radixpool.rpc import operations as ops
from radixpool.rpc.client import Client, ClientOptions, ClientRole, Step
from radixpool.rpc.config import CacheConfig, KvEventsConfig, MetricsConfig, SecurityConfig, ServeConfig, ServerConfig
from radixpool.rpc.errors import PermissionDenied, Unauthenticated
from radixpool.rpc.inspection import FlushMode
from radixpool.rpc.manager.launch import ManagerService
from radixpool.rpc.metrics import LogFormat
from radixpool.rpc.metrics.logs import configure_logging
from radixpool.rpc.pool_types import KvDtype, MemfdAttachment, Pool, PoolLayout, PoolSpec
from radixpool.rpc.security.client import ClientSecurity
from radixpool.rpc.security.policy import ANYONE, METHOD_ROLES
from radixpool.rpc.security.tokens import NewToken, new_token
from radixpool.rpc.status import error_from_rpc
from radixpool.v1 import admin_pb2, cache_pb2, pool_pb2

FAR = "2999-01-01T00:00:00Z"
PAST = "2001-01-01T00:00:00Z"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rpo", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., ManagerService]]:
    with ExitStack() as stack:

        def start(**sections: Any) -> ManagerService:
            base = ServeConfig(
                server=ServerConfig(listen=f"unix:{folder}/m.sock", drain_timeout_s=0.0),
                cache=CacheConfig(num_blocks=64, block_size=4),
                metrics=MetricsConfig(listen="127.0.0.1:0"),
            )
            service = ManagerService(replace(base, **sections))
            service.start()
            stack.callback(service.stop)
            stack.callback(service.server.engine.check)
            return service

        yield start


class Bearers:
    """A credential file with one token for each kind of caller."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens: dict[str, NewToken] = {}
        text = ""
        for name, role, expires in (
            ("acme", "frontend", FAR),
            ("rival", "frontend", FAR),
            ("worker", "worker", FAR),
            ("holder", "pool_holder", FAR),
            ("operator", "operator", FAR),
            ("subscriber", "subscriber", FAR),
            ("expired", "operator", PAST),
        ):
            token = self.tokens[name] = new_token()
            text += f'[[token]]\nid = "{token.token_id}"\nsha256 = "{token.sha256}"\nname = "{name}"\n'
            text += f'roles = ["{role}"]\nexpires = {expires}\n'
            text += f'tenant = "{name}"\n' if role == "frontend" else ""
        path.write_text(text)
        path.chmod(0o600)

    def metadata(self, name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.tokens[name].secret}"),)

    def security(self, name: str) -> ClientSecurity:
        return ClientSecurity(token=self.tokens[name].secret)


@pytest.fixture
def bearers(folder: Path) -> Bearers:
    return Bearers(folder / "credentials.toml")


@pytest.fixture
def guarded(start: Callable[..., ManagerService], bearers: Bearers) -> ManagerService:
    return start(security=SecurityConfig(credentials=str(bearers.path)))


@pytest.fixture
def connect(guarded: ManagerService, bearers: Bearers) -> Iterator[Callable[..., Client]]:
    with ExitStack() as stack:

        def connect(name: str) -> Client:
            options = ClientOptions(name=name, role=ClientRole.FRONTEND, security=bearers.security(name))
            return stack.enter_context(Client(guarded.address, options=options))

        yield connect


def scrape(service: ManagerService) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{service.metrics_port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_tell_what_happened(start: Callable[..., ManagerService]) -> None:
    service = start()

    def value(name: str, **labels: str) -> float:
        return scrape(service)[f"radixpool_{name}", frozenset(labels.items())]

    with Client(service.address, options=ClientOptions(role=ClientRole.FRONTEND)) as client:
        for _ in range(2):
            with client.acquire(range(9)) as sequence:
                sequence.commit(8)
        with client.acquire([1] * 5), client.session() as session:
            huge = ops.Acquire(range(1000))
            assert isinstance(session.batch([huge, huge])[0], Exception)
            with pytest.raises(Exception, match="pool exhausted"):
                client.acquire(range(1000))
            assert value("prefix_cache_queries_total") == 9 + 9 + 5
            assert value("prefix_cache_hits_total") == 8
            assert value("kv_blocks", state="held") == 2
            assert value("kv_blocks", state="cached") == 2
            assert value("kv_blocks", state="free") == 60
            assert value("leases", role="frontend") == 1
            assert value("sessions") == 1
            assert value("serving") == 1
            assert value("refusals_total", reason="POOL_EXHAUSTED") == 3
            cache = {"service": "radixpool.v1.CacheService"}
            assert value("rpc_handling_seconds_count", **cache, method="Acquire", code="OK") == 3
            assert value("rpc_handling_seconds_count", **cache, method="Acquire", code="RESOURCE_EXHAUSTED") == 1
            assert value("rpc_stream_message_seconds_count", **cache, method="Session") == 1
            assert value("rpc_open_streams", **cache, method="Session") == 1


def test_removals_are_told_apart_by_cause(start: Callable[..., ManagerService]) -> None:
    service = start()
    with Client(service.address) as client:
        for first in range(20):
            with client.acquire([first] * 17) as sequence:
                sequence.commit(17)
                if first == 19:
                    client.invalidate(sequence.handle, 3)
        client.evict(3)
        client.evict(5, dry_run=True)
        client.flush(FlushMode.IDLE_ONLY)
    shown = scrape(service)
    stats = service.cache_stats()

    def value(name: str, cause: str) -> float:
        return shown[f"radixpool_{name}", frozenset({("cause", cause)})]

    assert value("kv_blocks_evicted_total", "operator") == 3
    assert value("kv_blocks_evicted_total", "capacity") == stats.evicted_blocks - 3 > 0
    assert value("kv_blocks_removed_total", "invalidate") == 1
    gone = 3 + 1 + value("kv_blocks_evicted_total", "capacity") + value("kv_blocks_removed_total", "flush")
    assert gone == stats.committed_blocks


def test_a_taken_metrics_port_leaves_nothing_behind(start: Callable[..., ManagerService], folder: Path) -> None:
    first = start()
    second = ManagerService(
        ServeConfig(
            server=ServerConfig(listen=f"unix:{folder}/second.sock"),
            metrics=MetricsConfig(listen=f"127.0.0.1:{first.metrics_port}"),
        )
    )
    with pytest.raises(Exception, match=r"metrics address .* cannot be served"):
        second.start()
    assert not list(folder.glob("second*"))


def test_the_socket_is_for_its_owner_alone(start: Callable[..., ManagerService], folder: Path) -> None:
    start()
    assert (folder / "m.sock").stat().st_mode & 0o777 == 0o600


MESSAGES = {
    f"/{service.full_name}/{method.name}": (GetMessageClass(method.input_type), method)
    for module in (cache_pb2, pool_pb2, admin_pb2, health_pb2, reflection_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def call(channel: grpc.Channel, path: str, metadata: Any) -> Exception | None:
    """Call a method found in the descriptors with an empty request; return what it was refused with."""
    kind, method = MESSAGES[path]
    streams = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
    stub = getattr(channel, "_".join(streams))(path, request_serializer=kind.SerializeToString)
    request = iter([kind()]) if method.client_streaming else kind()
    try:
        reply = stub(request, metadata=metadata, timeout=10)
        if method.server_streaming:
            next(iter(reply), None)
            reply.cancel()
    except grpc.RpcError as error:
        return error_from_rpc(error)
    return None


PROTECTED = [path for path in MESSAGES if METHOD_ROLES[path] != ANYONE]


def test_every_method_that_the_server_has_is_in_the_table(guarded: ManagerService, bearers: Bearers) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        stub = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub(iter([ask]), metadata=bearers.metadata("operator"), timeout=10)
    served = {service.name for service in reply.list_services_response.service}
    assert served == {path.split("/")[1] for path in MESSAGES}


@pytest.mark.parametrize("credential", ["none", "expired", "foreign", "garbage"])
def test_every_method_refuses_bad_credentials(guarded: ManagerService, bearers: Bearers, credential: str) -> None:
    metadata = {
        "none": (),
        "expired": bearers.metadata("expired"),
        "foreign": (("authorization", f"Bearer {new_token().secret}"),),
        "garbage": (("authorization", "Bearer ../../etc/passwd"),),
    }[credential]
    before = guarded.cache_stats()
    with grpc.insecure_channel(guarded.address) as channel:
        for path in PROTECTED:
            assert isinstance(call(channel, path, metadata), Unauthenticated), path
    assert guarded.cache_stats() == before
    assert len(PROTECTED) > 20


@pytest.mark.parametrize("name", ["acme", "worker", "holder", "operator", "subscriber"])
def test_every_method_refuses_roles_that_it_is_not_for(guarded: ManagerService, bearers: Bearers, name: str) -> None:
    role = {"acme": "frontend", "holder": "pool_holder"}.get(name, name)
    with grpc.insecure_channel(guarded.address) as channel:
        for path in PROTECTED:
            refused = call(channel, path, bearers.metadata(name))
            assert isinstance(refused, PermissionDenied) == (role not in METHOD_ROLES[path]), path
            assert not isinstance(refused, Unauthenticated), path


def test_health_needs_no_credential(guarded: ManagerService) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        assert call(channel, "/grpc.health.v1.Health/Check", ()) is None
        assert call(channel, "/grpc.health.v1.Health/Watch", ()) is None


def test_tenants_do_not_share_prefixes_that_look_alike(connect: Callable[..., Client]) -> None:
    acme, rival = connect("acme"), connect("rival")
    with acme.acquire(range(9)) as sequence:
        sequence.commit(8)
    assert acme.match(range(9)).cached_tokens == 8
    assert rival.match(range(9)).cached_tokens == 0
    with rival.acquire(range(9)) as sequence:
        assert sequence.cached_tokens == 0


def test_a_stolen_handle_is_of_no_use_in_another_tenant(connect: Callable[..., Client]) -> None:
    acme, rival, worker = connect("acme"), connect("rival"), connect("worker")
    with acme.acquire(range(9)) as sequence:
        unknown = str(rival.get_block_tables([bytes(16)]).sequences[0]).partition("'")[0]
        for act in (
            lambda: rival.extend(sequence.handle, [1]),
            lambda: rival.commit(sequence.handle, 4),
            lambda: rival.release(sequence.handle),
        ):
            with pytest.raises(Exception, match="unknown sequence"):
                act()
        assert str(rival.get_block_tables([sequence.handle]).sequences[0]).startswith(unknown)
        (result,) = rival.batch([ops.Release(sequence.handle)])
        assert "unknown sequence" in str(result)
        stepped = rival.step(Step(handles=[sequence.handle, bytes(16)], tokens=[1, 1], commit_upto_tokens=[4, 4]))
        assert [str(stepped.errors[row]).partition("'")[0] for row in (0, 1)] == [unknown, unknown]
        assert (stepped.num_tokens.tolist(), stepped.committed_tokens.tolist()) == ([0, 0], [0, 0])
        (view,) = worker.get_block_tables([sequence.handle]).sequences
        assert view.tokens.tolist() == list(range(9))
        assert acme.commit(sequence.handle, 8).committed_tokens == 8


def test_a_stolen_client_id_is_of_no_use_in_another_tenant(guarded: ManagerService, bearers: Bearers) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        register = channel.unary_unary(
            "/radixpool.v1.CacheService/RegisterClient",
            request_serializer=cache_pb2.RegisterClientRequest.SerializeToString,
            response_deserializer=cache_pb2.RegisterClientResponse.FromString,
        )
        heartbeat = channel.unary_unary(
            "/radixpool.v1.CacheService/Heartbeat",
            request_serializer=cache_pb2.HeartbeatRequest.SerializeToString,
            response_deserializer=cache_pb2.HeartbeatResponse.FromString,
        )
        request = cache_pb2.RegisterClientRequest(client_id=b"i" * 16, name="victim", role=1)
        epoch = register(request, metadata=bearers.metadata("acme")).epoch
        beat = cache_pb2.HeartbeatRequest(header={"client_id": b"i" * 16, "epoch": epoch})
        with pytest.raises(grpc.RpcError) as caught:
            heartbeat(beat, metadata=bearers.metadata("rival"))
        assert caught.value.code() is grpc.StatusCode.ABORTED
        with pytest.raises(grpc.RpcError) as caught:
            register(request, metadata=bearers.metadata("rival"))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        heartbeat(beat, metadata=bearers.metadata("acme"))


CANARY_TOKEN = 3_141_592_653
CANARY_SALT = "salt-canary-2718281828"


def test_token_ids_salts_and_secrets_never_come_out(
    start: Callable[..., ManagerService], bearers: Bearers, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logging(level="debug", form=LogFormat.JSON)
    service = start(security=SecurityConfig(credentials=str(bearers.path)))
    shown: list[str] = []

    def refuse(act: Callable[[], Any]) -> None:
        with pytest.raises(Exception) as caught:
            act()
        shown.append(f"{caught.value!r} {caught.value}")

    salted = Namespace(cache_salt=CANARY_SALT, tenant="acme")
    prompt = [CANARY_TOKEN] * 9
    with (
        Client(service.address, options=ClientOptions(security=bearers.security("acme"))) as acme,
        Client(service.address, options=ClientOptions(security=bearers.security("rival"))) as rival,
        Client(service.address, options=ClientOptions(security=bearers.security("operator"))) as operator,
    ):
        sequence = acme.acquire(prompt, namespace=salted)
        sequence.commit(8)
        refuse(lambda: acme.acquire([CANARY_TOKEN] * 5000, namespace=salted))
        refuse(lambda: acme.extend(sequence.handle, [CANARY_TOKEN] * 5000))
        refuse(lambda: acme.commit(sequence.handle, 5000))
        refuse(lambda: acme.acquire(prompt, namespace=Namespace(cache_salt=CANARY_SALT * 100)))
        refuse(lambda: rival.acquire(prompt, namespace=salted))
        refuse(lambda: rival.extend(sequence.handle, [CANARY_TOKEN]))
        refuse(lambda: acme.reserve(sequence.handle, 2**31))
        shown.append(str(acme.batch([ops.Acquire([CANARY_TOKEN] * 5000, salted), ops.Release(bytes(16))])))
        broken = service.server.engine.cache
        service.server.engine.operations._cache = None
        refuse(lambda: acme.acquire(prompt, namespace=salted))
        service.server.engine.operations._cache = broken
        shown.append(str(operator.inspect_tree()))
        shown.append(str(operator.inspect_block(0)))
        shown.append(str(operator.list_clients()))
        with urllib.request.urlopen(f"http://127.0.0.1:{service.metrics_port}/metrics", timeout=10) as reply:
            shown.append(reply.read().decode())
        handle = sequence.handle
        sequence.release()
    output, errors = capfd.readouterr()
    text = "\n".join([*shown, output, errors])
    assert "call refused" in errors
    secrets = [
        CANARY_SALT,
        str(CANARY_TOKEN),
        f"{CANARY_TOKEN:x}",
        CANARY_TOKEN.to_bytes(4, "little").hex(),
        handle.hex(),
    ]
    secrets += [token.secret for token in bearers.tokens.values()]
    secrets += [token.sha256 for token in bearers.tokens.values()]
    assert [secret for secret in secrets if secret in text] == []


def test_kv_events_follow_the_manager_also_from_one_pool_to_the_next(
    start: Callable[..., ManagerService], folder: Path
) -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install radixpool[events]")
    msgpack = pytest.importorskip("msgpack", reason="msgpack is not installed: pip install radixpool[events]")
    service = start(
        kv_events=KvEventsConfig(endpoint=f"ipc://{folder}/events", replay_endpoint=f"ipc://{folder}/replay")
    )
    assert service.kv_events_endpoints == (f"ipc://{folder}/events", f"ipc://{folder}/replay")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(service.kv_events_endpoints[0])

        def next_types() -> list[str]:
            return [event["type"] for event in msgpack.unpackb(socket.recv_multipart()[2])[1]]

        spec = PoolSpec(
            model="m",
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            block_size=4,
            num_blocks=64,
            dtype=KvDtype.FLOAT32,
            layout=PoolLayout.HND,
        )
        for pool_id in (b"p" * 16, b"q" * 16):
            with Client(service.address, options=ClientOptions(role=ClientRole.POOL_HOLDER)) as holder:
                holder.register_pool(Pool(pool_id, spec, MemfdAttachment("@x", 4096)))
                assert next_types() == ["AllBlocksCleared"]
                with holder.acquire(range(9)) as sequence:
                    sequence.commit(8)
                assert next_types() == ["BlockStored"]
    published = scrape(service)
    assert published["radixpool_kv_events_total", frozenset({("type", "BlocksStored")})] == 2
    assert published["radixpool_kv_events_resyncs_total", frozenset()] == 2
