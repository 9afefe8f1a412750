"""radixpool: a radix-tree prefix-sharing KV-cache service for LLM serving."""

from radixpool._version import __version__
from radixpool.radix import (
    Namespace,
    PoolExhausted,
    RadixCache,
    RadixPoolError,
    Sequence,
    UnknownSequence,
)

__all__ = [
    "__version__",
    "RadixCache",
    "Namespace",
    "Sequence",
    "RadixPoolError",
    "PoolExhausted",
    "UnknownSequence",
]
