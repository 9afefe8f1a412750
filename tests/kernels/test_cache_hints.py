"""The hint reaches every asynchronous copy of the PTX, once, and leaves everything else as it is."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the torch backend runs alone")

from radixpool.kernels.cache_hints import evict_first

KERNEL = """.visible .entry attend_items(
\t.param .u64 p
)
.reqntid 128
{
\t.reg .pred \t%p<2>;
\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r207;
\t@%p1 cp.async.cg.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x10;
\tcp.async.ca.shared.global [ %r3 + 0 ], [ %rd3 + 0 ], 0x4, 0x4;
{
\tret;
}
}
"""


def test_copies_of_sixteen_bytes_carry_one_policy():
    hinted = evict_first(KERNEL)
    assert "cp.async.cg.shared.global.L2::cache_hint [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r207, %evict_first;" in hinted
    assert "@%p1 cp.async.cg.shared.global.L2::cache_hint [ %r2 + 0 ], [ %rd2 + 0 ], 0x10, %evict_first;" in hinted
    assert "cp.async.ca.shared.global [ %r3 + 0 ], [ %rd3 + 0 ], 0x4, 0x4;" in hinted
    assert hinted.count("createpolicy") == 1 and hinted.index("createpolicy") < hinted.index(".pred")
    assert evict_first(hinted) == hinted


def test_a_kernel_without_copies_stays():
    assert evict_first("{\n\tret;\n}\n") == "{\n\tret;\n}\n"
