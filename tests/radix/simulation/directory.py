"""The simulated block directory: the state of every block as the cache told it, each change proved as it comes."""

from __future__ import annotations

from radixpool.radix import RadixPoolError

BLOCK = 2


def _ids(packed: bytes) -> list[int]:
    return memoryview(packed).cast("i").tolist()


class DiskFull(RadixPoolError):
    """The simulated directory refuses a commit."""


class Directory:
    """A persistence that records states, and refuses when told to."""

    def __init__(self) -> None:
        self.state: dict[int, str] = {}
        self.refuse = False

    def prepare(self, namespace, media=b"") -> None:
        if self.refuse:
            self.refuse = False
            raise DiskFull("disk full")

    def handed_out(self, blocks) -> None:
        for block in _ids(blocks):  # free, or evicted for it
            assert self.state.get(block, "free") in ("free", "stored")
            self.state[block] = "private"

    def stored(self, blocks, tokens, *, parent, position, namespace, last_use, media=b"") -> None:
        assert len(tokens) == len(blocks) * BLOCK
        assert parent == -1 or self.state[parent] == "stored"
        assert (parent == -1) == (position == 0)
        self.set(blocks, "private", "stored")

    def removed(self, blocks) -> None:
        self.set(blocks, "stored", "private")

    def returned(self, blocks) -> None:
        for block in _ids(blocks):
            assert self.state.pop(block) in ("private", "stored")

    def touched(self, block, last_use) -> None:
        assert self.state[block] == "stored"

    def set(self, blocks, before: str, after: str) -> None:
        for block in _ids(blocks):
            assert self.state.get(block, "free") == before, f"block {block} is {self.state.get(block)}, not {before}"
            self.state[block] = after
