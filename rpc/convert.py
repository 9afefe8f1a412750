"""Conversions between Python values and wire messages that both sides need. Pure functions, no I/O.

Token ids and block ids cross the wire as packed little-endian bytes, so that a conversion is one memory copy at most.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from radixpool.radix import Namespace
from radixpool.radix.media import MediaSpan
from radixpool.radix.namespace import DEFAULT_NAMESPACE
from radixpool.rpc.generation import (
    FinishReason,
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    GenerateTokens,
    SamplingParams,
    WorkerStatus,
)
from radixpool.rpc.pool_types import (
    Attachment,
    CudaFdAttachment,
    CudaIpcAllocation,
    CudaIpcAttachment,
    KvDtype,
    MemfdAttachment,
    Pool,
    PoolLayout,
    PoolSpec,
)
from radixpool.v1 import cache_pb2, common_pb2, pool_pb2, worker_pb2

_DTYPE_TO_WIRE = {
    KvDtype.FLOAT32: pool_pb2.KV_DTYPE_FLOAT32,
    KvDtype.FLOAT16: pool_pb2.KV_DTYPE_FLOAT16,
    KvDtype.BFLOAT16: pool_pb2.KV_DTYPE_BFLOAT16,
    KvDtype.FLOAT8_E4M3: pool_pb2.KV_DTYPE_FLOAT8_E4M3,
}
_DTYPE_FROM_WIRE = {wire: value for value, wire in _DTYPE_TO_WIRE.items()}
_LAYOUT_TO_WIRE = {PoolLayout.HND: pool_pb2.POOL_LAYOUT_HND}
_LAYOUT_FROM_WIRE = {wire: value for value, wire in _LAYOUT_TO_WIRE.items()}


def block_ids_from_wire(packed: bytes) -> npt.NDArray[np.int32]:
    """Return packed int32 as a read-only array over the same memory. O(1)."""
    return np.frombuffer(packed, dtype="<i4")


def block_ids_to_wire(block_ids: npt.NDArray[np.int32]) -> bytes:
    """Return block ids as packed little-endian int32. O(len(block_ids))."""
    return block_ids.astype("<i4", copy=False).tobytes()


def media_to_wire(media: Iterable[MediaSpan]) -> list[cache_pb2.MediaSpan]:
    """Return the messages of contents that placeholder tokens stand for."""
    return [cache_pb2.MediaSpan(start=span.start, length=span.length, digest=span.digest) for span in media]


def media_from_wire(spans: Iterable[cache_pb2.MediaSpan]) -> list[MediaSpan]:
    """Return the contents that placeholder tokens stand for."""
    return [MediaSpan(span.start, span.length, span.digest) for span in spans]


def tokens_from_wire(packed: bytes) -> npt.NDArray[np.uint32]:
    """Return packed uint32 as a read-only array over the same memory. O(1)."""
    return np.frombuffer(packed, dtype="<u4")


def optional_namespace_to_wire(namespace: Namespace) -> common_pb2.Namespace | None:
    """Return the message, or None for the default namespace, which requests leave out."""
    return None if namespace is DEFAULT_NAMESPACE else namespace_to_wire(namespace)


def namespace_to_wire(namespace: Namespace) -> common_pb2.Namespace:
    """Return the message of a namespace."""
    return common_pb2.Namespace(
        model=namespace.model,
        revision=namespace.revision,
        adapter=namespace.adapter,
        adapter_generation=namespace.adapter_generation,
        tenant=namespace.tenant,
        cache_salt=namespace.cache_salt,
    )


def namespace_from_wire(message: common_pb2.Namespace) -> Namespace:
    """Return the namespace that the message describes."""
    return Namespace(
        model=message.model,
        revision=message.revision,
        adapter=message.adapter,
        adapter_generation=message.adapter_generation,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
    )


def pool_spec_to_wire(spec: PoolSpec) -> pool_pb2.PoolSpec:
    """Return the message; what the spec leaves open stays unset."""
    return pool_pb2.PoolSpec(
        model=spec.model,
        revision=spec.revision,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        dtype=_DTYPE_TO_WIRE[spec.dtype] if spec.dtype else pool_pb2.KV_DTYPE_UNSPECIFIED,
        layout=_LAYOUT_TO_WIRE[spec.layout] if spec.layout else pool_pb2.POOL_LAYOUT_UNSPECIFIED,
        k_scale=spec.k_scale,
        v_scale=spec.v_scale,
    )


def pool_spec_from_wire(message: pool_pb2.PoolSpec) -> PoolSpec:
    """Return the spec; an unknown enum value reads as None, which a complete spec never has."""
    return PoolSpec(
        model=message.model,
        revision=message.revision,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        dtype=_DTYPE_FROM_WIRE.get(message.dtype),
        layout=_LAYOUT_FROM_WIRE.get(message.layout),
        k_scale=message.k_scale,
        v_scale=message.v_scale,
    )


def pool_to_wire(pool: Pool) -> pool_pb2.Pool:
    """Return the message of a pool."""
    attachment = pool_pb2.PoolAttachment()
    match pool.attachment:
        case MemfdAttachment(socket_path, size_bytes):
            attachment.memfd.socket_path = socket_path
            attachment.memfd.size_bytes = size_bytes
        case CudaIpcAttachment(device_uuid, allocations):
            attachment.cuda_ipc.device_uuid = device_uuid
            for allocation in allocations:
                attachment.cuda_ipc.allocations.add(handle=allocation.handle, size_bytes=allocation.size_bytes)
        case CudaFdAttachment(device_uuid, socket_path, size_bytes):
            attachment.cuda_fd.device_uuid = device_uuid
            attachment.cuda_fd.socket_path = socket_path
            attachment.cuda_fd.size_bytes = size_bytes
    return pool_pb2.Pool(pool_id=pool.pool_id, spec=pool_spec_to_wire(pool.spec), attachment=attachment)


def pool_from_wire(message: pool_pb2.Pool) -> Pool:
    """Return the pool. Raises ValueError when the attachment is unset or malformed."""
    return Pool(message.pool_id, pool_spec_from_wire(message.spec), _attachment_from_wire(message.attachment))


def _attachment_from_wire(message: pool_pb2.PoolAttachment) -> Attachment:
    match message.WhichOneof("attachment"):
        case "memfd":
            return MemfdAttachment(message.memfd.socket_path, message.memfd.size_bytes)
        case "cuda_ipc":
            ranges = tuple(CudaIpcAllocation(item.handle, item.size_bytes) for item in message.cuda_ipc.allocations)
            return CudaIpcAttachment(message.cuda_ipc.device_uuid, ranges)
        case "cuda_fd":
            sent = message.cuda_fd
            return CudaFdAttachment(sent.device_uuid, sent.socket_path, sent.size_bytes)
        case _:
            raise ValueError("pool.attachment must be memfd, cuda_ipc or cuda_fd, got none")


def sampling_to_wire(sampling: SamplingParams) -> worker_pb2.SamplingParams:
    """Return the message of the parameters."""
    return worker_pb2.SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        skip_draws=sampling.skip_draws,
    )


def sampling_from_wire(message: worker_pb2.SamplingParams) -> SamplingParams:
    """Return the parameters; checking their ranges is the worker's."""
    return SamplingParams(
        max_new_tokens=message.max_new_tokens,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        skip_draws=message.skip_draws,
    )


def generate_event_to_wire(event: GenerateEvent) -> worker_pb2.GenerateResponse:
    """Return the stream message of one event."""
    match event:
        case GenerateStarted(prompt_tokens, cached_tokens):
            started = worker_pb2.GenerateStarted(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
            return worker_pb2.GenerateResponse(started=started)
        case GenerateTokens(tokens):
            packed = np.asarray(tokens, dtype="<u4").tobytes()
            return worker_pb2.GenerateResponse(tokens=worker_pb2.GenerateTokens(tokens=packed))
        case GenerateFinished(reason, prompt_tokens, cached_tokens, output_tokens):
            finished = worker_pb2.GenerateFinished(
                reason=worker_pb2.FinishReason.ValueType(reason.value),
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                output_tokens=output_tokens,
            )
            return worker_pb2.GenerateResponse(finished=finished)


def generate_event_from_wire(message: worker_pb2.GenerateResponse) -> GenerateEvent:
    """Return the event. Raises ValueError for an event of a later version."""
    match message.WhichOneof("event"):
        case "started":
            return GenerateStarted(message.started.prompt_tokens, message.started.cached_tokens)
        case "tokens":
            return GenerateTokens(tuple(tokens_from_wire(message.tokens.tokens).tolist()))
        case "finished":
            end = message.finished
            return GenerateFinished(FinishReason(end.reason), end.prompt_tokens, end.cached_tokens, end.output_tokens)
        case _:
            raise ValueError("the worker sent an event that this version does not know")


def worker_status_from_wire(message: worker_pb2.GetStatusResponse) -> WorkerStatus:
    """Return the status of a worker."""
    return WorkerStatus(
        name=message.name,
        model=message.model,
        pool=pool_spec_from_wire(message.pool),
        pool_id=message.pool_id,
        max_model_tokens=message.max_model_tokens,
        running_sequences=message.running_sequences,
        waiting_sequences=message.waiting_sequences,
        completed_steps=message.completed_steps,
        computed_tokens=message.computed_tokens,
        reused_tokens=message.reused_tokens,
    )
