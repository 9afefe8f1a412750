"""A naive cache to compare the real one with: dictionaries of prefixes, one block at a time, no trees, no counters.

It shares no code with `radixpool.radix`. It decides everything (admission, hits, victims) except which free block an
allocation gets; those ids it takes from the real cache's answers and checks that they were free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Prefix = tuple  # (namespace, tokens of whole blocks…)


class Refused(Exception):
    """The oracle's pool is exhausted."""

    def __init__(self, needed: int, allocatable: int) -> None:
        super().__init__(needed, allocatable)
        self.needed, self.allocatable = needed, allocatable


@dataclass
class OracleSequence:
    namespace: object
    tokens: list[int]
    table: list[int]
    committed: int
    cached: int

    def held(self, block_size: int) -> list[Prefix]:
        full = self.committed // block_size
        return [(self.namespace, *self.tokens[: (i + 1) * block_size]) for i in range(full)]


@dataclass
class Fence:
    steps: dict[str, int]
    private: list[int]
    path: list[Prefix]


@dataclass
class Entry:
    block: int
    stamp: int = 0


@dataclass
class Oracle:
    num_blocks: int
    block_size: int
    free: set[int] = field(init=False)
    tree: dict[Prefix, Entry] = field(default_factory=dict)
    sequences: dict[int, OracleSequence] = field(default_factory=dict)
    fences: list[Fence] = field(default_factory=list)
    workers: dict[str, int] = field(default_factory=dict)
    tick: int = 0
    queried: int = 0
    hit: int = 0

    def __post_init__(self) -> None:
        self.free = set(range(self.num_blocks))

    # -- states

    def holders(self, prefix: Prefix) -> int:
        return sum(prefix in seq.held(self.block_size) for seq in self.sequences.values())

    def held_prefixes(self) -> set[Prefix]:
        return {prefix for seq in self.sequences.values() for prefix in seq.held(self.block_size)}

    def fenced_prefixes(self) -> set[Prefix]:
        return {prefix for fence in self.fences for prefix in fence.path}

    def states(self) -> dict[str, set[int]]:
        held, fenced = self.held_prefixes(), self.fenced_prefixes()
        result: dict[str, set[int]] = {"free": set(self.free), "cached": set(), "held": set(), "quarantined": set()}
        for prefix, entry in self.tree.items():
            result["held" if prefix in held else "quarantined" if prefix in fenced else "cached"].add(entry.block)
        for seq in self.sequences.values():
            result["held"].update(seq.table[seq.committed // self.block_size :])
        for fence in self.fences:
            result["quarantined"].update(fence.private)
        return result

    # -- operations

    def match(self, tokens: list[int], namespace: object, limit: int | None = None) -> list[int]:
        limit = len(tokens) if limit is None else min(limit, len(tokens))
        blocks = []
        for end in range(self.block_size, limit + 1, self.block_size):
            entry = self.tree.get((namespace, *tokens[:end]))
            if entry is None:
                break
            blocks.append(entry.block)
        return blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def room(self, needed: int, spared: set[int]) -> None:
        """Prove that `needed` blocks can be had beside `spared`; evict what is short."""
        allocatable = len(self.free) + len(self.states()["cached"] - spared)
        if needed > allocatable:
            raise Refused(needed, allocatable)

    def victims(self, count: int, spared: set[int]) -> list[int]:
        """Evict up to `count` blocks one by one: the least recently used that has nothing below it."""
        out = []
        held, fenced = self.held_prefixes(), self.fenced_prefixes()
        while len(out) < count:
            parents = {prefix[: -self.block_size] for prefix in self.tree}
            leaves = [
                (entry.stamp, -len(prefix), prefix)
                for prefix, entry in self.tree.items()
                if prefix not in parents and prefix not in held and prefix not in fenced and entry.block not in spared
            ]
            if not leaves:
                break
            prefix = min(leaves, key=lambda leaf: leaf[:2])[2]
            out.append(self.tree.pop(prefix).block)
        self.free.update(out)
        return out

    def take(self, blocks: list[int]) -> None:
        assert set(blocks) <= self.free, f"blocks {set(blocks) - self.free} were handed out but not free"
        assert len(set(blocks)) == len(blocks), f"{blocks} names a block twice"
        self.free -= set(blocks)

    def acquire(self, tokens: list[int], namespace: object, reserve: int, max_hit: int | None):
        """Return (hit blocks, number of new blocks) after making room, or raise `Refused`."""
        hit = self.match(tokens, namespace, len(tokens) - 1 if max_hit is None else max_hit)
        needed = self.blocks_for(len(tokens) + reserve) - len(hit)
        self.room(needed, set(hit))
        self.victims(needed - len(self.free), set(hit))
        self.queried += len(tokens)
        self.hit += len(hit) * self.block_size
        return hit, needed

    def admitted(self, handle: int, tokens: list[int], namespace: object, hit: list[int], table: list[int]) -> None:
        assert table[: len(hit)] == hit
        self.take(table[len(hit) :])
        cached = len(hit) * self.block_size
        self.sequences[handle] = OracleSequence(namespace, list(tokens), list(table), cached, cached)

    def grow(self, handle: int, num_tokens: int) -> int:
        needed = self.blocks_for(num_tokens) - len(self.sequences[handle].table)
        if needed > 0:
            self.room(needed, set())
            self.victims(needed - len(self.free), set())
        return max(needed, 0)

    def grown(self, handle: int, table: list[int]) -> None:
        seq = self.sequences[handle]
        assert table[: len(seq.table)] == seq.table
        self.take(table[len(seq.table) :])
        seq.table = list(table)

    def commit(self, handle: int, upto: int) -> list[tuple[int, int, int]]:
        """Publish; return the remaps (index, old, new) that have to come."""
        seq = self.sequences[handle]
        remaps = []
        for index in range(seq.committed // self.block_size, upto // self.block_size):
            prefix = (seq.namespace, *seq.tokens[: (index + 1) * self.block_size])
            if prefix in self.tree:
                remaps.append((index, seq.table[index], self.tree[prefix].block))
                seq.table[index] = self.tree[prefix].block
            else:
                self.tree[prefix] = Entry(seq.table[index])
        seq.committed = max(seq.committed, upto)
        self.retire([old for _, old, _ in remaps], {w: step + 1 for w, step in self.workers.items()}, [])
        return remaps

    def retire(self, private: list[int], steps: dict[str, int], path: list[Prefix]) -> None:
        steps = {worker: step for worker, step in steps.items() if step > self.workers[worker]}
        if steps:
            self.fences.append(Fence(steps, list(private), list(path)))
        else:
            self.free.update(private)

    def release(self, handle: int, steps: dict[str, int]) -> None:
        self.tick += 1
        seq = self.sequences.pop(handle)
        path = seq.held(self.block_size)
        self.retire(seq.table[len(path) :], steps, path)
        for prefix in set(path) - self.held_prefixes():
            self.tree[prefix].stamp = self.tick

    def evict(self, count: int) -> list[int]:
        self.tick += 1
        return self.victims(count, set())

    def complete(self, worker: str, step: int) -> None:
        self.workers[worker] = max(self.workers[worker], step)
        self.settle()

    def remove_worker(self, worker: str) -> None:
        del self.workers[worker]
        self.settle()

    def settle(self) -> None:
        waiting = []
        for fence in self.fences:
            fence.steps = {w: s for w, s in fence.steps.items() if w in self.workers and s > self.workers[w]}
            if fence.steps:
                waiting.append(fence)
            else:
                self.free.update(fence.private)
        self.fences = waiting
