"""Checks of single values and of options that only make sense together. Pure functions; files are not opened here."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final

from radixpool.rpc.address import UnixAddress, parse_address
from radixpool.rpc.config.errors import ConfigError

if TYPE_CHECKING:
    from radixpool.rpc.config.schema import ServeConfig

MAX_TOPIC_BYTES: Final = 256
_TCP: Final = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
MAX_PORT: Final = 65_535


def check_endpoint(endpoint: str) -> None:
    """Raise ValueError unless `endpoint` is tcp://HOST:PORT or ipc:///path."""
    match = _TCP.fullmatch(endpoint)
    if match and int(match[2]) <= MAX_PORT:
        return
    if endpoint.startswith("ipc:///"):
        return
    raise ValueError("a ZMQ endpoint is tcp://HOST:PORT or ipc:///path")


def endpoint_is_local(endpoint: str) -> bool:
    """Return whether only this machine can reach a valid ZMQ endpoint.

    >>> endpoint_is_local("tcp://*:5557"), endpoint_is_local("tcp://[::1]:5557")
    (False, True)
    """
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return True
    host = match[1].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_tcp_address(address: str) -> None:
    """Raise ValueError unless `address` is HOST:PORT."""
    if isinstance(parse_address(address), UnixAddress):
        raise ValueError("a unix socket cannot be scraped; use HOST:PORT")


def check_topic(topic: str) -> None:
    """Raise ValueError for a topic that is too long."""
    if len(topic.encode()) > MAX_TOPIC_BYTES:
        raise ValueError(f"a topic has at most {MAX_TOPIC_BYTES} bytes, this one has {len(topic.encode())}")


def check_together(config: ServeConfig) -> None:
    """Raise ConfigError when options contradict each other."""
    _check_security(config)
    _check_kv_events(config)


def _check_security(config: ServeConfig) -> None:
    security = config.security
    tls = {name: getattr(security, name) for name in ("tls_cert", "tls_key", "tls_client_ca")}
    missing = [f"security.{name}" for name, value in tls.items() if not value]
    if 0 < len(missing) < len(tls):
        raise ConfigError(f"mutual TLS needs all of tls_cert, tls_key and tls_client_ca; missing: {', '.join(missing)}")
    for key, address in (("server.listen", config.server.listen), ("metrics.listen", config.metrics.listen)):
        if missing and _is_exposed(address):
            raise ConfigError(
                f"{key} is {address!r}, which other machines can reach: that needs mutual TLS; "
                f"missing: {', '.join(missing)}"
            )
    if not security.credentials and _is_exposed(config.server.listen):
        raise ConfigError(
            f"server.listen is {config.server.listen!r}, which other machines can reach: that needs "
            "security.credentials, or every holder of a certificate could read every tenant's cache"
        )


def _is_exposed(address: str) -> bool:
    return address != "" and not parse_address(address).is_local


def _check_kv_events(config: ServeConfig) -> None:
    events = config.kv_events
    if events.replay_endpoint and not events.endpoint:
        raise ConfigError("kv_events.replay_endpoint needs kv_events.endpoint")
    if events.replay_endpoint and events.replay_endpoint == events.endpoint:
        raise ConfigError(
            f"kv_events.replay_endpoint must differ from kv_events.endpoint, both are {events.endpoint!r}"
        )
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(events, name)
        if endpoint and not events.allow_remote and not endpoint_is_local(endpoint):
            raise ConfigError(
                f"kv_events.{name} is {endpoint!r}, which other machines can reach, and events hold token ids in the "
                "clear: use loopback or ipc, or set kv_events.allow_remote"
            )
