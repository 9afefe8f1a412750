"""Every shipped configuration compiles for Hopper without a GPU, and the command tells what it built."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.compiler", reason="Triton is not installed: the torch backend runs alone")

# A process of its own, because the other tests here run Triton's interpreter, which is chosen when Triton is imported.
SCRIPT = """
import json, sys, torch
from radixpool.kernels import AttentionSpec
from radixpool.kernels.build import compile_source, model_sources
from radixpool.kernels.cache_hints import keeps_policy
built = []
wanted = tuple(sys.argv[2:])
for shape, q, kv in json.loads(sys.argv[1]):
    spec = AttentionSpec(**shape, q_dtype=getattr(torch, q), kv_dtype=getattr(torch, kv))
    for name, source, options in model_sources(spec, 90):
        # A chained kernel differs from its twin in a launch attribute only; the fast extend kernel has its own tests.
        if not name.startswith(("attend", "merge")) or not name.endswith(wanted):
            continue
        kernel = compile_source(name, source, 90, options)
        ptx = kernel.asm["ptx"]
        words = (
        "cp.async.cg", "mma.sync", "wgmma.mma_async", "ldmatrix", "griddepcontrol",
        "cvt.rn.f16x2.e4m3x2", "cache_hint", "ld.relaxed.gpu",
    )
        counts = {w: ptx.count(w) for w in words}
        if counts["cache_hint"]:
            counts["kept"] = keeps_policy(kernel.asm["cubin"])
        counts["loops"] = [x for x in kernel.asm["ttgir"].splitlines() if "scf.for" in x or "scf.while" in x]
        built.append({"name": name, "spilled": kernel.spill_bytes, "shared": kernel.shared_bytes, **counts})
print(json.dumps(built))
"""
LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
# Tall tiles are held to 168 registers, so that a narrow program fits beside them; what they spill is spilled outside
# of the loop over keys (read off the SASS). Narrow tiles spill next to nothing.
TALL_SPILL_LIMIT, NARROW_SPILL_LIMIT = 512, 96


def outside(code, *arguments, cache):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, *code, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("kv", "heights"),
    [
        ("bfloat16", ("m16", "m16+", "m32", "m64+", "m128+", "m16_evicts", "m16+_evicts", "m32_evicts")),
        ("float8_e4m3fn", ("m16", "m32", "m16_evicts")),
    ],
    ids=["bf16", "fp8"],
)
def test_shipped_configurations_compile_for_hopper(tmp_path, carried, kv, heights):
    """Case 52: every shipped pipeline depth, for both kinds of KV."""
    merges = {f"merge_d128_{parts}" for parts in ("few", "few_watched", "some", "many")}
    wanted = (*heights, *merges)
    result = outside(["-c", SCRIPT], json.dumps([[LLAMA, "bfloat16", kv]]), *wanted, cache=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    built = {b["name"]: b for b in json.loads(result.stdout.splitlines()[-1])}
    attend = {name: b for name, b in built.items() if name.startswith("attend")}
    assert {f"m{name.rsplit('_m', 1)[1]}" for name in attend} == set(heights)
    for name, kernel in attend.items():
        tall = "_m64" in name or "_m128" in name
        assert kernel["spilled"] <= (TALL_SPILL_LIMIT if tall else NARROW_SPILL_LIMIT), (name, kernel)
        assert kernel["shared"] <= 227 * 1024 and kernel["griddepcontrol"] >= 2
        assert kernel["wgmma.mma_async" if tall else "mma.sync"], (name, kernel)
        assert kernel["cp.async.cg"] >= 8, (name, kernel)
        assert bool(kernel["cvt.rn.f16x2.e4m3x2"]) == (kv == "float8_e4m3fn") or tall, (name, kernel)
        if name.endswith("_evicts"):  # every copy has the policy, and none lost it in the assembler
            assert kernel["cache_hint"] == kernel["cp.async.cg"] and kernel["kept"], (name, kernel)
        else:
            assert not kernel["cache_hint"], (name, kernel)
        # all fields of the next item; how many tokens all rows see is used where whole tiles are split off
        assert carried(kernel["loops"]) == [8 if tall else 7], (name, kernel["loops"])
    assert merges <= set(built)
    for name, in_flight in (("few", 8), ("few_watched", 8), ("some", 16), ("many", 16)):
        # maximum, denominator, four columns, the numbers of the next states
        assert carried(built[f"merge_d128_{name}"]["loops"]) == [6 + in_flight]
    assert all(built[name]["ld.relaxed.gpu"] for name in merges)


def test_the_command_builds_a_model_and_says_what(tmp_path):
    arguments = ["kernels", "build", "--heads", "4/4", "--head-dim", "32", "--dtype", "fp16", "--arch", "80"]
    result = outside(["-m", "radixpool.rpc.cli"], *arguments, "--jobs", "1", "--json", cache=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    built = json.loads(result.stdout)
    assert {"attend_float16_float16_d32_m16", "merge_d32_few", "plan_step"} <= {b["name"] for b in built}
    assert all(b["registers"] > 0 and b["seconds"] > 0 for b in built)
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "32"], "expected two numbers as 32/8, got '32'"),
        (["--heads", "32/8"], "--heads and --head-dim go together"),
        (["--heads", "7/2", "--head-dim", "64", "--arch", "90"], "expected a multiple of num_kv_heads=2, got 7"),
        (["--heads", "32/8", "--head-dim", "64", "--arch", "90", "--tensor-parallel", "3"], "expected a divisor of 32"),
        (["--model", "no/such/model"], "no such file or directory"),
    ],
)
def test_the_command_refuses_what_it_cannot_build(tmp_path, arguments, message):
    result = outside(["-m", "radixpool.rpc.cli"], "kernels", "build", *arguments, cache=tmp_path)
    assert result.returncode in (1, 2) and message in " ".join(result.stderr.split()), result.stderr
