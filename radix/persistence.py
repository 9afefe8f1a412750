"""What the cache tells the outside so that its contents outlive the process.

The cache does no I/O. Whoever wants it to survive a crash hands a `Persistence` to the constructor; the cache calls it
so that at every instant what is recorded is safe to find again:

* a block is recorded as stored before it becomes findable,
* a record is cleared before anybody may write to its block, and by the end of the operation that made it unfindable (a
  block that is evicted for a request is handed out at once, which clears its record: one call for both),
* a block is marked private before a sequence can write to it, and free only after the last possible write.

Only `prepare` may refuse (a full disk), and it is called before an operation has changed anything. The others must not
raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from radixpool.radix.namespace import Namespace

__all__ = ["BlockIds", "Persistence"]

BlockIds: TypeAlias = bytes | Sequence[int] | npt.NDArray[np.integer[Any]]
"""Block ids as the caller has them: packed little-endian int32 bytes, a sequence of ints or an integer ndarray."""


class Persistence(Protocol):
    """Records what becomes of blocks; called before anybody outside the cache can see the change or act on it."""

    def prepare(self, namespace: Namespace, media: bytes = b"") -> None:
        """Make sure that blocks under these keys can be stored: the first step of a commit, and the only one to fail.

        Raises:
            RadixPoolError: they cannot be; the commit is refused and has changed nothing.

        """

    def handed_out(self, blocks: BlockIds) -> None:
        """Note that `blocks`, free or just evicted, become private to a sequence: a worker may write to them.

        The records of those that were committed are cleared, one after the other in this order.
        """

    def stored(
        self,
        blocks: BlockIds,
        tokens: bytes,
        *,
        parent: int,
        position: int,
        namespace: Namespace,
        last_use: int,
        media: bytes = b"",
    ) -> None:
        """Record a run of committed blocks that is about to become findable.

        `blocks` are in path order, `tokens` their ids (packed little-endian uint32, one block size per block), `parent`
        the tree block before the run or -1, `position` the index of the first block in its path, `last_use` the
        cache's logical clock, `media` the encoded media content under the run, which then is one block long.
        """

    def touched(self, block: int, last_use: int) -> None:
        """Note the last use of a path at its deepest tree block; a restored ancestor counts as used when it was.

        Called when a holder leaves, and when eviction shortens a path, for the block that is the deepest then.
        """

    def removed(self, blocks: BlockIds) -> None:
        """Clear the records of committed `blocks` that leave the tree while somebody still holds them."""

    def returned(self, blocks: BlockIds) -> None:
        """Clear the records of `blocks`, private or committed, that are free: nobody can touch them any more."""
