"""`radixpool serve` as a process with everything on: a file, mutual TLS, tokens, metrics, KV events, JSON logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from radixpool.rpc.security.tokens import NewToken, new_token

CLI = [sys.executable, "-m", "radixpool.rpc.cli"]


def write_identity(folder: Path, authority: trustme.CA, name: str, *hosts: str) -> dict[str, str]:
    certificate = authority.issue_cert(*hosts)
    paths = {kind: str(folder / f"{name}.{kind}") for kind in ("cert", "key", "ca")}
    Path(paths["cert"]).write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(paths["key"])
    authority.cert_pem.write_to_path(paths["ca"])
    return paths


@pytest.fixture
def token() -> NewToken:
    return new_token()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def config(tmp_path: Path, authority: trustme.CA, token: NewToken) -> Path:
    server = write_identity(tmp_path, authority, "server", "127.0.0.1", "localhost")
    credentials = tmp_path / "credentials.toml"
    credentials.write_text(
        f'[[token]]\nid = "{token.token_id}"\nsha256 = "{token.sha256}"\nname = "alice"\nroles = ["operator"]\n'
        'expires = "never"\n'
    )
    credentials.chmod(0o600)
    path = tmp_path / "radixpool.toml"
    path.write_text(
        '[server]\nlisten = "0.0.0.0:0"\n[cache]\nnum_blocks = 64\n'
        f'[security]\ntls_cert = "{server["cert"]}"\ntls_key = "{server["key"]}"\ntls_client_ca = "{server["ca"]}"\n'
        f'credentials = "{credentials}"\n[metrics]\nlisten = "127.0.0.1:0"\n[logs]\nformat = "json"\n'
    )
    return path


class Manager:
    """The process, once it is ready."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([*CLI, "serve", "--json", *arguments], env=environment, **pipes)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=20)
        self.ready = json.loads(line)
        self.address = self.ready["address"].replace("0.0.0.0", "127.0.0.1")

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[Callable[..., Manager]]:
    managers: list[Manager] = []

    def start(*arguments: str) -> Manager:
        managers.append(Manager(*arguments))
        return managers[-1]

    yield start
    for manager in managers:
        if manager.process.poll() is None:
            manager.process.kill()
            manager.process.communicate(timeout=20)


def stats(address: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [*CLI, "stats", "--json", "--address", address]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def test_everything_on_and_a_clean_end(
    start: Callable[..., Manager], config: Path, tmp_path: Path, authority: trustme.CA, token: NewToken
) -> None:
    manager = start("--config", str(config))
    with urllib.request.urlopen(f"http://127.0.0.1:{manager.ready['metrics_port']}/metrics", timeout=10) as reply:
        assert b"radixpool_uptime_seconds" in reply.read()
    client = write_identity(tmp_path, authority, "client", "client")
    tls = {f"RADIXPOOL_TLS_{kind.upper()}": path for kind, path in client.items()}
    served = stats(manager.address, {**tls, "RADIXPOOL_TOKEN": token.secret})
    assert served.returncode == 0, served.stderr
    assert json.loads(served.stdout)["cache"]["num_blocks"] == 64
    refused = stats(manager.address, tls)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "a bearer token is needed (RADIXPOOL_TOKEN or RADIXPOOL_TOKEN_FILE)" in refused.stderr
    unknown = stats(manager.address, {**tls, "RADIXPOOL_TOKEN": new_token().secret})
    assert "the bearer token is not known" in unknown.stderr
    without_tls = stats(manager.address, {"RADIXPOOL_TOKEN": token.secret})
    assert without_tls.returncode == 3
    code, errors = manager.stop()
    assert code == 0
    events = [json.loads(line) for line in errors.splitlines()]
    assert {event["reason"] for event in events if event["event"] == "call refused"} == {"UNAUTHENTICATED"}
    assert token.secret not in errors


@pytest.mark.parametrize("missing", ["tls_key", "credentials"])
def test_an_exposed_manager_without_its_guards_does_not_start(config: Path, missing: str) -> None:
    lines = [line for line in config.read_text().splitlines() if not line.startswith(missing)]
    config.write_text("\n".join(lines))
    done = subprocess.run(
        [*CLI, "serve", "--config", str(config)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert missing in done.stderr
    assert "Traceback" not in done.stderr


def test_unusable_files_are_one_line(config: Path, tmp_path: Path) -> None:
    (tmp_path / "server.key").write_text("not a key")
    done = subprocess.run(
        [*CLI, "serve", "--config", str(config)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "no usable certificate and key" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_printed_configuration_starts_the_same_manager(start: Callable[..., Manager], tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/m.sock"
    if len(listen) > 100:
        pytest.skip("the temporary folder's path is too long for a unix socket")
    flags = ["--num-blocks", "7", "--listen", listen, "--log-format", "json"]
    printed = subprocess.run(
        [*CLI, "serve", *flags, "--print-config"], capture_output=True, text=True, timeout=60, check=True
    )
    path = tmp_path / "printed.toml"
    path.write_text(printed.stdout)
    manager = start("--config", str(path))
    assert (manager.ready["num_blocks"], manager.ready["address"]) == (7, listen)
    assert manager.stop()[0] == 0
