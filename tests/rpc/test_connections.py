"""Callers who only connect: they are limited in number and in time, take little memory, and disturb nobody."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from radixpool.rpc import limits
from radixpool.rpc.client import Client
from radixpool.rpc.manager import ManagerOptions, ManagerServer, listen, server
from radixpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
CALLERS = {"silent": b"", "half a preface": PREFACE[:12], "idle": PREFACE + SETTINGS}
ALLOWED_GROWTH_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def many_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connect(address: str, first: bytes) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
    with contextlib.suppress(OSError):  # it was closed already: there were enough
        connection.sendall(first)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the peer has ended a connection; what it sent before is thrown away."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            continue
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize("first", CALLERS.values(), ids=CALLERS)
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_connections_beyond_the_limit_are_closed_and_the_others_go_on(make_server, socket_dir, eventually, kind, first):
    manager = make_server(listen=f"unix:{socket_dir}/x.sock" if kind == "unix" else "127.0.0.1:0", max_connections=32)
    with Client(manager.address) as client:
        client.acquire([1, 2, 3])
        callers = [connect(manager.address, first) for _ in range(100)]
        eventually(lambda: sum(map(is_closed, callers)) == 100 - 31)
        for _ in range(20):
            client.acquire([4, 5, 6]).release()
        for caller in callers:
            caller.close()

        def another_gets_in():
            with contextlib.suppress(Exception), Client(manager.address) as late:
                return late.info()

        assert eventually(another_gets_in).num_blocks == 64


@pytest.mark.parametrize("first", [b"", PREFACE[:12]], ids=["silent", "half a preface"])
def test_who_says_nothing_is_closed_in_time(make_server, eventually, monkeypatch, first):
    shorter = [option for option in server._SERVER_OPTIONS if option[0] != "grpc.server_handshake_timeout_ms"]
    assert ("grpc.server_handshake_timeout_ms", limits.HANDSHAKE_TIMEOUT_MS) in server._SERVER_OPTIONS
    monkeypatch.setattr(server, "_SERVER_OPTIONS", (*shorter, ("grpc.server_handshake_timeout_ms", 300)))
    with connect(make_server().address, first) as caller:
        assert not is_closed(caller)
        eventually(lambda: is_closed(caller))


def test_a_connection_without_calls_is_closed_in_time_and_opened_again(make_server, eventually, monkeypatch):
    shorter = [option for option in server._SERVER_OPTIONS if option[0] != "grpc.max_connection_idle_ms"]
    assert ("grpc.max_connection_idle_ms", limits.IDLE_CONNECTION_MS) in server._SERVER_OPTIONS
    monkeypatch.setattr(server, "_SERVER_OPTIONS", (*shorter, ("grpc.max_connection_idle_ms", 300)))
    manager = make_server()
    with connect(manager.address, PREFACE + SETTINGS) as caller, Client(manager.address) as client:
        client.info()
        eventually(lambda: is_closed(caller))
        time.sleep(0.5)
        assert client.info().num_blocks == 64


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("first", CALLERS.values(), ids=CALLERS)
def test_the_memory_of_connections_is_bounded(serve, socket_dir, first):
    manager = serve("--listen", f"unix:{socket_dir}/m.sock", "--num-blocks", "64", "--log-level", "error")
    with Client(manager.address) as client:
        client.acquire([1, 2, 3])
        before = resident_bytes(manager.process.pid)
        callers = [connect(manager.address, first) for _ in range(limits.MAX_CONNECTIONS + 1000)]
        client.acquire([1, 2, 3])
        assert resident_bytes(manager.process.pid) - before < ALLOWED_GROWTH_BYTES
        for caller in callers:
            caller.close()


MATCH = "/radixpool.v1.CacheService/Match"
LARGEST = cache_pb2.MatchRequest(tokens=bytes(limits.MAX_MESSAGE_BYTES - 64)).SerializeToString()
ENDS_OF_TOO_MUCH = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}


@pytest.mark.parametrize(
    ("payload", "at_once", "ends"),
    [
        (bytes(64 << 20), 8, ENDS_OF_TOO_MUCH),
        (LARGEST, 16, {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}),
    ],
    ids=["oversize", "largest"],
)
def test_the_memory_of_many_large_messages_is_bounded(serve, socket_dir, payload, at_once, ends):
    manager = serve("--listen", f"unix:{socket_dir}/m.sock", "--num-blocks", "64", "--log-level", "error")

    def send(_number: int) -> grpc.StatusCode:
        with grpc.insecure_channel(manager.address, options=[("grpc.max_send_message_length", -1)]) as channel:
            try:
                channel.unary_unary(MATCH)(payload, timeout=60)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    with Client(manager.address) as client, ThreadPoolExecutor(at_once) as threads:
        client.acquire([1, 2, 3])
        before = resident_bytes(manager.process.pid)
        assert set(threads.map(send, range(3 * at_once))) <= ends
        assert resident_bytes(manager.process.pid) - before < ALLOWED_GROWTH_BYTES
        assert client.check().violations == ()


def test_the_memory_of_streams_that_never_read_is_bounded(serve, socket_dir):
    manager = serve("--listen", f"unix:{socket_dir}/m.sock", "--num-blocks", "64", "--log-level", "error")
    query = cache_pb2.GetBlockTablesRequest(handles=[b"?" * 16] * limits.MAX_HANDLES_PER_QUERY)  # answered with 0.7 MiB
    with Client(manager.address) as client, grpc.insecure_channel(manager.address) as channel:
        client.acquire([1, 2, 3])
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        epoch = stub.RegisterClient(cache_pb2.RegisterClientRequest(client_id=b"c" * 16, name="deaf")).epoch
        header = common_pb2.RequestHeader(client_id=b"c" * 16, epoch=epoch)
        request = cache_pb2.SessionRequest(header=header, operations=[cache_pb2.Operation(get_block_tables=query)])
        before = resident_bytes(manager.process.pid)
        streams = [stub.Session(iter([request] * 200)) for _ in range(4)]  # 560 MiB, if all were answered
        for _ in range(20):
            client.acquire([4, 5, 6]).release()
            time.sleep(0.05)
        assert resident_bytes(manager.process.pid) - before < ALLOWED_GROWTH_BYTES
        for stream in streams:
            stream.cancel()
        assert client.check().violations == ()


def test_room_is_made_for_connections_as_far_as_it_goes(monkeypatch, caplog):
    allowed = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: allowed[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limit: allowed.append(limit))
    assert listen.room_for_connections(500) == 500
    assert len(allowed) == 1
    assert listen.room_for_connections(2048) == 2048
    assert allowed[-1] == (2048 + limits.RESERVED_FILES, 4096)
    assert not caplog.records
    assert listen.room_for_connections(10_000) == 4096 - limits.RESERVED_FILES
    assert "there is room for 3584 connections, not 10000: only 4096 files may be open" in caplog.text
    allowed.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert listen.room_for_connections(1_000_000) == 1_000_000


def test_the_number_of_connections_is_checked():
    with pytest.raises(ValueError, match="max_connections must be from 1 to 1000000, got 0"):
        ManagerServer(ManagerOptions(listen="127.0.0.1:0", num_blocks=8, block_size=4, max_connections=0))
