"""Evict-first for keys and values that are read once: they then push nothing else out of the L2 cache.

Triton has no cache policy for asynchronous copies before 3.9, and then not one that every `ptxas` encodes: those before
13.4 lose the policy where they add a uniform register to the address in shared memory, which is an illegal instruction
on sm_90. So the policy is written into the PTX, with a minimum that changes nothing but keeps the address in one
register, and Triton takes that PTX in place of its own (`ir_override`). What comes out is looked at once, before it is
used for the first time.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import PTXASError

# The policy is what createpolicy.fractional.L2::evict_first gives for 1.0. Copies behind a predicate stay as they are:
# PTX has none for blocks.
COPY = re.compile(
    r"^([ \t]*)cp\.async\.cg\.shared\.global \[ *(%r\d+) *\+ *(\d+) *\], (\[[^\]]*\]), 0x10(, %\w+)?;", re.MULTILINE
)
HINTED = (
    r"\1{ .reg .b64 policy; .reg .b32 place; min.u32 place, \2, 0xffffff; mov.b64 policy, 0x12F0000000000000;"
    r" cp.async.cg.shared.global.L2::cache_hint [ place + \3 ], \4, 0x10\5, policy; }"
)
LOST = re.compile(r"LDGSTS\S* +\[R\d+\+UR")  # the form in which the policy is lost


def evict_first(ptx: str) -> str:
    """Return the PTX of one kernel with the evict-first policy on every 16-byte asynchronous copy without predicate."""
    return COPY.sub(HINTED, ptx)


def with_hints(compile_with: Callable[[dict[str, Any]], Any], options: dict[str, Any]) -> Any:
    """Return the kernel that `compile_with` makes of compiler options, with hints on its copies where they are kept.

    The changed PTX, and what was seen of its code, go into Triton's cache beside the kernel, for other processes; in
    this one the kernel itself remembers its twin: Triton hands it out again for every new shape of the arguments.
    """
    plain = compile_with(options)
    if not hasattr(plain, "hinted"):
        plain.hinted = hinted_twin(plain, compile_with, options)
    return plain.hinted


def hinted_twin(plain: Any, compile_with: Callable[[dict[str, Any]], Any], options: dict[str, Any]) -> Any:
    """Return a kernel with hints on its copies, or `plain` where it has none or would lose them."""
    hinted = evict_first(plain.asm["ptx"])
    if hinted == plain.asm["ptx"]:
        return plain
    name = f"evict_first-{hashlib.sha256(hinted.encode()).hexdigest()[:16]}"
    cache = get_cache_manager(plain.hash)
    path = cache.get_file(f"{name}.ptx") or cache.put(hinted, f"{name}.ptx", binary=False)
    try:
        kernel = compile_with({**options, "ir_override": path})
    except PTXASError:  # an assembler that takes no such policy
        return plain
    seen = cache.get_file(f"{name}.seen")
    if seen is None:
        verdict = "kept" if keeps_policy(kernel.asm["cubin"]) else "lost"
        seen = cache.put(verdict, f"{name}.seen", binary=False)
    return kernel if Path(seen).read_text() == "kept" else plain


def keeps_policy(cubin: bytes) -> bool:
    """Return whether no copy has lost its policy; not without a disassembler, which takes a third of a second."""
    try:
        disassembler = knobs.nvidia.nvdisasm.path
    except RuntimeError:  # Triton was installed without it
        return False
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler, "-c", file.name]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode == 0 and "LDGSTS" in result.stdout and not LOST.search(result.stdout)
