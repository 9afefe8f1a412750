"""Bearer tokens: `rpt_ID_SECRET`. The id finds the entry, the secret is 256 random bits, only its hash is kept.

A plain SHA-256 is enough for a secret that nobody can guess; a slow hash would only slow down the server.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Final

ID_BYTES: Final = 8
SECRET_BYTES: Final = 32
_TOKEN: Final = re.compile(rf"rpt_([0-9a-f]{{{2 * ID_BYTES}}})_[0-9a-f]{{{2 * SECRET_BYTES}}}")
TOKEN_ID: Final = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token just made: `secret` is for its bearer alone and shown once, `token_id` and `sha256` for the file."""

    secret: str
    token_id: str
    sha256: str


def new_token() -> NewToken:
    """Return a new random token."""
    token_id = secrets.token_hex(ID_BYTES)
    secret = f"rpt_{token_id}_{secrets.token_hex(SECRET_BYTES)}"
    return NewToken(secret, token_id, token_digest(secret).hex())


def token_digest(token: str) -> bytes:
    """Return what is kept of a token: its SHA-256, 32 bytes."""
    return hashlib.sha256(token.encode()).digest()


def token_id_of(token: str) -> str | None:
    """Return the id inside a well-formed token, None for anything else. Bounded by the token's fixed length."""
    match = _TOKEN.fullmatch(token)
    return match[1] if match else None
