"""Who a caller is: name, roles, tenant and until when; and how code below the interceptor learns it."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a credential is for; `radixpool.rpc.security.policy` says what each may call."""

    FRONTEND = "frontend"
    WORKER = "worker"
    POOL_HOLDER = "pool_holder"
    OPERATOR = "operator"
    SUBSCRIBER = "subscriber"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """An authenticated caller.

    Attributes:
        name: shown in logs.
        roles: what it may be.
        tenant: the only tenant it may touch; None for the roles that serve all tenants.
        expires_at: end of the credential in seconds since the epoch, infinity for never.
        credential: which token or certificate it came from, in public words.

    """

    name: str
    roles: frozenset[Role]
    tenant: str | None = None
    expires_at: float = math.inf
    credential: str = ""


LOCAL_IDENTITY = Identity(name="local", roles=frozenset(Role))
"""Whoever can reach the socket of a manager that runs without a credential file."""

current_identity: ContextVar[Identity | None] = ContextVar("radixpool_identity", default=None)
"""The caller of the call that this thread serves. None outside of a call."""


def current_tenant() -> str | None:
    """Return the only tenant that the present caller may touch, None when it may touch all. O(1)."""
    identity = current_identity.get()
    return None if identity is None else identity.tenant
