"""64-bit names of blocks: the hash of everything a block's KV depends on.

Two managers give equal names to equal prefixes in equal namespaces, so a router can compare nodes. The names are hints
for routing: 64 bits may collide, and nothing inside radixpool relies on them (hits are compared token by token).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from radixpool.radix.namespace import Namespace

HASH_BYTES: Final = 8
_ROOT: Final = b"radixpool.root"
_BLOCK: Final = b"radixpool.block"
_TOKEN_BYTES: Final = 4


def root_hash(namespace: Namespace) -> int:
    """Return the name of a namespace's root: what the first block of each of its prefixes builds on."""
    return _digest(namespace.encode(), person=_ROOT)


def run_hashes(parent: int, tokens: bytes, *, block_size: int, media: bytes = b"") -> list[int]:
    """Return the names of consecutive blocks below `parent`, one per `block_size` packed tokens. O(tokens).

    >>> first, second = run_hashes(1, bytes(8), block_size=1)
    >>> run_hashes(first, bytes(4), block_size=1) == [second]
    True
    """
    stride = block_size * _TOKEN_BYTES
    names = []
    for start in range(0, len(tokens), stride):
        block = tokens[start : start + stride]
        parent = _digest(parent.to_bytes(HASH_BYTES, "big") + block + media, person=_BLOCK)
        names.append(parent)
    return names


def _digest(content: bytes, *, person: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=HASH_BYTES, person=person).digest(), "big")
