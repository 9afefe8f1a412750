"""Copies that evict first: the policy is written into the PTX, and kept only where the assembler keeps it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the torch backend runs alone")

from triton.runtime.errors import PTXASError

from radixpool.kernels import cache_hints
from radixpool.kernels.launch import EVICT_FIRST_BYTES, evicts_first

PLAIN = """
    cp.async.cg.shared.global [ %r189 + 0 ], [ %rd85 + 0 ], 0x10, %r198;
    cp.async.cg.shared.global [ %r7 + 2048 ], [ %rd86 + 16 ], 0x10;
    @%p3 cp.async.cg.shared.global [ %r7 + 4096 ], [ %rd86 + 32 ], 0x10;
    cp.async.ca.shared.global [ %r8 + 0 ], [ %rd87 + 0 ], 0x4, %r199;
    cp.async.commit_group;
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder, and what `with_hints` is told about the code that comes out."""

    class Cache:
        def get_file(self, name):
            return str(tmp_path / name) if (tmp_path / name).exists() else None

        def put(self, data, name, binary=True):
            assert not binary
            (tmp_path / name).write_text(data)
            return str(tmp_path / name)

    told = SimpleNamespace(keeps=True, looks=0)

    def keeps_policy(cubin):
        told.looks += 1
        return told.keeps

    monkeypatch.setattr(cache_hints, "get_cache_manager", lambda key: Cache())
    monkeypatch.setattr(cache_hints, "keeps_policy", keeps_policy)
    return told


def compiled(options):
    override = options.get("ir_override")
    ptx = Path(override).read_text() if override else PLAIN
    return SimpleNamespace(asm={"ptx": ptx, "cubin": b""}, hash="hash", options=options)


def test_whole_copies_get_the_policy_and_an_address_in_one_register():
    lines = cache_hints.evict_first(PLAIN).splitlines()
    assert "min.u32 place, %r189, 0xffffff;" in lines[1] and "0x12F0000000000000" in lines[1]
    assert "cp.async.cg.shared.global.L2::cache_hint [ place + 0 ], [ %rd85 + 0 ], 0x10, %r198, policy; }" in lines[1]
    assert "cache_hint [ place + 2048 ], [ %rd86 + 16 ], 0x10, policy; }" in lines[2]
    assert lines[3:] == PLAIN.splitlines()[3:]


def test_a_kernel_that_keeps_its_policy_is_looked_at_once(cache):
    for _ in range(2):
        kernel = cache_hints.with_hints(compiled, {"num_warps": 4})
        assert kernel.asm["ptx"] == cache_hints.evict_first(PLAIN) and kernel.options["num_warps"] == 4
    assert cache.looks == 1


def test_a_kernel_that_comes_again_in_one_process_has_its_twin_at_hand(cache, monkeypatch):
    plain = compiled({})
    first = cache_hints.with_hints(lambda options: compiled(options) if "ir_override" in options else plain, {})
    monkeypatch.setattr(cache_hints, "evict_first", None)
    assert cache_hints.with_hints(lambda options: plain, {}) is first is not plain


def test_a_kernel_that_lost_its_policy_is_not_used(cache):
    cache.keeps = False
    for _ in range(2):
        assert cache_hints.with_hints(compiled, {"num_warps": 4}).asm["ptx"] == PLAIN
    assert cache.looks == 1


def test_small_launches_evict_first():
    assert evicts_first(192 * 2**20) and evicts_first(EVICT_FIRST_BYTES) and not evicts_first(EVICT_FIRST_BYTES + 1)


def test_an_assembler_that_refuses_the_policy_gets_the_plain_kernel(cache):
    def refused(options):
        if "ir_override" in options:
            raise PTXASError("Unknown modifier '.L2::cache_hint'")
        return compiled(options)

    assert cache_hints.with_hints(refused, {}).asm["ptx"] == PLAIN


def test_without_a_disassembler_no_policy_counts_as_kept(monkeypatch):
    """A hint must not be what keeps a server from attending."""

    class Nvidia:
        @property
        def nvdisasm(self):
            raise RuntimeError("Cannot find nvdisasm")

    monkeypatch.setattr(cache_hints, "knobs", SimpleNamespace(nvidia=Nvidia()))
    assert not cache_hints.keeps_policy(b"")
