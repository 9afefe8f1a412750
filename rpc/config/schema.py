"""Every option of `radixpool serve`, section by section. This file is the only place where an option is declared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from radixpool.radix.eviction import parse_policy
from radixpool.rpc import limits
from radixpool.rpc.address import parse_address
from radixpool.rpc.config.checks import check_endpoint, check_tcp_address, check_topic
from radixpool.rpc.config.option import option

MAX_NUM_BLOCKS: Final = 2**31 - 1
MAX_BLOCK_SIZE_TOKENS: Final = 65_536
MAX_DRAIN_S: Final = 3_600.0
MAX_CONNECTIONS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The gRPC listener."""

    listen: str = option(
        "",
        "Where to listen: unix:/path (socket mode 0600) or HOST:PORT. A host other than loopback needs mutual TLS. "
        "Empty means unix:$XDG_RUNTIME_DIR/radixpool.sock, or 127.0.0.1:7300 where that variable is not set.",
        flag="--listen",
        env="RADIXPOOL_ADDRESS",
        check=parse_address,
    )
    drain_timeout_s: float = option(
        10.0,
        "How long SIGTERM lets running calls go on before they are cut off.",
        flag="--drain-timeout",
        limits=(0.0, MAX_DRAIN_S),
    )
    max_connections: int = option(
        limits.MAX_CONNECTIONS,
        "Connections at a time; more are closed as soon as they are made. Each takes up to 20 KiB of memory and an "
        "open file (the soft limit of open files is raised as far as it goes).",
        flag="--max-connections",
        limits=(1, MAX_CONNECTIONS),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The cache and the leases of those who use it."""

    num_blocks: int = option(65_536, "KV blocks of the physical pool.", flag="--num-blocks", limits=(1, MAX_NUM_BLOCKS))
    block_size: int = option(16, "Tokens in one block.", flag="--block-size", limits=(1, MAX_BLOCK_SIZE_TOKENS))
    policy: str = option(
        "lru",
        "Eviction policy with its parameters, such as lru or s3fifo:small=0.1.",
        flag="--policy",
        check=parse_policy,
    )
    advice_cpu_share: float = option(
        0.01,
        "Most of the time that the sampled shadow behind `radixpool advise` may take; 0 keeps none.",
        flag="--advice-cpu-share",
        limits=(0.0, 1.0),
    )
    lease_ttl_ms: int = option(
        limits.DEFAULT_LEASE_TTL_MS,
        "How long a client may be silent before its sequences are aborted.",
        flag="--lease-ttl-ms",
        limits=(limits.MIN_LEASE_TTL_MS, limits.MAX_LEASE_TTL_MS),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """The block directory, which lets the cache outlive the manager."""

    path: str = option(
        "",
        "Folder that keeps the cache over a restart, best on a memory file system; it holds the token ids of prompts. "
        "Empty keeps nothing.",
        flag="--directory",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Who may connect, and as whom."""

    tls_cert: str = option("", "PEM file: certificate chain of the manager.", flag="--tls-cert")
    tls_key: str = option("", "PEM file: private key of the manager.", flag="--tls-key")
    tls_client_ca: str = option(
        "", "PEM file: authorities whose client certificates are accepted.", flag="--tls-client-ca"
    )
    credentials: str = option(
        "",
        "TOML file of bearer tokens and certificate names with their tenant, role and expiry. Empty trusts whoever "
        "can connect; it is required beyond loopback.",
        flag="--credentials",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """The Prometheus listener."""

    listen: str = option(
        "",
        "HOST:PORT to serve GET /metrics at, over HTTP on loopback, over mutual TLS elsewhere; empty serves none.",
        flag="--metrics-listen",
        check=check_tcp_address,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsConfig:
    """Logs on stderr."""

    level: str = option(
        "info", "Least severe level to write.", flag="--log-level", choices=("debug", "info", "warning", "error")
    )
    format: str = option(
        "console", "console for people, json for machines.", flag="--log-format", choices=("console", "json")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """KV events as vLLM publishes them, for routers that send requests to the node that holds their prefix."""

    endpoint: str = option(
        "",
        "ZMQ endpoint to publish at, such as tcp://127.0.0.1:5557; empty publishes nothing. Needs radixpool[events].",
        flag="--kv-events",
        check=check_endpoint,
    )
    replay_endpoint: str = option(
        "",
        "ZMQ endpoint that answers replay requests; empty answers none.",
        flag="--kv-events-replay",
        check=check_endpoint,
    )
    topic: str = option(
        "", "First frame of every message; subscribers filter by it.", flag="--kv-events-topic", check=check_topic
    )
    encoding: str = option(
        "map",
        "map as vLLM 0.33 writes events, array for consumers of older versions.",
        flag="--kv-events-encoding",
        choices=("map", "array"),
    )
    buffer_batches: int = option(
        10_000, "Published batches kept for replay.", flag="--kv-events-buffer", limits=(1, 1_000_000)
    )
    medium: str = option(
        "GPU", "Tier of memory that the pool is announced as.", flag="--kv-events-medium", choices=("GPU", "CPU")
    )
    data_parallel_rank: int = option(
        0,
        "Rank written into each batch, for several managers behind one name.",
        flag="--kv-events-rank",
        limits=(0, 65_535),
    )
    allow_remote: bool = option(
        False,
        "Let an endpoint be reached from other machines. Events hold token ids and ZMQ neither encrypts nor asks who "
        "listens, so only do this on a network that you trust.",
        flag="--kv-events-allow-remote",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The whole configuration of a manager."""

    server: ServerConfig = field(default_factory=ServerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)
