"""What the oracle is made of: blocks with links, sequences with lists, fences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


class Refused(Exception):
    """The oracle's pool is exhausted."""

    def __init__(self, needed: int, allocatable: int) -> None:
        super().__init__(needed, allocatable)
        self.needed, self.allocatable = needed, allocatable


def has_media(tokens: Iterable[object]) -> bool:
    """Tell whether one of the tokens stands for content: such a one is a tuple with its place in the content."""
    return any(isinstance(token, tuple) for token in tokens)


@dataclass(eq=False)
class Entry:
    """A committed block; a root has block -1. `dead` ones are not findable."""

    block: int = -1
    parent: Entry | None = None
    tokens: tuple[int, ...] = ()
    stamp: int = 0
    dead: bool = False
    children: dict[tuple[int, ...], Entry] = field(default_factory=dict)
    namespace: object = None  # of a root

    def path(self) -> list[Entry]:
        above = [] if self.parent is None or self.parent.parent is None else self.parent.path()
        return [*above, self]

    def below(self) -> Iterator[Entry]:
        for child in self.children.values():
            yield child
            yield from child.below()


@dataclass
class OracleSequence:
    namespace: object
    root: Entry
    tokens: list[int]
    path: list[Entry]
    private: list[int]
    committed: int
    cached: int
    source: Entry | None = None
    invalid_from: int | None = None

    @property
    def table(self) -> list[int]:
        return [entry.block for entry in self.path] + self.private

    @property
    def end(self) -> Entry:
        return self.path[-1] if self.path else self.root


@dataclass
class Fence:
    steps: dict[str, int]
    private: list[int]
    path: list[Entry]
