"""How clients open a gRPC channel: message sizes, keepalive, and what a dead peer looks like."""

from __future__ import annotations

import os
from typing import Final

import grpc
import grpc.aio

from radixpool.rpc import limits
from radixpool.rpc.security.client import ClientSecurity

CONNECT_TIMEOUT_MS: Final = 5_000
KEEPALIVE_TIME_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000

# gRPC reads this when the first channel is made. A connection under way makes progress only while a call waits for it,
# or when this timer fires: at its default of 5 s a client with short calls took as long to find a manager again.
os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "200")

CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # A manager that restarts should be found again within a second, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # What gRPC does with this one is to limit a single attempt, TLS handshake included: a busy machine needs its time.
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    # One connection per client: a shared one would hide that a client is gone.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)


def open_channel(address: str, security: ClientSecurity | None = None) -> grpc.Channel:
    """Return a channel to `address`; it connects when first used. `security` None means what the environment says.

    Raises ValueError for a malformed address and for credentials that would travel in the clear.
    """
    return (security or ClientSecurity.from_environment()).open_channel(address, CHANNEL_OPTIONS)


def open_async_channel(address: str, security: ClientSecurity | None = None) -> grpc.aio.Channel:
    """Return an asyncio channel; as `open_channel`."""
    return (security or ClientSecurity.from_environment()).open_async_channel(address, CHANNEL_OPTIONS)
