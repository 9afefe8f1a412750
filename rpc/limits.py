"""Every limit of the wire, by name.

A request beyond a limit is refused with an error that names the field, the limit and the value; nothing else changes.
"""

from __future__ import annotations

from typing import Final

CLIENT_ID_BYTES: Final = 16
HANDLE_BYTES: Final = 16
POOL_ID_BYTES: Final = 16
CUDA_IPC_HANDLE_BYTES: Final = 64
DEVICE_UUID_BYTES: Final = 16
MAX_CUDA_ALLOCATIONS: Final = 1024

MAX_NAME_BYTES: Final = 128
MAX_NAMESPACE_FIELD_BYTES: Final = 512
MAX_PATH_BYTES: Final = 4096

MAX_MESSAGE_BYTES: Final = (4 << 20) + (64 << 10)
"""One request or reply: a prompt of 1,048,576 tokens, and room for what comes with it. It is also what bounds memory:
every thread may be given one request of this size."""
MAX_BATCH_OPERATIONS: Final = 4096
MAX_STEP_ROWS: Final = 4096
"""Sequences in the columns of one step."""
MAX_HANDLES_PER_QUERY: Final = 4096
MAX_CLIENTS: Final = 4096
MAX_SEQUENCES_PER_CLIENT: Final = 65_536
MAX_SESSIONS: Final = 64
"""Open Session streams; each holds one server thread."""
MAX_SUBSCRIBERS: Final = 16
"""Open SubscribeEvents streams; each holds one server thread."""
EVENTS_PER_MESSAGE: Final = 64
UNARY_THREADS: Final = 6
"""Threads of unary calls, and so the most unary requests that are read at once. One lock guards the cache, so more
would only queue."""
SPARE_STREAM_THREADS: Final = 8
"""Threads of streams beyond those with a place: for reflection, and to turn the surplus away."""
PROBE_THREADS: Final = 2
"""Threads of health checks, which anybody may make."""
MAX_REQUEST_BYTES_IN_FLIGHT: Final = 16 << 20
"""Large requests that are read and not answered, all together; one beyond is dropped and answered OVERLOADED."""
LARGE_REQUEST_BYTES: Final = 64 << 10
"""Smaller requests are not counted: threads bound their number."""
MAX_CONNECTIONS: Final = 2048
"""Connections at a time by default; more are closed as soon as they are made. Each takes 12 to 20 KiB of memory."""
RESERVED_FILES: Final = 512
"""Open files that connections leave to everything else: the directory, watched processes, metrics, certificates."""
HANDSHAKE_TIMEOUT_MS: Final = 20_000
"""A connection that has not said by then that it speaks HTTP/2 (and TLS) is closed."""
IDLE_CONNECTION_MS: Final = 600_000
"""A connection without a call for so long is closed; a client opens it again with its next call."""
MAX_METADATA_BYTES: Final = 16 << 10
MAX_CONCURRENT_RPCS: Final = 1024
"""Calls in flight, queued ones included; more are answered RESOURCE_EXHAUSTED at once."""

DEFAULT_INSPECTED: Final = 1000
"""Nodes or sequences in one answer of an inspection, when the request names no number."""
MAX_INSPECTED: Final = 10_000
MAX_EVICTED_BLOCKS: Final = 1_000_000
"""Blocks that one eviction names; the manager does nothing else meanwhile, about 0.2 s."""

REPLY_RETENTION_S: Final = 60.0
"""How long a reply is kept for a request that is sent again, unless the client acknowledges it earlier."""
MAX_REPLY_BYTES: Final = 32 << 20
"""All kept replies together, each with its share of bookkeeping."""
KEPT_REPLY_OVERHEAD_BYTES: Final = 1024

MIN_LEASE_TTL_MS: Final = 100
DEFAULT_LEASE_TTL_MS: Final = 10_000
MAX_LEASE_TTL_MS: Final = 3_600_000
EXPIRY_SLICE_SEQUENCES: Final = 64
"""Sequences of expired clients that are aborted under one hold of the lock."""
EXPIRY_SLICE_BLOCKS: Final = 16_384
"""Blocks after which such a hold ends, whatever the number of sequences; one sequence is always ended as a whole."""

SERVER_PINGS: Final = (
    # Clients ping every 10 s to notice a dead server; without this they would be cut off for it while an answer waits.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A frozen client must not keep a stream, and the thread behind it, for ever.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
"""gRPC options of managers and workers."""
