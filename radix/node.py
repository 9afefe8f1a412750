"""A node of a radix tree: a run of blocks and its place in the tree.

`ref` counts the holders that end at the node plus its children that are held, so taking a path costs one increment per
node that was not held before, and a node is held exactly when `ref > 0`. `fence` and `pins` count in the same way:
holders that wait for a GPU step, and pins. Exact numbers of holders per node are worked out by the inspector only.
A root carries one extra `ref`, which stops every upward walk.
"""

from __future__ import annotations

from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING

from radixpool.radix.eviction.base import DEFAULT_PRIORITY, EvictionPolicy, Run
from radixpool.radix.namespace import Namespace

if TYPE_CHECKING:
    from radixpool.radix.quotas import Account

__all__ = ["Node", "Root"]


class Node(Run):
    """A run and its place: parent, children by the bytes of their first block, holders.

    Attributes:
        children: first block (tokens, then `media`) of each child to the child; None when there is none.
        policy: the policy object that ranks it as a candidate; None once it is dead: unfindable, freed with its holder.
        account: the tenant's account that pays for its blocks, if the tenant has a quota.
        media: encoded media spans under its only block, or empty.
        retained_until: when its retention priority ends, on the cache's clock; infinite where it does not.

    """

    __slots__ = ("account", "children", "fence", "media", "parent", "pins", "policy", "ref", "retained_until", "root")

    children: dict[bytes, Node] | None
    parent: Node
    root: Root
    ref: int
    fence: int
    pins: int
    policy: EvictionPolicy | None
    account: Account | None
    media: bytes
    retained_until: float

    def __init__(self, key: bytes, blocks: bytes, parent: Node, end: int) -> None:
        self.key = key
        self.blocks = blocks
        self.parent = parent
        self.root = parent.root
        self.end = end
        self.stride = parent.stride
        self.policy = parent.policy
        self.account = parent.account
        self.children = None
        self.ref = self.fence = self.pins = 0
        self.last_use = 0
        self.priority = DEFAULT_PRIORITY
        self.retained_until = inf
        self.media = b""
        self.prev = self.next = self.data = self.origin = None

    def goes_through(self, ancestor: Node) -> bool:
        """Tell whether `ancestor` is this node or above it. O(depth)."""
        node = self
        while node is not ancestor and node.parent is not node:
            node = node.parent
        return node is ancestor

    def __repr__(self) -> str:
        return (
            f"Node(start={self.start}, num_blocks={self.num_blocks}, ref={self.ref}, fence={self.fence}, "
            f"children={len(self.children or ())}, last_use={self.last_use}, dead={self.policy is None})"
        )

    def _origin(self) -> bytes:
        if self.origin is None:
            chain: list[Node] = []
            node = self
            while node.origin is None:  # a root always has one
                chain.append(node)
                node = node.parent
            for node in reversed(chain):
                before = node.parent.identity(node.parent.num_blocks - 1)
                node.origin = blake2b(before + node.media, digest_size=8).digest() if node.media else before
        assert self.origin is not None
        return self.origin


class Root(Node):
    """The root of one namespace's tree: no blocks, never evicted, always held by itself."""

    __slots__ = ("namespace",)

    namespace: Namespace

    def __init__(self, namespace: Namespace, stride: int, policy: EvictionPolicy, account: Account | None) -> None:
        self.stride = stride
        self.policy = policy
        self.account = account
        self.root = self
        super().__init__(b"", b"", self, 0)
        self.ref = 1
        self.origin = blake2b(namespace.encode(), digest_size=8).digest()
        self.namespace = namespace
