"""The prefix caches of SGLang, vLLM and Dynamo, driven in-process by the tree benchmark's workloads.

    python bench/tree_peers.py setup DIR        a virtual environment with their released wheels (3 GB, 3 minutes)
    python bench/tree.py --peers DIR            measure beside them

Each engine runs in a process of its own (the others under DIR's Python): a line of JSON in, a line of figures out.
The caches are the shipped code. What they import but a CPU-only lookup never runs (models, layers, kernels) is
replaced by empty modules, so `pip install --no-deps` is enough. Prompts are converted to the engine's own form off the
clock; the last token is left to compute, as their schedulers do. Dynamo's tree is an index without blocks, so the
oldest requests are removed from it when the pool is full, off the clock.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import json
import os
import subprocess
import sys
import time
import types
import zipfile
from array import array
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENGINES = ("radixpool", "sglang", "sglang-rust", "vllm", "dynamo")
VERSIONS = {"sglang": "0.5.23", "sglang-rust": "0.5.23", "vllm": "0.33.0", "dynamo": "1.6.1"}
SGLANG_EMPTY = (
    "sglang.srt.configs", "sglang.srt.layers", "sglang.srt.model_executor", "sglang.srt.models", "sglang.srt.managers",
    "sglang.srt.multimodal", "sglang.srt.utils.hf_transformers", "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.mem_cache.memory_pool_host", "sglang.srt.mem_cache.pool_host", "sglang.kernels", "sglang.jit_kernel",
    "sglang.srt.speculative", "sglang.srt.model_loader", "sglang.srt.sampling", "sglang.srt.disaggregation.base",
    "sglang.srt.observability", "sglang.srt.mem_cache.hybrid_cache", "sglang.srt.mem_cache.storage",
)  # fmt: skip


class _Nothing:
    """An object that may be called, indexed, subclassed and asked for anything, and is nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> Any:
        only = args[0] if len(args) == 1 and not options else None
        return only if callable(only) else _Nothing()  # a decorator leaves its function alone

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __getitem__(self, key: Any) -> Any:
        return _Nothing()

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: Any) -> Any:
        return object

    __ror__ = __or__

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = _Nothing()
        if name[:1].isupper():  # a class, perhaps a generic one
            body = {"__init__": lambda self, *a, **k: None, "__class_getitem__": classmethod(lambda cls, key: cls)}
            value = type(name, (), body)
        setattr(self, name, value)
        return value


class _EmptyModules:
    """Import everything below some names as empty modules."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == top or name.startswith(top + ".") for top in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _EmptyModule(spec.name)
        module.__path__ = []
        module.__file__ = "<empty>"
        module.__version__ = "0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class RadixPool:
    """Our own cache, in the same harness."""

    def __init__(self, num_blocks: int, folder: Path) -> None:
        from radixpool import RadixCache

        self.cache = RadixCache(num_blocks, 16)

    def convert(self, tokens: Any) -> Any:
        return tokens.tobytes()

    def begin(self, tokens: Any) -> tuple[Any, int]:
        seq = self.cache.acquire(tokens)
        self.cache.commit(seq, seq.num_tokens)
        return seq, seq.cached_tokens

    def end(self, request: Any) -> None:
        self.cache.release(request)


class SGLang:
    """RadixCache with pages of 16 tokens, the paged allocator, and the request table its schedulers keep."""

    core: str | None = None

    def __init__(self, num_blocks: int, folder: Path) -> None:
        root = folder / "src" / "sglang"
        sys.path.insert(0, str(root))
        package = types.ModuleType("sglang")
        package.__path__ = [str(root / "sglang")]
        package.__version__ = VERSIONS["sglang"]  # type: ignore[attr-defined]
        sys.modules["sglang"] = package
        sys.meta_path.insert(0, _EmptyModules(SGLANG_EMPTY))  # type: ignore[arg-type]
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as base
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        torch.set_num_threads(1)
        self.base, self.key = base, RadixKey
        self.blocks = PagedTokenToKVPoolAllocator(num_blocks * 16, 16, torch.float16, "cpu", None, False)
        self.blocks.use_triton_kernels = False
        self.rows = torch.zeros((80, 8192), dtype=torch.int32)
        self.free_rows = list(range(1, 80))
        table = types.SimpleNamespace(req_to_token=self.rows, write=self.rows.__setitem__)
        options = {
            "disable": False, "req_to_token_pool": table, "token_to_kv_pool_allocator": self.blocks, "page_size": 16,
        }  # fmt: skip
        if self.core is None:
            self.tree = RadixCache(CacheInitParams(**options))
            return
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = self.core
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        options |= {"tree_components": (ComponentType.FULL,), "tree_core_backend": self.core}
        self.tree = UnifiedRadixCache(CacheInitParams(**options))

    def convert(self, tokens: Any) -> Any:
        return array("q", tokens.astype("int64").tobytes())

    def begin(self, tokens: Any) -> tuple[Any, int]:
        """Match, lock, allocate (evicting what is short) and put into the tree."""
        length = len(tokens)
        found = self.tree.match_prefix(self.base.MatchPrefixParams(key=self.key(tokens, limit=length - 1)))
        node, hit = found.last_device_node, found.device_prefix_len
        lock = self.tree.lock(node)
        row = self.free_rows.pop()
        short = length - hit + 16 - self.blocks.available_size()
        if short > 0:
            self.tree.evict_for_alloc(self.base.EvictParams(num_tokens=short))
        slots = self.blocks.alloc(-(-(length - hit) // 16) * 16)
        self.rows[row, :hit] = self.tree.path_device_indices(node)[:hit]
        self.rows[row, hit:length] = slots[: length - hit]
        kv = types.SimpleNamespace(
            req_pool_idx=row, cache_inserted_len=0, cache_protected_len=hit, swa_evict_floor=0, is_kv_released=False,
            kv_allocated_len=length, kv_committed_len=length,
        )  # fmt: skip
        request = types.SimpleNamespace(
            kv=kv, extra_key=None, cache_salt=None, priority=0, lock=lock, last_node=node, origin_input_ids=tokens,
            full_untruncated_fill_ids=tokens, session_id=None, kv_rotation_base=None, rid="r", session=None,
            finished=lambda: False,
        )  # fmt: skip
        (self.tree.checkpoint_into_tree if self.core else self.tree.checkpoint)(request, up_to=length)
        return request, hit

    def end(self, request: Any) -> None:
        kv, length = request.kv, len(request.origin_input_ids)
        tail = self.rows[kv.req_pool_idx, kv.cache_protected_len : length]
        self.blocks.free_segment(tail, start_pos=kv.cache_protected_len)
        self.tree.unlock(request.lock)
        self.free_rows.append(kv.req_pool_idx)


class SGLangRust(SGLang):
    core = "rust"


class VLLM:
    """KVCacheManager with prefix caching and sha256 block hashes, its default."""

    def __init__(self, num_blocks: int, folder: Path) -> None:
        sys.path.insert(0, str(folder / "src" / "vllm"))
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils as utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        hash_function = get_hash_fn_by_name("sha256")
        utils.init_none_hash(hash_function)
        self.hasher = utils.get_request_block_hasher(16, hash_function)
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float16)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        config = KVCacheConfig(num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(
            config,
            max_model_len=16_384,
            scheduler_block_size=16,
            hash_block_size=16,
            enable_caching=True,
            log_stats=False,
        )
        self.request, self.sampling, self.count = Request, SamplingParams(max_tokens=1), 0

    def convert(self, tokens: Any) -> Any:
        return tokens.tolist()

    def begin(self, tokens: Any) -> tuple[Any, int]:
        self.count += 1
        request = self.request(str(self.count), tokens, self.sampling, None, block_hasher=self.hasher)
        blocks, hit, *_ = self.manager.get_computed_blocks(request)
        new = self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
        assert new is not None, "vLLM's pool is exhausted"
        (blocks + new if hit else new).get_block_ids()
        return request, hit

    def end(self, request: Any) -> None:
        self.manager.free(request)


class Dynamo:
    """The router's RadixTree (Rust): hash the blocks, find the matches, store what is new."""

    def __init__(self, num_blocks: int, folder: Path) -> None:
        from dynamo._core import RadixTree, compute_block_hash_for_seq

        self.tree, self.hash = RadixTree(), compute_block_hash_for_seq
        self.num_blocks, self.used, self.events = num_blocks, 0, 0
        self.stored: deque[list[int]] = deque()

    def convert(self, tokens: Any) -> Any:
        """Make room off the clock: the tree has no pool."""
        while self.used + len(tokens) // 16 > self.num_blocks and self.stored:
            oldest = self.stored.popleft()
            self.apply({"removed": {"block_hashes": oldest}})
            self.used -= len(oldest)
        return tokens.tolist()

    def apply(self, data: dict[str, Any]) -> None:
        self.events += 1
        self.tree.apply_event(1, json.dumps({"event_id": self.events, "data": data}).encode())

    def begin(self, tokens: Any) -> tuple[Any, int]:
        hashes = self.hash(tokens, 16)
        hit = max(self.tree.find_matches(hashes).scores.values(), default=0)
        names, name = [], 0
        for block in hashes:  # a block's name covers its prefix
            name = hash((name, block)) & 0xFFFFFFFFFFFFFFFF
            names.append(name)
        new = [{"block_hash": names[i], "tokens_hash": hashes[i]} for i in range(hit, len(hashes))]
        if new:
            self.apply({"stored": {"parent_hash": names[hit - 1] if hit else None, "blocks": new}})
            self.stored.append([block["block_hash"] for block in reversed(new)])
            self.used += len(new)
        return None, hit * 16

    def end(self, request: Any) -> None:
        pass


CLASSES: dict[str, Any] = {
    "radixpool": RadixPool, "sglang": SGLang, "sglang-rust": SGLangRust, "vllm": VLLM, "dynamo": Dynamo,
}  # fmt: skip


def run_prompts(engine: Any, prompts: Any, count: int) -> tuple[float, float]:
    """Run the next `count` prompts, 32 in flight; return CPU µs a lifecycle and the hit ratio."""
    in_flight: deque[Any] = deque()
    spent = hits = seen = 0
    for tokens in islice(prompts, count):
        key = engine.convert(tokens)
        start = time.thread_time_ns()
        request, hit = engine.begin(key)
        in_flight.append(request)
        if len(in_flight) > 32:
            engine.end(in_flight.popleft())
        spent += time.thread_time_ns() - start
        hits += hit
        seen += len(tokens)
    while in_flight:
        engine.end(in_flight.popleft())
    return spent / 1e3 / max(1, count), hits / max(1, seen)


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def serve(name: str, folder: Path) -> None:
    """Measure one run and print its figures as JSON; what the engine prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(HERE))
    from tree_workloads import WORKLOADS

    request = json.loads(sys.stdin.readline())
    workload = WORKLOADS[request["workload"]]
    CLASSES[name](8, folder)  # imports are no cost of a block
    before = resident_bytes()
    engine = CLASSES[name](workload.num_blocks, folder)
    prompts = workload.prompts(request["seed"])
    run_prompts(engine, prompts, workload.fill)
    figures = {}
    if workload.name == "large":
        figures["bytes_per_block"] = (resident_bytes() - before) / workload.num_blocks
    gc.freeze()
    spent, hits = run_prompts(engine, prompts, request["requests"])
    out.write(json.dumps({"lifecycles_per_s": 1e6 / spent, "lifecycle_us": spent, "hit_ratio": hits} | figures) + "\n")
    out.close()


def measure(name: str, folder: Path, workload: str, seed: int, requests: int) -> dict[str, float]:
    """Measure one engine in a process of its own."""
    python = sys.executable if name == "radixpool" else str(folder / "venv" / "bin" / "python")
    done = subprocess.run(
        [python, __file__, "run", name, str(folder)],
        input=json.dumps({"workload": workload, "seed": seed, "requests": requests}) + "\n",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed on {workload}: {done.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def setup(folder: Path) -> None:
    """Make DIR/venv and DIR/src from released wheels."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels, python = folder / "wheels", folder / "venv" / "bin" / "python"
    run = lambda *command: subprocess.run([str(part) for part in command], check=True)  # noqa: E731
    run(sys.executable, "-m", "venv", folder / "venv")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "torch==2.13.0", "-r", HERE / "tree_peers.txt")
    pip_download = (python, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels)
    run(*pip_download, f"sglang=={VERSIONS['sglang']}")
    abi3 = "--only-binary=:all: --abi abi3 --python-version 3.11 --implementation cp --platform manylinux_2_28_x86_64"
    run(*pip_download, *abi3.split(), f"vllm=={VERSIONS['vllm']}")
    for wheel in wheels.glob("*.whl"):
        name = wheel.name.split("-")[0]
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if (
                    member.endswith((".py", ".json", ".cpp", ".h", "METADATA"))
                    or "radix" in member
                    or "mem_cache.cp" in member
                ):
                    archive.extract(member, folder / "src" / name)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "setup":
        setup(Path(sys.argv[2]).resolve())
    elif len(sys.argv) == 4 and sys.argv[1] == "run" and sys.argv[2] in CLASSES:
        serve(sys.argv[2], Path(sys.argv[3]).resolve())
    elif sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
    else:
        sys.exit(__doc__)
