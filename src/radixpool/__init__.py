"""radixpool: a radix-tree prefix-sharing KV-cache service for LLM serving."""

from radixpool._version import __version__

__all__ = ["__version__"]
