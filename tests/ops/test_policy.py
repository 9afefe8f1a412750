"""The table of who may call what is complete, and a batch is no way around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2

from radixpool.rpc.security.identity import Role
from radixpool.rpc.security.policy import ANYONE, METHOD_ROLES
from radixpool.v1 import admin_pb2, cache_pb2, pool_pb2, worker_pb2


def methods() -> Iterator[MethodDescriptor]:
    for module in (cache_pb2, pool_pb2, admin_pb2, worker_pb2, health_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@pytest.mark.parametrize("method", [path(method) for method in methods()])
def test_every_method_has_a_row(method: str) -> None:
    assert method in METHOD_ROLES


def test_only_health_is_for_anyone() -> None:
    open_methods = {method for method, roles in METHOD_ROLES.items() if roles == ANYONE}
    assert {method.rpartition("/")[0] for method in open_methods} == {"/grpc.health.v1.Health"}


def test_operations_of_a_batch_can_do_no_more_than_the_methods_of_their_names() -> None:
    for field in cache_pb2.Operation.DESCRIPTOR.fields:
        name = "".join(word.capitalize() for word in field.name.split("_"))
        alone = METHOD_ROLES[f"/radixpool.v1.CacheService/{name}"]
        for carrier in ("Batch", "Session"):
            carried = METHOD_ROLES[f"/radixpool.v1.CacheService/{carrier}"]
            assert carried <= alone, f"{carrier} would let {carried - alone} {name}"


def test_a_step_in_columns_can_do_no_more_than_extend_and_commit() -> None:
    """A new field of a batch that could act has to be held against the methods of what it does, as this one is."""
    plain = {"header", "operations", "steps"}
    for carrier in (cache_pb2.BatchRequest, cache_pb2.SessionRequest):
        assert {field.name for field in carrier.DESCRIPTOR.fields} - plain == {"step_update"}
        carried = METHOD_ROLES[f"/radixpool.v1.CacheService/{carrier.DESCRIPTOR.name.removesuffix('Request')}"]
        for method in ("Extend", "Commit"):
            assert carried <= METHOD_ROLES[f"/radixpool.v1.CacheService/{method}"]


def test_frontends_reach_neither_operators_methods_nor_the_pool() -> None:
    reached = {method for method, roles in METHOD_ROLES.items() if Role.FRONTEND in roles}
    assert not [method for method in reached if "AdminService" in method or "PoolService" in method]
