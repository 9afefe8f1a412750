"""The cache's own results as the messages that operators get. Salts are shown as a hash under a key of this life."""

from __future__ import annotations

import hashlib
import os
from typing import Final

from radixpool.radix import BlockInfo, Namespace, NodeInfo
from radixpool.radix.events import Cleared, Event, Removed, Stored
from radixpool.rpc.convert import block_ids_to_wire, namespace_to_wire
from radixpool.rpc.inspection import STATE_TO_WIRE
from radixpool.rpc.manager.handles import Held
from radixpool.v1 import admin_pb2 as pb
from radixpool.v1 import common_pb2

_SALT_HASH_BYTES: Final = 8


class Views:
    """Makes messages; the key of the salts' hash lives as long as it does."""

    def __init__(self) -> None:
        self._salt_key = os.urandom(hashlib.blake2b.MAX_KEY_SIZE)

    def namespace(self, namespace: Namespace) -> common_pb2.Namespace:
        """Show a namespace: two salts can be told apart, none can be guessed."""
        message = namespace_to_wire(namespace)
        if message.cache_salt:
            digest = hashlib.blake2b(message.cache_salt.encode(), key=self._salt_key, digest_size=_SALT_HASH_BYTES)
            message.cache_salt = f"hash:{digest.hexdigest()}"
        return message

    def node(self, node: NodeInfo) -> pb.TreeNode:
        """Show a run of blocks."""
        return pb.TreeNode(
            level=node.level,
            start_block=node.start,
            block_ids=block_ids_to_wire(node.blocks),
            holders=node.ref_count,
            num_children=node.num_children,
            state=STATE_TO_WIRE[node.state],
            last_use=node.last_use,
            pinned=node.pinned,
            namespace=self.namespace(node.namespace) if node.level == 0 else None,
        )

    def block(self, block: BlockInfo, holders: list[Held]) -> pb.InspectBlockResponse:
        """Show a block and the sequences that hold it."""
        return pb.InspectBlockResponse(
            block_id=block.block_id,
            state=STATE_TO_WIRE[block.state],
            findable=block.findable,
            block_index=block.position,
            namespace=None if block.namespace is None else self.namespace(block.namespace),
            last_use=block.last_use,
            holders=map(self.sequence, holders),
        )

    def sequence(self, held: Held) -> pb.SequenceInfo:
        """Show a sequence without its table."""
        sequence = held.sequence
        return pb.SequenceInfo(
            sequence_id=sequence.handle,
            client_name=held.lease.name,
            num_tokens=sequence.num_tokens,
            cached_tokens=sequence.cached_tokens,
            committed_tokens=sequence.committed_tokens,
            num_blocks=sequence.num_blocks,
            namespace=self.namespace(sequence.namespace),
        )

    def sequence_with_table(self, held: Held) -> pb.SequenceInfo:
        """Show a sequence."""
        info = self.sequence(held)
        info.block_table = held.sequence.packed_block_table
        return info

    def event(self, event: Event) -> pb.CacheEvent:
        """Show an event."""
        match event:
            case Stored():
                return pb.CacheEvent(seq=event.seq, stored=self._stored(event))
            case Removed():
                removed = pb.RemovedEvent(namespace=self.namespace(event.namespace), block_ids=event.blocks)
                return pb.CacheEvent(seq=event.seq, removed=removed)
            case Cleared():
                namespace = None if event.namespace is None else self.namespace(event.namespace)
                cleared = pb.ClearedEvent(namespace=namespace, generation=event.generation)
                return pb.CacheEvent(seq=event.seq, cleared=cleared)

    def _stored(self, event: Stored) -> pb.StoredEvent:
        return pb.StoredEvent(
            namespace=self.namespace(event.namespace),
            parent_block=event.parent if event.parent >= 0 else None,
            start_block=event.start,
            tokens=event.tokens,
            block_ids=event.blocks,
            media=event.media,
        )
