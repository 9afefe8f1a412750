"""Mutual TLS: both sides prove themselves, renewed files count at once, tokens stay off plain connections."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import trustme
from prometheus_client import CollectorRegistry, Counter

from radixpool.rpc.errors import Unauthenticated
from radixpool.rpc.metrics import MetricsServer
from radixpool.rpc.security.client import ClientSecurity
from radixpool.rpc.security.credentials import CredentialFile
from radixpool.rpc.security.identity import Identity, current_identity
from radixpool.rpc.security.interceptor import AuthInterceptor
from radixpool.rpc.security.tokens import new_token
from radixpool.rpc.security.transport import TlsFiles, check_listen
from radixpool.rpc.status import error_from_rpc
from radixpool.v1 import admin_pb2, admin_pb2_grpc

WORKER_URI = "spiffe://pool/worker"


def write(folder: Path, issuer: trustme.CA, trusted: trustme.CA, *names: str) -> TlsFiles:
    folder.mkdir(exist_ok=True)
    certificate = issuer.issue_cert(*names)
    files = TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    certificate.private_key_pem.write_to_path(str(files.key))
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    trusted.cert_pem.write_to_path(str(files.authorities))
    return files


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_files(tmp_path: Path, authority: trustme.CA) -> TlsFiles:
    return write(tmp_path / "server", authority, authority, "127.0.0.1", "localhost")


@pytest.fixture
def serve_tls() -> Iterator[Callable[..., str]]:
    servers: list[grpc.Server] = []

    def start(
        credentials: grpc.ServerCredentials, authenticator: CredentialFile | None, seen: list[Identity | None]
    ) -> str:
        class Admin(admin_pb2_grpc.AdminServiceServicer):
            def GetStats(self, request, context):
                seen.append(current_identity.get())
                return admin_pb2.GetStatsResponse()

        server = grpc.server(ThreadPoolExecutor(2), interceptors=[AuthInterceptor(authenticator)])
        admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(0).wait()


def get_stats(address: str, security: ClientSecurity) -> None:
    with security.open_channel(address, ()) as channel:
        try:
            admin_pb2_grpc.AdminServiceStub(channel).GetStats(admin_pb2.GetStatsRequest(), timeout=5)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None


def test_both_sides_must_be_signed_by_the_right_authority(
    tmp_path: Path, authority: trustme.CA, server_files: TlsFiles, serve_tls: Callable[..., str]
) -> None:
    seen: list[Identity | None] = []
    address = serve_tls(server_files.server_credentials(), None, seen)
    foreign = trustme.CA()
    get_stats(address, ClientSecurity(tls=write(tmp_path / "good", authority, authority, "client")))
    for name, issuer, trusted in (("forged", foreign, authority), ("misled", authority, foreign)):
        with pytest.raises(Exception, match=r"(?i)handshake|certificate|connect|socket closed|SSL"):
            get_stats(address, ClientSecurity(tls=write(tmp_path / name, issuer, trusted, "client")))
    with pytest.raises(Exception, match=r"(?i)socket closed|connect|reset"):
        get_stats(address, ClientSecurity())
    assert len(seen) == 1


def test_a_certificate_alone_can_identify(
    tmp_path: Path, authority: trustme.CA, server_files: TlsFiles, serve_tls: Callable[..., str]
) -> None:
    path = tmp_path / "credentials.toml"
    path.write_text('[[certificate]]\nsan = "op.pool"\nname = "op"\nroles = ["operator"]\nexpires = "never"\n')
    path.chmod(0o600)
    seen: list[Identity | None] = []
    address = serve_tls(server_files.server_credentials(), CredentialFile(path), seen)
    get_stats(address, ClientSecurity(tls=write(tmp_path / "op", authority, authority, "op.pool")))
    assert [identity.name for identity in seen if identity] == ["op"]
    with pytest.raises(Unauthenticated, match="no name of the client certificate is known"):
        get_stats(address, ClientSecurity(tls=write(tmp_path / "x", authority, authority, "other.pool")))
    assert len(seen) == 1


def test_a_token_works_over_tls(
    tmp_path: Path, authority: trustme.CA, server_files: TlsFiles, serve_tls: Callable[..., str]
) -> None:
    token = new_token()
    path = tmp_path / "credentials.toml"
    path.write_text(
        f'[[token]]\nid = "{token.token_id}"\nsha256 = "{token.sha256}"\nname = "op"\nroles = ["operator"]\n'
        'expires = "never"\n'
    )
    path.chmod(0o600)
    seen: list[Identity | None] = []
    address = serve_tls(server_files.server_credentials(), CredentialFile(path), seen)
    files = write(tmp_path / "client", authority, authority, "client")
    get_stats(address, ClientSecurity(tls=files, token=token.secret))
    with pytest.raises(Unauthenticated, match="a bearer token is needed"):
        get_stats(address, ClientSecurity(tls=files))
    assert [identity.name for identity in seen if identity] == ["op"]


def test_renewed_files_count_for_the_next_connection(
    tmp_path: Path, authority: trustme.CA, server_files: TlsFiles, serve_tls: Callable[..., str]
) -> None:
    address = serve_tls(server_files.server_credentials(), None, [])
    successor = trustme.CA()
    old_client = ClientSecurity(tls=write(tmp_path / "old", authority, authority, "client"))
    new_client = ClientSecurity(tls=write(tmp_path / "new", successor, successor, "client"))
    get_stats(address, old_client)
    write(server_files.certificate.parent, successor, successor, "127.0.0.1")
    get_stats(address, new_client)
    with pytest.raises(Exception, match=r"(?i)handshake|certificate|connect|socket closed|SSL"):
        get_stats(address, old_client)
    server_files.key.write_text("not a key")
    get_stats(address, new_client)


def test_unusable_files_are_named(tmp_path: Path, authority: trustme.CA, server_files: TlsFiles) -> None:
    other = write(tmp_path / "other", authority, authority, "x")
    with pytest.raises(ValueError, match="no usable certificate and key"):
        TlsFiles(server_files.certificate, other.key, server_files.authorities).server_credentials()
    with pytest.raises(ValueError, match=r"missing.pem: cannot be read: No such file"):
        TlsFiles(tmp_path / "missing.pem", other.key, other.authorities).server_credentials()
    with pytest.raises(ValueError, match="no usable authorities"):
        TlsFiles(server_files.certificate, server_files.key, server_files.key).server_credentials()


def test_the_metrics_listener_asks_for_a_client_certificate(
    tmp_path: Path, authority: trustme.CA, server_files: TlsFiles
) -> None:
    registry = CollectorRegistry()
    Counter("radixpool_example", "An example.", registry=registry)
    client = write(tmp_path / "prometheus", authority, authority, "prometheus")
    known = ssl.create_default_context(cafile=str(client.authorities))
    known.load_cert_chain(client.certificate, client.key)
    unknown = ssl.create_default_context(cafile=str(client.authorities))
    with MetricsServer("0.0.0.0:0", registry, tls=server_files.server_context()) as server:
        url = f"https://localhost:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10, context=known) as reply:
            assert b"radixpool_example_total" in reply.read()
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            urllib.request.urlopen(url, timeout=10, context=unknown).close()
        with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10).close()


def test_addresses_beyond_this_machine_need_tls() -> None:
    for address in ("0.0.0.0:7300", "[::]:7300", "10.0.0.1:7300", "manager:7300"):
        with pytest.raises(ValueError, match="that needs mutual TLS"):
            check_listen(address, secure=False)
        check_listen(address, secure=True)
    for address in ("127.0.0.1:7300", "[::1]:7300", "localhost:7300", "unix:/run/x.sock"):
        check_listen(address, secure=False)


def test_a_token_is_never_sent_in_the_clear_to_another_machine() -> None:
    security = ClientSecurity(token=new_token().secret)
    for opened in (security.open_channel, security.open_async_channel):
        with pytest.raises(ValueError, match="a token is sent there with mutual TLS only"):
            opened("10.0.0.1:7300", ())
    security.open_channel("127.0.0.1:7300", ()).close()


def test_a_token_does_not_show_in_the_repr() -> None:
    token = new_token().secret
    assert token not in repr(ClientSecurity(token=token))
    with pytest.raises(ValueError, match="got 9 characters of something else"):
        ClientSecurity(token="my-secret")


def test_the_environment_names_a_clients_credentials(tmp_path: Path) -> None:
    token = new_token().secret
    (tmp_path / "token").write_text(token + "\n")
    assert ClientSecurity.from_environment({}) == ClientSecurity()
    assert ClientSecurity.from_environment({"RADIXPOOL_TOKEN": token}).token == token
    assert ClientSecurity.from_environment({"RADIXPOOL_TOKEN_FILE": str(tmp_path / "token")}).token == token
    files = {"RADIXPOOL_TLS_CERT": "/c", "RADIXPOOL_TLS_KEY": "/k", "RADIXPOOL_TLS_CA": "/a"}
    assert ClientSecurity.from_environment(files).tls == TlsFiles(Path("/c"), Path("/k"), Path("/a"))
    with pytest.raises(ValueError, match="missing: RADIXPOOL_TLS_KEY, RADIXPOOL_TLS_CA"):
        ClientSecurity.from_environment({"RADIXPOOL_TLS_CERT": "/c"})
    with pytest.raises(ValueError, match=r"RADIXPOOL_TOKEN_FILE: .* cannot be read: No such file"):
        ClientSecurity.from_environment({"RADIXPOOL_TOKEN_FILE": str(tmp_path / "none")})
