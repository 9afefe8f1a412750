"""How a client behaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from radixpool.rpc import limits
from radixpool.rpc.client.retry import RetryOptions
from radixpool.rpc.security.client import ClientSecurity


class ClientRole(Enum):
    """What a client is for; shown to operators."""

    FRONTEND = 1
    WORKER = 2
    POOL_HOLDER = 3
    OPERATOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client behaves.

    name: shown to operators, at most 128 bytes; "" means the host name and process id.
    role: what the client is for.
    client_id: 16 random bytes that name this client to every life of the manager; None draws new ones. A process that
        makes one client after another should pass the same id to each: the manager then knows that what the former
        one did is over, and need not wait for it.
    timeout_s: how long one attempt of a call may take.
    retry: how long and how often a call is tried again while nobody answers.
    security: token and mutual TLS; None means what the RADIXPOOL_TOKEN, _TOKEN_FILE and _TLS_* variables say.
    """

    name: str = ""
    role: ClientRole = ClientRole.FRONTEND
    client_id: bytes | None = field(default=None, repr=False)
    timeout_s: float = 10.0
    retry: RetryOptions = field(default_factory=RetryOptions)
    security: ClientSecurity | None = None

    def __post_init__(self) -> None:
        if self.client_id is not None and len(self.client_id) != limits.CLIENT_ID_BYTES:
            raise ValueError(f"client_id must be {limits.CLIENT_ID_BYTES} bytes, got {len(self.client_id)}")
