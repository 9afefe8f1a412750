"""The one place where calls are authorised: who is it, may it call this, and whose data may it name.

A call is authenticated before its request is parsed; one that is turned away costs no parsing. The identity then
travels in `current_identity`. A frontend's requests, and every message of its streams, are bound to its tenant; a
stream ends when its credential expires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, Final, NoReturn, Protocol, cast

import grpc
from grpc_status import rpc_status

from radixpool.rpc.errors import PermissionDenied, Unauthenticated
from radixpool.rpc.interception import Behavior, Continuation, Handler, behavior_of, with_behavior
from radixpool.rpc.security.identity import LOCAL_IDENTITY, Identity, Role, current_identity
from radixpool.rpc.security.policy import ANYONE, METHOD_ROLES
from radixpool.rpc.security.tenants import bind
from radixpool.rpc.status import status_from_error

MAX_CACHED_HANDLERS: Final = 512
_SCHEME: Final = "Bearer "
_SAN_KEY: Final = "x509_subject_alternative_name"


class Authenticator(Protocol):
    """Knows credentials; `CredentialFile` is one."""

    @property
    def knows_certificates(self) -> bool:
        """Whether a client certificate alone can identify a caller."""

    def by_token(self, token: str) -> Identity:
        """Return who bears the token. Raises Unauthenticated."""

    def by_certificate(self, names: Iterable[str]) -> Identity:
        """Return who has a verified certificate with one of these names. Raises Unauthenticated."""

    def is_expired(self, identity: Identity) -> bool:
        """Return whether the identity's credential is over by now."""


class LocalAuthenticator:
    """Takes whoever reaches the socket as trusted: for a unix socket or loopback without a credential file."""

    knows_certificates = False

    def by_token(self, token: str) -> Identity:
        """Return the local identity: a token that nobody asked for does no harm."""
        return LOCAL_IDENTITY

    def by_certificate(self, names: Iterable[str]) -> Identity:
        """Return the local identity."""
        return LOCAL_IDENTITY

    def is_expired(self, identity: Identity) -> bool:
        """Return False: being local does not expire."""
        return False


class AuthInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Lets a call through when `table` has a role of its caller for its method. `authenticator` None trusts locally."""

    def __init__(
        self,
        authenticator: Authenticator | None = None,
        *,
        table: Mapping[str, frozenset[Role]] = METHOD_ROLES,
    ) -> None:
        self._authenticator = authenticator or LocalAuthenticator()
        self._anonymous = LOCAL_IDENTITY if authenticator is None else None
        self._table = table
        self._allowed = lru_cache(maxsize=MAX_CACHED_HANDLERS)(self._allow)
        # The cast: mypy takes a class for unhashable.
        self._denied = cast("Callable[[type[Exception], str], Handler]", lru_cache(maxsize=MAX_CACHED_HANDLERS)(_deny))

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the method's handler, one that turns the call away, or None for an unknown method."""
        method = handler_call_details.method
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        roles = self._table.get(method)
        if roles is None:
            return self._denied(PermissionDenied, f"{method} may be called by nobody")
        if roles == ANYONE:
            return handler
        try:
            identity = self._by_metadata(handler_call_details.invocation_metadata)
            if identity is not None:
                _check_role(identity, roles, method)
        except (Unauthenticated, PermissionDenied) as error:
            return self._denied(type(error), str(error))
        current_identity.set(identity)
        return self._allowed(method, handler)

    def _by_metadata(self, metadata: Any) -> Identity | None:
        """Return the caller by its token; None when only its certificate, which is not known yet, can tell."""
        if self._anonymous is not None:
            return self._anonymous
        found: list[str] = [value for key, value in metadata or () if key == "authorization"]
        if not found:
            if self._authenticator.knows_certificates:
                return None
            raise Unauthenticated("a bearer token is needed")
        if len(found) > 1 or not isinstance(found[0], str) or not found[0].startswith(_SCHEME):
            raise Unauthenticated("authorization must be one header: Bearer TOKEN")
        return self._authenticator.by_token(found[0].removeprefix(_SCHEME))

    def _allow(self, method: str, handler: Handler) -> Handler:
        """Wrap a handler so that its requests are bound to the tenant of whoever calls. Made once a method."""
        if self._anonymous is not None:
            return handler
        inner = behavior_of(handler)
        guarded = partial(self._guard_requests if handler.request_streaming else self._guard_request, method, inner)
        if handler.response_streaming:
            return with_behavior(handler, _ending_streams(partial(self._until_expired, guarded)))
        return with_behavior(handler, _ending(guarded))

    def _until_expired(self, inner: Behavior, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        for response in inner(request, context):
            identity = current_identity.get()
            if identity is not None:
                self._check_expiry(identity)
            yield response

    def _guard_request(self, method: str, inner: Behavior, request: Any, context: grpc.ServicerContext) -> Any:
        self._bind(self._identify(method, context), request)
        return inner(request, context)

    def _guard_requests(self, method: str, inner: Behavior, requests: Any, context: grpc.ServicerContext) -> Any:
        identity = self._identify(method, context)

        def bound(request: Any) -> Any:
            self._bind(identity, request)
            return request

        return inner(map(bound, requests), context)

    def _identify(self, method: str, context: grpc.ServicerContext) -> Identity:
        """Return the caller, by now known for certain, and let the code below see it."""
        identity = current_identity.get()
        if identity is None:
            found = cast("Mapping[str, Iterable[bytes]]", context.auth_context()).get(_SAN_KEY, ())
            names = [name.decode(errors="replace") for name in found]
            identity = self._authenticator.by_certificate(names)
            _check_role(identity, self._table[method], method)
            current_identity.set(identity)
        return identity

    def _bind(self, identity: Identity, request: Any) -> None:
        self._check_expiry(identity)
        if identity.tenant is not None:
            bind(request, identity.tenant)

    def _check_expiry(self, identity: Identity) -> None:
        if self._authenticator.is_expired(identity):
            raise Unauthenticated(f"the credential of {identity.name!r} has expired or was revoked")


def _check_role(identity: Identity, roles: frozenset[Role], method: str) -> None:
    if not identity.roles & roles:
        have, need = (", ".join(sorted(names)) for names in (identity.roles, roles))
        raise PermissionDenied(f"{method} needs a role of: {need}; {identity.name!r} has: {have}")


def _ending(behavior: Behavior) -> Behavior:
    """Return a behavior that ends the call when it is turned away."""

    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behavior(request, context)
        except (Unauthenticated, PermissionDenied) as error:
            _abort(context, error)

    return call


def _ending_streams(behavior: Behavior) -> Behavior:
    """As `_ending`, for calls that answer with a stream."""

    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behavior(request, context)
        except (Unauthenticated, PermissionDenied) as error:
            _abort(context, error)

    return call


def _deny(kind: type[Exception], message: str) -> Handler:
    """Return a handler that ends every call at once.

    It is declared to take a stream whatever the method takes: gRPC gives a thread to a call of any other kind until its
    request has come, so that callers who send none could hold all threads.
    """

    def refuse(_requests: Any, _context: grpc.ServicerContext) -> Any:
        raise kind(message)

    return grpc.stream_unary_rpc_method_handler(_ending(refuse))


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    context.abort_with_status(rpc_status.to_status(status_from_error(error)))
    raise AssertionError("abort_with_status returned")
