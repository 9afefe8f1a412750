"""Every namespace that a request can hold is bound to the caller's tenant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from radixpool.rpc.errors import PermissionDenied
from radixpool.rpc.security.tenants import NAMESPACE, bind
from radixpool.v1 import admin_pb2, cache_pb2, common_pb2, pool_pb2, worker_pb2

REQUESTS = {
    f"{service.name}.{method.name}": GetMessageClass(method.input_type)
    for module in (cache_pb2, pool_pb2, admin_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def variants(kind: Any, depth: int = 0) -> Iterator[Message]:
    """Yield messages in which every sub-message is present once, one branch of a oneof at a time."""
    choices = [oneof for oneof in kind.DESCRIPTOR.oneofs if len(oneof.fields) > 1]
    branches = [field for oneof in choices for field in oneof.fields if field.message_type] or [None]
    for branch in branches:
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            if field.containing_oneof in choices and field is not branch:
                continue
            inner = GetMessageClass(field.message_type)
            parts = list(variants(inner, depth + 1)) if depth < 4 else [inner()]
            if field.is_repeated:
                getattr(message, field.name).extend(parts)
            else:
                getattr(message, field.name).MergeFrom(parts[0])
                getattr(message, field.name).SetInParent()
        yield message


def namespaces(message: Message) -> Iterator[Any]:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else [value]:
            if part.DESCRIPTOR.full_name == NAMESPACE:
                yield part
            else:
                yield from namespaces(part)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("claimed", ["", "acme"])
def test_every_reachable_namespace_is_bound(name: str, claimed: str) -> None:
    for message in variants(REQUESTS[name]):
        present = list(namespaces(message))
        for namespace in present:
            namespace.tenant = claimed
            namespace.SetInParent()
        bind(message, "acme")
        bound = list(namespaces(message))
        assert len(bound) >= len(present)
        assert {namespace.tenant for namespace in bound} <= {"acme"}


def test_the_walk_sees_the_namespaces_that_matter() -> None:
    found = {name for name, kind in REQUESTS.items() for message in variants(kind) if list(namespaces(message))}
    assert {"CacheService.Acquire", "CacheService.Match", "CacheService.Batch", "CacheService.Session"} <= found
    assert "WorkerService.Generate" in found


def test_an_absent_namespace_is_set_also_for_the_empty_tenant() -> None:
    for tenant in ("acme", ""):
        request = cache_pb2.BatchRequest(operations=[cache_pb2.Operation(acquire=cache_pb2.AcquireRequest())])
        bind(request, tenant)
        assert request.operations[0].acquire.HasField("namespace")
        assert request.operations[0].acquire.namespace.tenant == tenant


def test_binding_invents_no_operation() -> None:
    request = cache_pb2.BatchRequest(operations=[cache_pb2.Operation(commit=cache_pb2.CommitRequest(upto_tokens=3))])
    before = request.SerializeToString()
    bind(request, "acme")
    assert request.SerializeToString() == before


@pytest.mark.parametrize("tenant", ["acme", ""])
def test_another_tenant_is_refused_wherever_it_stands(tenant: str) -> None:
    foreign = cache_pb2.AcquireRequest(namespace=common_pb2.Namespace(tenant="rival"))
    operations = [cache_pb2.Operation(match=cache_pb2.MatchRequest()), cache_pb2.Operation(acquire=foreign)]
    for message in (foreign, cache_pb2.BatchRequest(operations=operations)):
        with pytest.raises(
            PermissionDenied, match=f"namespace.tenant is 'rival', this credential is of tenant '{tenant}'"
        ):
            bind(message, tenant)
