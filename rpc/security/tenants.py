"""Put the caller's tenant into every namespace of a request, whatever the request says.

Which fields of a message hold namespaces is read off its descriptor once, so a new operation is bound without anybody
remembering to: `bind` visits every namespace that can be reached, and sets those that are absent.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from radixpool.rpc.errors import PermissionDenied
from radixpool.v1 import common_pb2

NAMESPACE = common_pb2.Namespace.DESCRIPTOR.full_name


def bind(message: Message, tenant: str) -> None:
    """Set the tenant of every namespace in `message`. O(its sub-messages).

    Raises PermissionDenied when one names another tenant; the message must not be used then.
    """
    namespaces, singular, repeated = _paths(message.DESCRIPTOR)
    for name in namespaces:
        _bind_namespace(getattr(message, name), tenant)
    for name in singular:
        if message.HasField(name):
            bind(getattr(message, name), tenant)
    for name in repeated:
        for part in getattr(message, name):
            bind(part, tenant)


def _bind_namespace(namespace: Any, tenant: str) -> None:
    named = namespace.tenant
    if named and named != tenant:
        raise PermissionDenied(f"namespace.tenant is {named!r}, this credential is of tenant {tenant!r}")
    namespace.tenant = tenant
    # An empty tenant leaves the field as it was; presence must not depend on it.
    namespace.SetInParent()


@cache
def _paths(descriptor: Descriptor) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the fields of a message that are namespaces, and those, single and repeated, that can hold one."""
    namespaces: list[str] = []
    singular: list[str] = []
    repeated: list[str] = []
    for field in descriptor.fields:
        kind = field.message_type
        if kind is None:
            continue
        if kind.full_name == NAMESPACE:
            if field.is_repeated or field.containing_oneof is not None:
                raise TypeError(f"{field.full_name}: a namespace must be a single field outside of a oneof")
            namespaces.append(field.name)
        elif _holds_namespace(kind, frozenset({descriptor.full_name})):
            (repeated if field.is_repeated else singular).append(field.name)
    return tuple(namespaces), tuple(singular), tuple(repeated)


def _holds_namespace(descriptor: Descriptor, seen: frozenset[str]) -> bool:
    if descriptor.full_name == NAMESPACE:
        return True
    fields: list[FieldDescriptor] = [field for field in descriptor.fields if field.message_type is not None]
    inner = seen | {descriptor.full_name}
    return any(
        _holds_namespace(field.message_type, inner) for field in fields if field.message_type.full_name not in seen
    )
