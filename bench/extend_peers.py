"""Peer prefill kernels for `extend.py`, each as a function that binds one workload and returns a zero-argument call.

They come from the folder that `--peers` names, as for `decode.py` (see `attention_peers.py`).
"""

from __future__ import annotations

import lzma
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from attention_peers import MissingPackages, load, sglang_triton, vllm_module
from extend_cases import FP8, Workload

Call = Callable[[], torch.Tensor]
Binder = Callable[[Workload], Call]


def flash_attention_3(folder: Path) -> dict[str, Binder]:
    with tempfile.NamedTemporaryFile(suffix=".so", delete=False) as f, lzma.open(folder / "fa3.xz") as packed:
        f.write(packed.read())
    torch.ops.load_library(f.name)
    op = torch.ops._vllm_fa3_C.fwd

    def bind(w: Workload) -> Call:
        k, v = w.k_pool.transpose(1, 2), w.v_pool.transpose(1, 2)
        quantised = w.case.dtype == FP8
        q = w.q.to(FP8) if quantised else w.q
        scale = torch.ones(len(w.lens), w.case.heads[1], device="cuda") if quantised else None
        out = torch.empty_like(w.q)
        most, longest = int(w.new.max()), int(w.lens.max())

        def call() -> torch.Tensor:
            op(
                q, k, v, None, None, None, out, w.device_starts, None, None, None, w.device_lens, most, longest,
                w.device_tables, None, None, None, None, None, scale, scale, scale, w.scale, True, -1, -1, 0.0, True,
                None, 0, None, 0, None, 1, 0, None,
            )  # fmt: skip
            return out

        return call

    return {"fa3": bind}


def vllm_triton(folder: Path) -> dict[str, Binder]:
    module, quant = vllm_module(folder)

    def bind(w: Workload) -> Call:
        k, v = w.k_pool.transpose(1, 2), w.v_pool.transpose(1, 2)
        quantised = w.case.dtype == FP8
        one = torch.ones(1, device="cuda") if quantised else None
        out = torch.empty_like(w.q)
        most, longest = int(w.new.max()), int(w.lens.max())

        def call() -> torch.Tensor:
            module.unified_attention(
                w.q, k, v, out, w.device_starts, most, w.device_lens, longest, w.scale, True, (-1, -1),
                w.device_tables, 0.0, None, one, one, kv_quant_mode=quant(1) if quantised else quant(0),
            )  # fmt: skip
            return out

        return call

    return {"vllm_triton": bind}


def sglang_extend(folder: Path) -> dict[str, Binder]:
    """SGLang's kernel reads cached tokens through a list of slots, new ones from contiguous tensors."""
    sglang_triton(folder)  # what the module imports
    module = load("sglang.kernels.ops.attention.extend_attention", folder / "peers" / "sgl_extend_attention.py")

    def bind(w: Workload) -> Call:
        if w.case.dtype == FP8:
            raise NotImplementedError("fp8 KV")
        block, kv_heads = w.case.block_size, w.case.heads[1]
        k, v = (p.transpose(1, 2).reshape(-1, kv_heads, w.case.head_dim) for p in (w.k_pool, w.v_pool))
        slots = (w.device_tables[:, :, None].long() * block + torch.arange(block, device="cuda")).flatten(1)
        cached = (w.lens - w.new).tolist()
        indices = torch.cat([row[:n] for row, n in zip(slots, cached, strict=True)])
        fresh = torch.cat([row[c:n] for row, c, n in zip(slots, cached, w.lens.tolist(), strict=True)])
        new_k, new_v = k[fresh], v[fresh]
        starts = torch.zeros(len(cached) + 1, dtype=torch.int32, device="cuda")
        starts[1:] = torch.tensor(cached, device="cuda").cumsum(0)
        most = int(w.new.max())
        out = torch.empty_like(w.q)

        def call() -> torch.Tensor:
            module.extend_attention_fwd(
                w.q, new_k, new_v, out, k, v, w.device_starts, starts, indices, None, True, None, most, 1.0, 1.0,
                w.scale,
            )  # fmt: skip
            return out

        return call

    return {"sglang_triton": bind}


def flashinfer_wrappers(folder: Path) -> dict[str, Binder]:
    sys.meta_path.insert(0, MissingPackages())
    import flashinfer

    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")

    def binder(backend: str) -> Binder:
        def bind(w: Workload) -> Call:
            if w.case.dtype == FP8 and backend == "fa3":
                raise NotImplementedError("fp8 KV with queries in bf16")
            blocks = -(-w.device_lens // w.case.block_size)
            starts = torch.zeros(len(w.lens) + 1, dtype=torch.int32, device="cuda")
            starts[1:] = blocks.cumsum(0)
            rows = zip(w.device_tables, blocks.tolist(), strict=True)
            indices = torch.cat([row[:n] for row, n in rows]).contiguous()
            last = (w.device_lens - 1) % w.case.block_size + 1
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)
            wrapper.plan(
                w.device_starts, starts, indices, last, *w.case.heads, w.case.head_dim, w.case.block_size, causal=True,
                q_data_type=torch.bfloat16, kv_data_type=w.case.dtype,
            )  # fmt: skip
            out = torch.empty_like(w.q)
            return lambda: wrapper.run(w.q, (w.k_pool, w.v_pool), out=out)

        return bind

    return {"flashinfer_fa2": binder("fa2"), "flashinfer_fa3": binder("fa3")}


def dense_cudnn(w: Workload) -> Call:
    """Dense attention of cuDNN over contiguous KV of one length, nothing cached: a ceiling, not a peer."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if len(set(w.lens.tolist())) > 1 or (w.new != w.lens).any() or w.case.dtype == FP8:
        raise NotImplementedError("equal lengths, nothing cached, bf16")
    size, blocks = int(w.lens[0]), w.device_tables.long()
    k, v = (p[blocks].transpose(2, 3).flatten(1, 2)[:, :size].transpose(1, 2) for p in (w.k_pool, w.v_pool))
    group = w.case.heads[0] // w.case.heads[1]
    k, v = (x.repeat_interleave(group, 1).contiguous() for x in (k, v))
    q = w.q.unflatten(0, (-1, size)).transpose(1, 2).contiguous()

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=w.scale)

    return call


LOADERS = {"fa3": flash_attention_3, "vllm": vllm_triton, "sglang": sglang_extend, "flashinfer": flashinfer_wrappers}


def load_peers(folder: Path | None, names: list[str]) -> dict[str, Binder]:
    """Return the binders of the peers that load; the others are reported and left out."""
    binders: dict[str, Binder] = {"dense_cudnn": dense_cudnn}
    for name in names if folder is not None else []:
        try:
            assert folder is not None
            binders.update(LOADERS[name](folder))
        except Exception as error:
            print(f"peer {name} left out: {error!r}"[:300], file=sys.stderr)
    return binders
