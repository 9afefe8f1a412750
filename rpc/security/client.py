"""What a client shows to a manager or worker: a bearer token, and mutual TLS beyond this machine.

A token is added to each call by a thin channel around gRPC's own, because gRPC's call credentials refuse unix sockets
and its client interceptors cost too much a call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from radixpool.rpc.address import parse_address
from radixpool.rpc.security.tokens import token_id_of
from radixpool.rpc.security.transport import TlsFiles

TOKEN_ENV: Final = "RADIXPOOL_TOKEN"
TOKEN_FILE_ENV: Final = "RADIXPOOL_TOKEN_FILE"
TLS_ENV: Final = ("RADIXPOOL_TLS_CERT", "RADIXPOOL_TLS_KEY", "RADIXPOOL_TLS_CA")

Options: TypeAlias = tuple[tuple[str, Any], ...]
_Metadata: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurity:
    """A client's credentials; the default has none, which is enough for a unix socket or loopback without tokens.

    Attributes:
        token: bearer token, empty for none.
        tls: our certificate and the authority of the server's, None for a plain connection.

    """

    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        if self.token and token_id_of(self.token) is None:
            raise ValueError(f"token must look like rpt_ID_SECRET, got {len(self.token)} characters of something else")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ClientSecurity:
        """Return what the RADIXPOOL_TOKEN, RADIXPOOL_TOKEN_FILE and RADIXPOOL_TLS_* variables say.

        Raises ValueError for a variable that cannot be used.
        """
        token = environment.get(TOKEN_ENV, "")
        path = environment.get(TOKEN_FILE_ENV, "")
        if path and not token:
            try:
                token = Path(path).read_text().strip()
            except OSError as error:
                raise ValueError(f"{TOKEN_FILE_ENV}: {path} cannot be read: {error.strerror}") from None
        files = [environment.get(name, "") for name in TLS_ENV]
        if any(files) and not all(files):
            missing = [name for name, value in zip(TLS_ENV, files, strict=True) if not value]
            raise ValueError(f"mutual TLS needs {', '.join(TLS_ENV)}; missing: {', '.join(missing)}")
        return cls(token=token, tls=TlsFiles(*map(Path, files)) if all(files) else None)

    def open_channel(self, address: str, options: Options) -> grpc.Channel:
        """Return a channel that shows these credentials. Raises ValueError when they would travel in the clear."""
        target = self._checked_target(address)
        if self.tls is None:
            channel = grpc.insecure_channel(target, options=options)
        else:
            channel = grpc.secure_channel(target, self.tls.channel_credentials(), options=options)
        return _TokenChannel(channel, self._metadata) if self.token else channel

    def open_async_channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """Return an asyncio channel that shows these credentials; raises as `open_channel`."""
        target = self._checked_target(address)
        if self.tls is None:
            channel = grpc.aio.insecure_channel(target, options=options)
        else:
            channel = grpc.aio.secure_channel(target, self.tls.channel_credentials(), options=options)
        return _AsyncTokenChannel(channel, self._metadata) if self.token else channel

    def _checked_target(self, address: str) -> str:
        parsed = parse_address(address)
        if self.token and self.tls is None and not parsed.is_local:
            raise ValueError(f"address {address!r} is on another machine: a token is sent there with mutual TLS only")
        return parsed.target

    @property
    def _metadata(self) -> _Metadata:
        return (("authorization", f"Bearer {self.token}"),)


class _TokenCall:
    """One method of a stub that adds the token's metadata to every call."""

    __slots__ = ("_inner", "_metadata")

    def __init__(self, inner: Any, metadata: _Metadata) -> None:
        self._inner = inner
        self._metadata = metadata

    def __call__(self, request: Any = None, *, metadata: Any = (), **options: Any) -> Any:
        return self._inner(request, metadata=(*metadata, *self._metadata), **options)

    def with_call(self, request: Any, *, metadata: Any = (), **options: Any) -> Any:
        return self._inner.with_call(request, metadata=(*metadata, *self._metadata), **options)

    def future(self, request: Any, *, metadata: Any = (), **options: Any) -> Any:
        return self._inner.future(request, metadata=(*metadata, *self._metadata), **options)


class _TokenMethods:
    """What the blocking and the asyncio channel have in common: how stubs make their methods."""

    def __init__(self, channel: Any, metadata: _Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return _TokenCall(self._channel.unary_unary(*arguments, **options), self._metadata)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return _TokenCall(self._channel.unary_stream(*arguments, **options), self._metadata)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return _TokenCall(self._channel.stream_unary(*arguments, **options), self._metadata)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return _TokenCall(self._channel.stream_stream(*arguments, **options), self._metadata)

    def close(self, *arguments: Any) -> Any:
        return self._channel.close(*arguments)


class _TokenChannel(_TokenMethods, grpc.Channel):
    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._channel.unsubscribe(callback)

    def __enter__(self) -> _TokenChannel:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._channel.close()


class _AsyncTokenChannel(_TokenMethods, grpc.aio.Channel):
    async def __aenter__(self) -> _AsyncTokenChannel:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self._channel.close()

    def get_state(self, try_to_connect: bool = False) -> Any:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: Any) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
