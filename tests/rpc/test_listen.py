"""One address, one manager."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from radixpool.rpc.client import Client
from radixpool.rpc.errors import AddressInUse, AddressUnavailable
from radixpool.rpc.manager import ManagerOptions, ManagerServer


def attempt(address: str) -> ManagerServer:
    server = ManagerServer(ManagerOptions(listen=address, num_blocks=8, block_size=4))
    server.start()
    return server


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_second_manager_never_gets_the_address(make_server, socket_dir, kind):
    first = make_server(listen=f"unix:{socket_dir}/x.sock" if kind == "unix" else "127.0.0.1:0")
    for _ in range(50):
        with pytest.raises(AddressInUse):
            attempt(first.address)
    with Client(first.address) as client:
        assert client.info().num_blocks == 64


def test_the_address_is_free_again_after_a_stop(socket_dir):
    address = f"unix:{socket_dir}/x.sock"
    for _ in range(3):
        server = attempt(address)
        assert stat.S_IMODE((socket_dir / "x.sock").stat().st_mode) == 0o600
        assert stat.S_IMODE((socket_dir / "x.sock.lock").stat().st_mode) == 0o600
        server.stop(0)
        assert list(socket_dir.iterdir()) == []


def test_what_a_dead_manager_left_is_taken_over(socket_dir):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{socket_dir}/x.sock")
    (socket_dir / "x.sock.lock").write_text("")
    server = attempt(f"unix:{socket_dir}/x.sock")
    with Client(server.address) as client:
        assert client.info().num_blocks == 8
    server.stop(0)
    assert list(socket_dir.iterdir()) == []


def test_a_file_that_is_no_socket_is_left_alone(socket_dir):
    (socket_dir / "x.sock").write_text("precious")
    with pytest.raises(AddressUnavailable, match="it exists and is not a socket"):
        attempt(f"unix:{socket_dir}/x.sock")
    assert (socket_dir / "x.sock").read_text() == "precious"
    assert not (socket_dir / "x.sock.lock").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("unix:/nonexistent-directory/x.sock", "No such file or directory"),
    ],
)
def test_an_address_that_cannot_be_listened_on(address, message):
    with pytest.raises(AddressUnavailable, match=message):
        attempt(address)


def test_a_lock_file_is_not_followed_elsewhere(socket_dir):
    target = socket_dir / "target"
    Path(socket_dir / "x.sock.lock").symlink_to(target)
    with pytest.raises(AddressUnavailable):
        attempt(f"unix:{socket_dir}/x.sock")
    assert not target.exists()
