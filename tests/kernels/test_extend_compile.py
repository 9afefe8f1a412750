"""The fast extend kernel compiles for Hopper without a GPU, and uses its matrix unit and copy engine."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon: the plain kernel extends")

# A subprocess, because the other tests here run Triton's interpreter, which is chosen when Triton is imported.
SCRIPT = """
import json, sys, torch
from radixpool.kernels import AttentionSpec
from radixpool.kernels.build import compile_source
from radixpool.kernels.extend_build import extend_source
from radixpool.kernels.extend_plan import extend_config, wide_tiles
shape, features = json.loads(sys.argv[1]), json.loads(sys.argv[2])
dtype = getattr(torch, sys.argv[3].strip('"'))
spec = AttentionSpec(**shape, q_dtype=dtype, kv_dtype=dtype)
config = extend_config(spec, 90)
if features.pop("wide", False):
    config = wide_tiles(config)
source, options = extend_source(spec, config, **features)
kernel = compile_source("extend", source, 90, options)
ptx = kernel.asm["ptx"]
counts = {name: ptx.count(name) for name in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg")}
counts["loops"] = [x for x in kernel.asm["ttgir"].splitlines() if "scf.for" in x or "scf.while" in x]
print(json.dumps({"spilled": kernel.spill_bytes, "shared": kernel.shared_bytes, **counts}))
"""
# From entry to entry two consumers carry the step and the next entry's queries, two producers the step. An entry's
# fields must not be carried: Triton 3.6 drops a value that only bounds loops inside (the first entry's was read again).
CARRIED = [2, 2, 1, 1]
# Spilled outside of the loop over keys without masks, which keeps everything in registers (read off the SASS).
SPILL_LIMIT = 448


def compiled(tmp_path, script, *arguments):
    """Run `script` in a process of its own, without the interpreter; return the JSON of its last line."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script, *map(json.dumps, arguments)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("head_dim", "block_size", "features", "dtype"),
    [
        (128, 16, {}, "bfloat16"),
        (64, 16, {"window": True, "lse": True}, "float16"),
        (64, 16, {"wide": True}, "bfloat16"),
        (96, 16, {}, "bfloat16"),
        (256, 64, {"lse": True, "sinks": True, "cap": True}, "bfloat16"),
    ],
    ids=str,
)
def test_compiles_for_hopper(tmp_path, carried, head_dim, block_size, features, dtype):
    """Case 52: two and four stages (descriptors are made on the host), both dtypes."""
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": head_dim, "block_size": block_size}
    found = compiled(tmp_path, SCRIPT, shape, features, dtype)
    assert found["wgmma.mma_async"] >= 40 and found["cp.async.bulk.tensor"] >= 8 and found["setmaxnreg"] > 0
    assert found["shared"] <= 227 * 1024
    assert found["spilled"] <= SPILL_LIMIT
    assert carried(found["loops"]) == CARRIED


FP8_SCRIPT = """
import json, sys, torch
from radixpool.kernels import AttentionSpec
from radixpool.kernels.build import compile_source
from radixpool.kernels.extend_build import extend_source
from radixpool.kernels.extend_plan import fp8_config
spec = AttentionSpec(**json.loads(sys.argv[1]), q_dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
source, options = extend_source(spec, fp8_config(spec, 90), "fp8", **json.loads(sys.argv[2]))
kernel = compile_source("extend", source, 90, options)
ptx = kernel.asm["ptx"]
products = [line for line in ptx.splitlines() if "wgmma.mma_async" in line]
counts = {"products": len(products), "fp8": sum(".e4m3.e4m3" in line for line in products)}
counts["packed"] = ptx.count("cvt.rn.satfinite.e4m3x2")
counts["loops"] = [x for x in kernel.asm["ttgir"].splitlines() if "scf.for" in x or "scf.while" in x]
print(json.dumps({"spilled": kernel.spill_bytes, "shared": kernel.shared_bytes, **counts}))
"""


def test_fp8_products_compile_for_hopper(tmp_path, carried):
    """Both products take e4m3; weights are packed by pairs, four to a register: 32 conversions a tile and consumer."""
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    found = compiled(tmp_path, FP8_SCRIPT, shape, {"lse": True})
    assert found["products"] >= 40 and found["fp8"] == found["products"]
    assert found["packed"] >= 2 * 3 * 32
    assert found["shared"] <= 227 * 1024
    assert found["spilled"] <= SPILL_LIMIT
    assert carried(found["loops"]) == CARRIED


MODEL_SCRIPT = """
import json, sys, torch
from radixpool.kernels import AttentionSpec
from radixpool.kernels.build import compile_source, model_sources
shape = json.loads(sys.argv[1])
spec = AttentionSpec(**shape, q_dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
found = {}
for name, source, options in model_sources(spec, 90):
    found[name] = compile_source(name, source, 90, options).spill_bytes if name.startswith("widen") else -1
print(json.dumps(found))
"""


def test_a_model_is_built_with_its_fast_kernels(tmp_path):
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    found = compiled(tmp_path, MODEL_SCRIPT, shape)
    assert "extend_bfloat16_d128" in found and "extend_fp8_d128" in found and "turn_d128" in found
    assert found["widen_d128"] == 0
