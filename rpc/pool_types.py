"""The physical pool as the wire describes it: what it is made of and how another process maps it. All frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from radixpool.rpc import limits


class KvDtype(Enum):
    """Element type of a pool; the value is the name that numpy and torch use."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"

    @property
    def option(self) -> str:
        """Return the name on command lines, which for fp8 is that of vLLM and SGLang."""
        return "fp8_e4m3" if self is KvDtype.FLOAT8_E4M3 else self.value


class PoolLayout(Enum):
    """Order of the dimensions of one layer's K (and V)."""

    HND = "HND"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Everything that must agree between a pool and its workers. `num_kv_heads` is per rank.

    A pool of fp8 holds K / `k_scale` and V / `v_scale`, saturated at 448; other pools have no scales (0).
    As an expectation (`Client.attach_pool`), 0, "" and None accept anything.
    """

    model: str = ""
    revision: str = ""
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    block_size: int = 0
    num_blocks: int = 0
    dtype: KvDtype | None = None
    layout: PoolLayout | None = None
    k_scale: float = 0.0
    v_scale: float = 0.0


@dataclass(frozen=True, slots=True)
class MemfdAttachment:
    """Connect to the unix socket to receive one sealed memfd."""

    socket_path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CudaIpcAllocation:
    """One cudaMalloc'ed range: the 64 bytes of its cudaIpcMemHandle_t and its size."""

    handle: bytes
    size_bytes: int

    def __post_init__(self) -> None:
        if len(self.handle) != limits.CUDA_IPC_HANDLE_BYTES:
            raise ValueError(f"handle must be {limits.CUDA_IPC_HANDLE_BYTES} bytes, got {len(self.handle)}")


@dataclass(frozen=True, slots=True)
class CudaIpcAttachment:
    """Open each allocation on the GPU with this UUID (16 bytes)."""

    device_uuid: bytes
    allocations: tuple[CudaIpcAllocation, ...]


@dataclass(frozen=True, slots=True)
class CudaFdAttachment:
    """Connect to the unix socket to receive the descriptor of one allocation on the GPU with this UUID (16 bytes)."""

    device_uuid: bytes
    socket_path: str
    size_bytes: int


Attachment: TypeAlias = MemfdAttachment | CudaIpcAttachment | CudaFdAttachment
"""How another process maps a pool."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A registered pool. `pool_id` is 16 random bytes, new for every allocation."""

    pool_id: bytes
    spec: PoolSpec
    attachment: Attachment
