"""Evict-first for keys and values that are read once: they then push nothing else out of the L2 cache.

The kernels ask for it with Triton's `eviction_policy`. Versions before 3.9 drop that from asynchronous copies; for
them the hint is written into the PTX, which Triton then takes in place of its own (`ir_override`).
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from triton.runtime.cache import get_cache_manager

COPY = re.compile(r"(cp\.async\.cg\.shared\.global)( \[[^\]]*\], \[[^\]]*\], 0x10(?:, %\w+)?);")
BODY = re.compile(r"^\{$", re.MULTILINE)
POLICY = "{\n\t.reg .b64 \t%evict_first;\n\tcreatepolicy.fractional.L2::evict_first.b64 %evict_first, 1.0;"


def evict_first(ptx: str) -> str:
    """Return the PTX of one kernel with the evict-first policy on every plain 16-byte asynchronous copy."""
    hinted, count = COPY.subn(r"\1.L2::cache_hint\2, %evict_first;", ptx)
    return BODY.sub(lambda _: POLICY, hinted, count=1) if count else ptx


def options_with_hint(kernel: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the compiler options under which the copies of `kernel` evict first; the same where they do already.

    The changed PTX goes into Triton's cache beside the kernel, so that another process finds it compiled.
    """
    ptx = kernel.asm.get("ptx", "")
    hinted = evict_first(ptx) if "evict_first" in kernel.asm.get("ttir", "") else ptx
    if hinted == ptx:
        return options
    name = f"evict_first-{hashlib.sha256(hinted.encode()).hexdigest()[:16]}.ptx"
    cache = get_cache_manager(kernel.hash)
    return {**options, "ir_override": cache.get_file(name) or cache.put(hinted, name, binary=False)}
