"""The events as they go into msgpack: tagged maps as vLLM 0.33 writes them, or tagged arrays for older consumers.

A field that has a default in vLLM and holds it is left out, as vLLM does. The batch around them is an array in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

ATTENTION: Final = "full_attention"
GROUP: Final = 0
"""All layers of a radixpool pool share one block table, which vLLM calls group 0."""

Message: TypeAlias = dict[str, Any] | list[Any]


class Encoding(StrEnum):
    """How one event is written."""

    MAP = "map"
    ARRAY = "array"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Consecutive blocks of one prefix became findable.

    Attributes:
        hashes: their names, in path order.
        parent: name of the block before them, None at the root.
        tokens: their token ids.
        block_size: tokens in one block.
        adapter: LoRA name, None for the base model.
        extra_keys: per block what besides tokens and adapter its name depends on, None for nothing.

    """

    hashes: Sequence[int]
    parent: int | None
    tokens: Sequence[int]
    block_size: int
    adapter: str | None
    extra_keys: Sequence[Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks of these names are not findable any more."""

    hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing announced before is findable."""


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | AllCleared


def message(event: KvEvent, *, encoding: Encoding, medium: str) -> Message:
    """Return what msgpack encodes for one event of blocks on `medium`."""
    return _as_map(event, medium) if encoding is Encoding.MAP else _as_array(event, medium)


def batch(messages: Sequence[Message], *, timestamp: float, rank: int) -> list[Any]:
    """Return what msgpack encodes for a batch: seconds since the epoch, the events, the data-parallel rank."""
    return [timestamp, list(messages), rank]


def _as_map(event: KvEvent, medium: str) -> dict[str, Any]:
    match event:
        case BlocksStored():
            return {
                "type": "BlockStored",
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent,
                "token_ids": event.tokens,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": medium,
                "lora_name": event.adapter,
                "extra_keys": event.extra_keys,
                "group_idx": GROUP,
                "kv_cache_spec_kind": ATTENTION,
            }
        case BlocksRemoved(hashes):
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": GROUP}
        case AllCleared():
            return {"type": "AllBlocksCleared"}


def _as_array(event: KvEvent, medium: str) -> list[Any]:
    match event:
        case BlocksStored():
            head = ["BlockStored", event.hashes, event.parent, event.tokens, event.block_size]
            return [*head, None, medium, event.adapter]
        case BlocksRemoved(hashes):
            return ["BlockRemoved", hashes, medium]
        case AllCleared():
            return ["AllBlocksCleared"]
