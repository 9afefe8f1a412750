"""Which roles may call which method. What is not in the table cannot be called.

A test proves that every method of every service has a row, and that no operation of a Batch or Session can do more
than the method of the same name.
"""

from __future__ import annotations

from typing import Final

from radixpool.rpc.security.identity import Role

ANYONE: Final[frozenset[Role]] = frozenset()
"""No credential is asked for."""
EVERY_ROLE: Final = frozenset(Role)
DATA_PATH: Final = frozenset({Role.FRONTEND, Role.WORKER})
WORKERS: Final = frozenset({Role.WORKER})
POOL: Final = frozenset({Role.WORKER, Role.POOL_HOLDER, Role.OPERATOR})
OPERATORS: Final = frozenset({Role.OPERATOR})
CALLERS: Final = frozenset({Role.FRONTEND, Role.OPERATOR})


def _rows(service: str, **roles: frozenset[Role]) -> dict[str, frozenset[Role]]:
    return {f"/{service}/{method}": allowed for method, allowed in roles.items()}


METHOD_ROLES: Final[dict[str, frozenset[Role]]] = {
    **_rows(
        "radixpool.v1.CacheService",
        GetInfo=EVERY_ROLE,
        RegisterClient=EVERY_ROLE,
        Heartbeat=EVERY_ROLE,
        UnregisterClient=EVERY_ROLE,
        Match=DATA_PATH | OPERATORS,
        Acquire=DATA_PATH,
        Extend=DATA_PATH,
        Reserve=DATA_PATH,
        Commit=DATA_PATH,
        Rewind=DATA_PATH,
        Fork=DATA_PATH,
        Release=DATA_PATH,
        Invalidate=DATA_PATH,
        GetBlockTables=DATA_PATH,
        Batch=DATA_PATH,
        Session=DATA_PATH,
    ),
    **_rows(
        "radixpool.v1.PoolService",
        RegisterPool=frozenset({Role.POOL_HOLDER}),
        AttachPool=WORKERS,
        GetPool=POOL,
    ),
    **_rows(
        "radixpool.v1.AdminService",
        Pin=OPERATORS,
        Unpin=OPERATORS,
        SetRetention=OPERATORS,
        Evict=OPERATORS,
        Flush=OPERATORS,
        SetQuota=OPERATORS,
        GetStats=OPERATORS,
        GetAdvice=OPERATORS,
        CheckInvariants=OPERATORS,
        InspectTree=OPERATORS,
        InspectBlock=OPERATORS,
        InspectSequence=OPERATORS,
        ListClients=OPERATORS,
        ExplainMiss=OPERATORS,
        # Events hold the token ids of everything that is cached, which operators are not shown.
        SubscribeEvents=frozenset({Role.SUBSCRIBER}),
    ),
    **_rows("radixpool.v1.WorkerService", Generate=CALLERS, GetStatus=CALLERS),
    # Probes of systemd and Kubernetes carry no token, and learn nothing but whether the manager serves.
    **_rows("grpc.health.v1.Health", Check=ANYONE, Watch=ANYONE, List=ANYONE),
    **_rows("grpc.reflection.v1alpha.ServerReflection", ServerReflectionInfo=EVERY_ROLE),
    **_rows("grpc.reflection.v1.ServerReflection", ServerReflectionInfo=EVERY_ROLE),
}
