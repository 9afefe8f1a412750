"""A worker's server asks for the same credentials as the manager, and its socket is its owner's."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from radixpool.rpc.errors import PermissionDenied, Unauthenticated
from radixpool.rpc.security.client import ClientSecurity
from radixpool.rpc.security.tokens import new_token
from radixpool.rpc.status import error_from_rpc
from radixpool.v1 import worker_pb2, worker_pb2_grpc

pytest.importorskip("torch", reason="torch is not installed: pip install radixpool[worker]")

from radixpool.rpc.worker.server import start_server


class Echo(worker_pb2_grpc.WorkerServiceServicer):
    """Answers with the tenant that it was asked for."""

    def Generate(self, request: Any, _context: object) -> Iterator[Any]:
        self.tenant = request.prompt.namespace.tenant
        yield worker_pb2.GenerateResponse()

    def GetStatus(self, _request: object, _context: object) -> Any:
        return worker_pb2.GetStatusResponse(name="w")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rpw", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def stub(folder: Path) -> Iterator[Callable[..., Any]]:
    with ExitStack() as stack:

        def stub(servicer: Any, security: ClientSecurity, credentials: str = "") -> Any:
            path = folder / f"{len(list(folder.iterdir()))}.sock"
            server = start_server(servicer, listen=f"unix:{path}", max_requests=4, credentials=credentials)
            stack.callback(server.stop, 0)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            channel = stack.enter_context(security.open_channel(server.address, ()))
            return worker_pb2_grpc.WorkerServiceStub(channel)

        yield stub


def test_without_a_file_whoever_reaches_the_socket_may_call(stub: Callable[..., Any]) -> None:
    worker = stub(Echo(), ClientSecurity())
    assert worker.GetStatus(worker_pb2.GetStatusRequest()).name == "w"


def test_with_a_file_callers_need_a_token_and_get_its_tenant(stub: Callable[..., Any], folder: Path) -> None:
    frontend, worker = new_token(), new_token()
    path = folder / "credentials.toml"
    path.write_text(
        f'[[token]]\nid = "{frontend.token_id}"\nsha256 = "{frontend.sha256}"\nname = "f"\nroles = ["frontend"]\n'
        f'tenant = "acme"\nexpires = "never"\n'
        f'[[token]]\nid = "{worker.token_id}"\nsha256 = "{worker.sha256}"\nname = "w"\nroles = ["worker"]\n'
        'expires = "never"\n'
    )
    path.chmod(0o600)
    servicer = Echo()
    prompt = worker_pb2.GenerateRequest(prompt=worker_pb2.Prompt(tokens=bytes(4)))
    list(stub(servicer, ClientSecurity(token=frontend.secret), str(path)).Generate(prompt))
    assert servicer.tenant == "acme"
    for security, expected in (
        (ClientSecurity(), Unauthenticated),
        (ClientSecurity(token=new_token().secret), Unauthenticated),
        (ClientSecurity(token=worker.secret), PermissionDenied),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(stub(Echo(), security, str(path)).Generate(prompt))
        assert isinstance(error_from_rpc(caught.value), expected)
