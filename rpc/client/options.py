"""How a client behaves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
    timeout_s: how long one call may take.
    security: token and mutual TLS; None means what the RADIXPOOL_TOKEN, _TOKEN_FILE and _TLS_* variables say.
    """

    name: str = ""
    role: ClientRole = ClientRole.FRONTEND
    timeout_s: float = 10.0
    security: ClientSecurity | None = None
