from __future__ import annotations

import pytest

from radixpool.rpc.address import TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address", "is_local"),
    [
        ("127.0.0.1:80", TcpAddress("127.0.0.1", 80), True),
        ("localhost:0", TcpAddress("localhost", 0), True),
        ("[::1]:7300", TcpAddress("::1", 7300), True),
        ("0.0.0.0:7300", TcpAddress("0.0.0.0", 7300), False),
        ("10.1.2.3:7300", TcpAddress("10.1.2.3", 7300), False),
        ("example.org:7300", TcpAddress("example.org", 7300), False),
        ("unix:/run/r.sock", UnixAddress("/run/r.sock"), True),
        ("unix:///run/r.sock", UnixAddress("/run/r.sock"), True),
    ],
)
def test_addresses(text, address, is_local):
    parsed = parse_address(text)
    assert parsed == address
    assert parsed.is_local is is_local
    assert parse_address(parsed.target) == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "HOST:PORT"),
        ("localhost", "HOST:PORT"),
        (":7300", "HOST:PORT"),
        ("localhost:http", "port"),
        ("localhost:65536", "65535"),
        ("localhost:-1", "port"),
        ("unix:relative.sock", "absolute"),
        (f"unix:/{'x' * 107}", "107"),
    ],
)
def test_malformed_addresses_name_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse_address(text)
