"""Shared fixtures of the cache tests: a cache in the scenarios' notation (block size 2, letters are tokens)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from radixpool.radix import DEFAULT_NAMESPACE, Namespace, RadixCache, Sequence


class Letters:
    """A cache whose tokens are letters, checked after every operation."""

    def __init__(self, num_blocks: int = 8, **options) -> None:
        self.cache = RadixCache(num_blocks, 2, **options)

    def acq(self, text: str, *, namespace: Namespace = DEFAULT_NAMESPACE, **options) -> Sequence:
        try:
            return self.cache.acquire([ord(c) for c in text], namespace=namespace, **options)
        finally:
            self.cache.check()

    def ext(self, seq: Sequence, text: str) -> None:
        self.cache.extend(seq, [ord(c) for c in text])
        self.cache.check()

    def com(self, seq: Sequence, upto: int, **options):
        result = self.cache.commit(seq, upto, **options)
        self.cache.check()
        return result

    def rel(self, seq: Sequence, **options):
        result = self.cache.release(seq, **options)
        self.cache.check()
        return result

    def put(self, text: str, *, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
        """Acquire, compute and release: the text's whole blocks are cached."""
        seq = self.acq(text, namespace=namespace)
        self.com(seq, len(text))
        self.rel(seq)

    def match(self, text: str, *, namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        return self.cache.match([ord(c) for c in text], namespace=namespace).tokens

    def ev(self, count: int) -> list[int]:
        blocks = self.cache.evict(count).blocks.tolist()
        self.cache.check()
        return blocks

    def runs(self) -> dict[str, int]:
        """Return each findable run's text with its number of holders."""
        return {"".join(map(chr, info.tokens)): info.ref_count for info in self.cache.nodes()}

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Free, cached, held and quarantined blocks."""
        stats = self.cache.stats()
        return stats.free_blocks, stats.cached_blocks, stats.held_blocks, stats.quarantined_blocks


@pytest.fixture
def letters() -> Callable[..., Letters]:
    """Return a factory of caches in the scenarios' notation."""
    return Letters


@pytest.fixture
def simulator() -> ModuleType:
    """Return the package `simulation` beside this file."""
    name = "radixpool_tests_radix_simulation"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "simulation" / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
