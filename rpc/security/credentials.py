"""The credential file: which tokens and certificates are known, and as whom.

::

    [[token]]                      # made by `radixpool token new`
    id = "5f0c…"                   # 16 hex digits, public
    sha256 = "9b1d…"               # of the whole token
    name = "frontend-7"
    roles = ["frontend"]
    tenant = "acme"                # frontends only: the tenant that all its requests belong to
    expires = 2027-01-01T00:00:00Z # or "never"

    [[certificate]]                # instead of a token, with mutual TLS
    san = "spiffe://cluster/worker"
    name = "worker"
    roles = ["worker"]
    expires = "never"              # the certificate has an end of its own

The file is read again when it changes, so a token is revoked within a second of being taken out. A changed file that
is broken is logged and the last good one stays in force.
"""

from __future__ import annotations

import hmac
import math
import stat
import threading
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import structlog

from radixpool.rpc.errors import Unauthenticated
from radixpool.rpc.security.identity import Identity, Role
from radixpool.rpc.security.tokens import TOKEN_ID, token_digest, token_id_of

MAX_FILE_BYTES: Final = 8 << 20
MAX_ENTRIES: Final = 10_000
MAX_FIELD_CHARS: Final = 512
RELOAD_INTERVAL_S: Final = 1.0
_UNKNOWN_DIGEST: Final = bytes(32)

_log = structlog.get_logger("radixpool.security")


@dataclass(frozen=True, slots=True)
class _Credentials:
    tokens: dict[str, tuple[bytes, Identity]]
    certificates: dict[str, Identity]
    identities: set[Identity]


class CredentialFile:
    """The credentials of one file, kept up to date. Safe from many threads.

    `wall_clock` gives seconds since the epoch, for expiry. Raises ValueError for a file that cannot be used.
    """

    def __init__(self, path: Path | str, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._stamp = _stamp(self._path)
        self._credentials = _load(self._path)
        self._checked_at = wall_clock()

    @property
    def knows_certificates(self) -> bool:
        """Whether a client certificate alone can identify a caller."""
        return bool(self._credentials.certificates)

    def by_token(self, token: str) -> Identity:
        """Return who bears `token`. Raises Unauthenticated. Takes the same time whatever part of a token is wrong."""
        self._refresh()
        token_id = token_id_of(token)
        if token_id is None:
            raise Unauthenticated("the bearer token is not one of this service's")
        digest, identity = self._credentials.tokens.get(token_id, (_UNKNOWN_DIGEST, None))
        if not hmac.compare_digest(token_digest(token), digest) or identity is None:
            raise Unauthenticated("the bearer token is not known")
        return self._unexpired(identity, "token")

    def by_certificate(self, names: Iterable[str]) -> Identity:
        """Return who a verified certificate with these subject alternative names is. Raises Unauthenticated."""
        self._refresh()
        for name in names:
            identity = self._credentials.certificates.get(name)
            if identity is not None:
                return self._unexpired(identity, "certificate's entry")
        raise Unauthenticated("a bearer token is needed: no name of the client certificate is known")

    def _unexpired(self, identity: Identity, kind: str) -> Identity:
        if self.is_expired(identity):
            raise Unauthenticated(f"the {kind} of {identity.name!r} has expired")
        return identity

    def is_expired(self, identity: Identity) -> bool:
        """Return whether the identity's credential is over by now, or has been taken out of the file or changed."""
        self._refresh()
        return identity.expires_at <= self._wall_clock() or identity not in self._credentials.identities

    def _refresh(self) -> None:
        now = self._wall_clock()
        # A clock set back must not stop the checks.
        if 0 <= now - self._checked_at < RELOAD_INTERVAL_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._checked_at = now
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._credentials = _load(self._path)
                _log.info("credentials read again", path=str(self._path), count=len(self._credentials.tokens))
        except ValueError as error:
            _log.error("credentials not read again; the former ones stay in force", error=str(error))
        finally:
            self._lock.release()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _load(path: Path) -> _Credentials:
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{path}: must be writable by its owner alone, its mode is {stat.S_IMODE(mode):04o}")
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: credentials have at most {MAX_FILE_BYTES} bytes, these have {len(content)}")
    try:
        return _parse(tomllib.loads(content.decode()), path)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from None


def _parse(document: dict[str, Any], path: Path) -> _Credentials:
    unknown = set(document) - {"token", "certificate"}
    if unknown:
        raise ValueError(f"{path}: unknown table {sorted(unknown)[0]}; known: token, certificate")
    credentials = _Credentials({}, {}, set())
    for kind in ("token", "certificate"):
        entries = document.get(kind, [])
        if not isinstance(entries, list) or len(entries) > MAX_ENTRIES:
            raise ValueError(f"{path}: {kind} must be an array of at most {MAX_ENTRIES} tables: [[{kind}]]")
        for number, entry in enumerate(entries, 1):
            where = f"{path}: {kind} {number}"
            if not isinstance(entry, dict):
                raise ValueError(f"{where} must be a table: [[{kind}]]")
            _add(credentials, kind, entry, where)
    return credentials


def _add(credentials: _Credentials, kind: str, entry: dict[str, Any], where: str) -> None:
    own = {"id", "sha256"} if kind == "token" else {"san"}
    unknown = set(entry) - own - {"name", "roles", "tenant", "expires"}
    if unknown:
        raise ValueError(f"{where}: unknown key {sorted(unknown)[0]}")
    if kind == "certificate":
        key = _text(entry, "san", where)
        if key in credentials.certificates:
            raise ValueError(f"{where}: san {key!r} stands twice")
        credentials.certificates[key] = identity = _identity(entry, f"certificate {key}", where)
        credentials.identities.add(identity)
        return
    token_id, digest = _text(entry, "id", where), _text(entry, "sha256", where)
    if not TOKEN_ID.fullmatch(token_id):
        raise ValueError(f"{where}: id must be 16 lower-case hex digits, got {token_id!r}")
    if token_id in credentials.tokens:
        raise ValueError(f"{where}: id {token_id!r} stands twice")
    try:
        raw = bytes.fromhex(digest)
    except ValueError:
        raw = b""
    if len(raw) != len(_UNKNOWN_DIGEST):
        raise ValueError(f"{where}: sha256 must be 64 hex digits, got {len(digest)} characters")
    identity = _identity(entry, f"token {token_id}", where)
    credentials.tokens[token_id] = (raw, identity)
    credentials.identities.add(identity)


def _identity(entry: dict[str, Any], credential: str, where: str) -> Identity:
    roles = _roles(entry.get("roles"), where)
    frontend = Role.FRONTEND in roles
    if frontend and len(roles) > 1:
        raise ValueError(f"{where}: roles: frontend cannot stand beside others, because it is bound to one tenant")
    if frontend != ("tenant" in entry):
        must = "is needed for the role frontend" if frontend else "is for the role frontend only"
        raise ValueError(f"{where}: tenant {must}")
    tenant = _text(entry, "tenant", where, empty=True) if frontend else None
    name = _text(entry, "name", where)
    expires_at = _expiry(entry.get("expires"), where)
    return Identity(name=name, roles=roles, tenant=tenant, expires_at=expires_at, credential=credential)


def _roles(value: object, where: str) -> frozenset[Role]:
    known = [role.value for role in Role]
    if not isinstance(value, list) or not value or any(role not in known for role in value):
        raise ValueError(f"{where}: roles must be a list of {', '.join(known)}, got {value!r}")
    return frozenset(Role(role) for role in value)


def _expiry(value: object, where: str) -> float:
    if value == "never":
        return math.inf
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.timestamp()
    raise ValueError(f'{where}: expires must be a date-time with an offset or "never", got {value!r}')


def _text(entry: dict[str, Any], key: str, where: str, *, empty: bool = False) -> str:
    value = entry.get(key)
    low = 0 if empty else 1
    if not isinstance(value, str) or not low <= len(value) <= MAX_FIELD_CHARS:
        got = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
        raise ValueError(f"{where}: {key} must be a string of {low} to {MAX_FIELD_CHARS} characters, got {got}")
    return value
