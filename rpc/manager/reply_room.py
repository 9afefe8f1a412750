"""How much one reply may still grow. What is answered for a small request can be large: every table that it names.

An operation asks before it does anything, so that nothing happens whose answer could not be sent.
"""

from __future__ import annotations

from typing import Final

from radixpool.rpc import limits
from radixpool.rpc.errors import LimitExceeded

ANSWER_BYTES: Final = 256
"""What one answer takes besides tokens and tables: handle, lengths, or an error."""


class ReplyRoom:
    """The bytes that the reply under way may still take. `begin` with each reply."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = 0

    def begin(self, num_answers: int) -> None:
        """Start a reply that has room for `num_answers` answers, whatever else it will hold."""
        self._left = limits.MAX_MESSAGE_BYTES - ANSWER_BYTES * (1 + num_answers)

    def take(self, num_bytes: int, *, num_answers: int = 0) -> None:
        """Count on so many bytes more. Raises LimitExceeded, nothing taken, when the reply would become too large."""
        needed = num_bytes + ANSWER_BYTES * num_answers
        if needed > self._left:
            raise LimitExceeded(
                f"reply: the limit is {limits.MAX_MESSAGE_BYTES} bytes, {max(0, self._left)} are left of it, and this "
                f"answer takes up to {needed}; ask for less at a time"
            )
        self._left -= needed
