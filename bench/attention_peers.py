"""Peer decode kernels for `decode.py`, each as a function that binds one workload and returns a zero-argument call.

They are loaded from a folder that `--peers` names (nothing of them is part of this repository): `fa3.xz`
(FlashAttention-3 as vLLM ships it), `peers/` with vLLM's and SGLang's Triton kernels, and the packages of FlashInfer
on the path.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import lzma
import math
import sys
import tempfile
import types
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from unittest.mock import MagicMock

import torch
import triton
import triton.language as tl
from attention_cases import FP8, Workload

Call = Callable[[], torch.Tensor]
Binder = Callable[[Workload], Call]


def stub(name: str, **attributes: object) -> types.ModuleType:
    """Register a module that stands for a part of a peer's package that its kernels import."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    module.__path__ = []  # type: ignore[attr-defined]
    sys.modules[name] = module
    return module


def load(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class MissingPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answer imports of packages that FlashInfer's decode path names but never calls."""

    roots = ("cutlass", "cuda.tile")

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == root or name.startswith(root + ".") for root in self.roots):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = MagicMock()
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def flash_attention_3(folder: Path) -> dict[str, Binder]:
    with tempfile.NamedTemporaryFile(suffix=".so", delete=False) as f, lzma.open(folder / "fa3.xz") as packed:
        f.write(packed.read())
    torch.ops.load_library(f.name)
    op = torch.ops._vllm_fa3_C.fwd

    def bind(w: Workload, *, contiguous: bool = False) -> Call:
        k, v = w.k_pool.transpose(1, 2), w.v_pool.transpose(1, 2)
        if contiguous:
            k, v = k.contiguous(), v.contiguous()
        quantised = w.case.dtype == FP8
        q = w.q.to(FP8) if quantised else w.q
        scale = torch.ones(w.case.batch, w.case.heads[1], device="cuda") if quantised else None
        out = torch.empty_like(w.q)
        starts = torch.arange(w.case.batch + 1, dtype=torch.int32, device="cuda")
        longest = int(w.lens.max())

        def call() -> torch.Tensor:
            op(
                q, k, v, None, None, None, out, starts, None, None, None, w.device_lens, 1, longest, w.device_tables,
                None, None, None, None, None, scale, scale, scale, w.scale, True, -1, -1, 0.0, True, None, 0, None, 0,
                None, 1, 0, None,
            )  # fmt: skip
            return out

        return call

    return {"fa3": bind}


def vllm_module(folder: Path) -> tuple[types.ModuleType, type[IntEnum]]:
    """Load vLLM's Triton kernel; return its module and the names of its quantisation modes."""
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        stub(name)
    sys.modules["vllm"].envs = stub("vllm.envs", VLLM_BATCH_INVARIANT=False)  # type: ignore[attr-defined]
    stub("vllm.logger", init_logger=lambda name: MagicMock())
    no = lambda *args: False  # noqa: E731
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: FP8, is_device_capability_family=no, is_cuda=lambda: True, is_rocm=no, is_xpu=no
    )
    stub("vllm.platforms", current_platform=platform)
    stub("vllm.triton_utils", tl=tl, triton=triton)
    modes = {
        "NONE": 0,
        "FP8_PER_TENSOR": 1,
        "INT8_PER_TOKEN_HEAD": 2,
        "FP8_PER_TOKEN_HEAD": 3,
        "INT4_PER_TOKEN_HEAD": 4,
    }
    quant = IntEnum("KVQuantMode", modes)
    stub("vllm.v1.kv_cache_interface", KVQuantMode=quant)
    prefix = "vllm.v1.attention.ops.triton_"
    load(prefix + "attention_helpers", folder / "peers" / "triton_attention_helpers.py")
    return load(prefix + "unified_attention", folder / "peers" / "triton_unified_attention.py"), quant


def vllm_triton(folder: Path) -> dict[str, Binder]:
    module, quant = vllm_module(folder)

    def bind(w: Workload) -> Call:
        quantised, (heads, kv_heads), segments = w.case.dtype == FP8, w.case.heads, 16
        k, v = w.k_pool.transpose(1, 2), w.v_pool.transpose(1, 2)
        out = torch.empty_like(w.q)
        one = torch.ones(1, device="cuda") if quantised else None
        shape = (w.case.batch, heads, segments)
        outputs = torch.empty(*shape, w.case.head_dim, device="cuda")
        tops, sums = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda")
        starts = torch.arange(w.case.batch + 1, dtype=torch.int32, device="cuda")
        mode = quant(1) if quantised else quant(0)

        def call() -> torch.Tensor:
            module.unified_attention(
                w.q, k, v, out, starts, 1, w.device_lens, int(w.lens.max()), w.scale, True, (-1, -1), w.device_tables,
                0.0, None, one, one, seq_threshold_3D=128 // kv_heads, num_par_softmax_segments=segments,
                softmax_segm_output=outputs, softmax_segm_max=tops, softmax_segm_expsum=sums, kv_quant_mode=mode,
            )  # fmt: skip
            return out

        return call

    return {"vllm_triton": bind}


def sglang_triton(folder: Path) -> dict[str, Binder]:
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention", "sglang.srt"):
        stub(name)
    stub("sglang.kernels.ops.attention.score_mod", unpack_aux_tensors=lambda s, a: (None, 0, 0, 0))
    flags = type("Flags", (), {"__getattr__": lambda self, name: types.SimpleNamespace(get=lambda: False)})
    stub("sglang.srt.environ", envs=flags())
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    no = lambda: False  # noqa: E731
    stub(
        "sglang.srt.utils", get_device_core_count=lambda i=0: sms, is_gfx95_supported=no, is_gfx1250_supported=no,
        is_hip=no, is_cuda=lambda: True,
    )  # fmt: skip
    path = folder / "peers" / "sgl_decode_attention.py"
    module = load("sglang.kernels.ops.attention.decode_attention", path)

    def bind(w: Workload) -> Call:
        if w.case.dtype == FP8:
            raise NotImplementedError("fp8 KV")
        heads, kv_heads = w.case.heads
        k, v = (p.transpose(1, 2).reshape(-1, kv_heads, w.case.head_dim) for p in (w.k_pool, w.v_pool))
        offsets = torch.arange(w.case.block_size, device="cuda")
        slots = (w.device_tables[:, :, None].long() * w.case.block_size + offsets).flatten(1)
        indices = torch.cat([row[:n] for row, n in zip(slots, w.lens.tolist(), strict=True)])
        starts = torch.zeros(w.case.batch + 1, dtype=torch.int32, device="cuda")
        starts[1:] = w.device_lens.cumsum(0)
        rows = w.case.batch * kv_heads
        splits = max(1, min(16, math.ceil(2 * sms / rows))) if rows < 2 * sms else 1
        outputs = torch.empty(w.case.batch, heads, 16, w.case.head_dim, device="cuda")
        lses = torch.empty(w.case.batch, heads, 16, device="cuda")
        counts = torch.full((w.case.batch,), splits, dtype=torch.int32, device="cuda")
        out = torch.empty_like(w.q)

        def call() -> torch.Tensor:
            module.decode_attention_fwd(w.q, k, v, out, starts, indices, outputs, lses, counts, 16, w.scale, 1.0, 1.0)
            return out

        return call

    return {"sglang_triton": bind}


def flashinfer_wrappers(folder: Path) -> dict[str, Binder]:
    sys.meta_path.insert(0, MissingPackages())
    import flashinfer

    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")

    def last_page(w: Workload, tokens: list[int]) -> list[int]:
        return [(n - 1) % w.case.block_size + 1 for n in tokens]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def bind(w: Workload) -> Call:
        blocks = [-(-int(n) // w.case.block_size) for n in w.lens]
        starts = ints([0, *torch.tensor(blocks).cumsum(0).tolist()])
        indices = torch.cat([row[:n] for row, n in zip(w.device_tables, blocks, strict=True)]).contiguous()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(
            starts, indices, ints(last_page(w, w.lens.tolist())), *w.case.heads, w.case.head_dim, w.case.block_size,
            q_data_type=torch.bfloat16, kv_data_type=w.case.dtype,
        )  # fmt: skip
        out = torch.empty_like(w.q)
        return lambda: wrapper.run(w.q, (w.k_pool, w.v_pool), out=out)

    def cascade(w: Workload) -> Call:
        if not w.case.levels or w.case.dtype == FP8:
            raise NotImplementedError("no shared levels")
        batch, rows, starts, tables, lasts = w.case.batch, [], [], [], []
        for (tokens, nodes), blocks in zip(w.case.levels, w.level_blocks, strict=True):
            count = tokens // w.case.block_size
            rows.append(ints([i * batch // nodes for i in range(nodes + 1)]))
            starts.append(ints([i * count for i in range(nodes + 1)]))
            tables.append(torch.cat([torch.from_numpy(b) for b in blocks]).cuda())
            lasts.append(ints([w.case.block_size] * nodes))
        sizes = [len(b) for b in w.own_blocks]
        rows.append(ints(list(range(batch + 1))))
        starts.append(ints([0, *torch.tensor(sizes).cumsum(0).tolist()]))
        tables.append(torch.cat([torch.from_numpy(b) for b in w.own_blocks]).cuda())
        lasts.append(ints(last_page(w, w.own.tolist())))
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(rows), workspace, "HND")
        wrapper.plan(
            rows, starts, tables, lasts, *w.case.heads, w.case.head_dim, w.case.block_size, q_data_type=torch.bfloat16
        )
        pool = torch.stack([w.k_pool, w.v_pool], 1)
        return lambda: wrapper.run(w.q, pool)

    return {"flashinfer": bind, "fi_cascade": cascade}


def torch_sdpa(w: Workload) -> Call:
    """Gather each sequence and call torch's fused attention: what one writes without a paged kernel."""
    if w.case.dtype == FP8 or len(set(w.lens.tolist())) > 1 or w.flat_bytes > 2 * 2**30:
        raise NotImplementedError("equal lengths and at most 2 GiB of gathered KV")
    size = int(w.lens[0])

    def call() -> torch.Tensor:
        k, v = (
            p[w.device_tables.long()].transpose(2, 3).flatten(1, 2)[:, :size].transpose(1, 2)
            for p in (w.k_pool, w.v_pool)
        )
        out = torch.nn.functional.scaled_dot_product_attention(w.q[:, :, None], k, v, scale=w.scale, enable_gqa=True)
        return out[:, :, 0]

    return call


LOADERS = {"fa3": flash_attention_3, "vllm": vllm_triton, "sglang": sglang_triton, "flashinfer": flashinfer_wrappers}


def load_peers(folder: Path | None, names: list[str]) -> dict[str, Binder]:
    """Return the binders of the peers that load; the others are reported and left out."""
    binders: dict[str, Binder] = {"torch": torch_sdpa}
    for name in names if folder is not None else []:
        try:
            assert folder is not None
            binders.update(LOADERS[name](folder))
        except Exception as error:
            print(f"peer {name} left out: {error!r}"[:300], file=sys.stderr)
    return binders
