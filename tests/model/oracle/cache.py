"""A naive cache to compare the real one with: one object per block, no runs, no counters, everything by search.

It shares no code with `radixpool.radix`. It decides everything (admission, hits, victims, states) except which free
block an allocation gets; those ids it takes from the real cache's answers and checks that they were free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .entries import Entry, Fence, OracleSequence, Refused, has_media


@dataclass
class Oracle:
    num_blocks: int
    block_size: int
    free: set[int] = field(init=False)
    roots: dict[object, Entry] = field(default_factory=dict)
    sequences: dict[int, OracleSequence] = field(default_factory=dict)
    pins: dict[int, tuple[object, list[Entry]]] = field(default_factory=dict)
    fences: list[Fence] = field(default_factory=list)
    workers: dict[str, int] = field(default_factory=dict)
    dead: list[Entry] = field(default_factory=list)
    tick: int = 0
    queried: int = 0
    hit: int = 0

    def __post_init__(self) -> None:
        self.free = set(range(self.num_blocks))

    # -- states

    def findable(self) -> dict[object, list[Entry]]:
        return {namespace: list(root.below()) for namespace, root in self.roots.items()}

    def entries(self) -> list[Entry]:
        return [entry for entries in self.findable().values() for entry in entries]

    def holders(self, entry: Entry) -> int:
        """Count the sequences and pins whose path goes through the block."""
        paths = [seq.path for seq in self.sequences.values()] + [path for _, path in self.pins.values()]
        return sum(entry in path for path in paths)

    def held(self) -> set[Entry]:
        held = {entry for seq in self.sequences.values() for entry in seq.path}
        held |= {entry for seq in self.sequences.values() if seq.source for entry in seq.source.path()}
        return held | {entry for _, path in self.pins.values() for entry in path}

    def fenced(self) -> set[Entry]:
        return {entry for fence in self.fences for entry in fence.path}

    def states(self) -> dict[str, set[int]]:
        held, fenced = self.held(), self.fenced()
        result: dict[str, set[int]] = {"free": set(self.free), "cached": set(), "held": set(), "quarantined": set()}
        for entry in self.entries() + self.dead:
            result["held" if entry in held else "quarantined" if entry in fenced else "cached"].add(entry.block)
        for seq in self.sequences.values():
            result["held"].update(seq.private)
        for fence in self.fences:
            result["quarantined"].update(fence.private)
        return result

    def pinned(self) -> set[Entry]:
        return {entry for _, path in self.pins.values() for entry in path}

    # -- lookups

    def find(self, tokens: list[int], namespace: object, limit: int | None = None) -> list[Entry]:
        limit = len(tokens) if limit is None else min(limit, len(tokens))
        node, path = self.roots.get(namespace), []
        for start in range(0, limit - self.block_size + 1, self.block_size):
            node = node and node.children.get(tuple(tokens[start : start + self.block_size]))
            if node is None:
                break
            path.append(node)
        return path

    def partial(self, tokens: list[int], namespace: object, path: list[Entry], limit: int) -> tuple[int, list[Entry]]:
        """Return the longest common beginning within the next block, and all blocks that have it."""
        node = path[-1] if path else self.roots.get(namespace)
        start = len(path) * self.block_size
        wanted = tokens[start : min(limit, start + self.block_size)]
        best: tuple[int, list[Entry]] = (0, [])
        if has_media(tokens[start : start + self.block_size]):
            return best  # nothing is copied of a block under media
        for child in node.children.values() if node else ():
            if has_media(child.tokens):
                continue
            common = 0
            while common < len(wanted) and child.tokens[common] == wanted[common]:
                common += 1
            if common > best[0]:
                best = (common, [child])
            elif common and common == best[0]:
                best[1].append(child)
        return best

    def producers(self, tokens: list[int], path: list[Entry], namespace: object, limit: int) -> dict[int, int]:
        """Return who computes more of the prefix than is cached, with the number of whole blocks shared."""
        size, found = self.block_size, {}
        for handle, seq in self.sequences.items():
            if seq.namespace != namespace or seq.root is not self.roots.get(namespace) or seq.path != path:
                continue
            shared = 0
            most = min(len(seq.tokens), limit) // size * size
            while shared < most and seq.tokens[shared : shared + size] == tokens[shared : shared + size]:
                shared += size
            if shared > len(path) * size:
                found[handle] = shared
        return found

    # -- room

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def cached_beside(self, spared: Iterable[Entry]) -> int:
        return len(self.states()["cached"] - {entry.block for entry in spared})

    def need_room(self, needed: int, spared: Iterable[Entry] = ()) -> None:
        allocatable = len(self.free) + self.cached_beside(spared)
        if needed > allocatable:
            raise Refused(needed, allocatable)

    def victims(self, count: int, spared: Iterable[Entry] = ()) -> list[int]:
        """Evict up to `count` blocks one by one: the least recently used that has nothing below it."""
        out: list[int] = []
        kept = self.held() | self.fenced() | set(spared)
        while len(out) < count:
            leaves = [entry for entry in self.entries() if not entry.children and entry not in kept]
            if not leaves:
                break
            entry = min(leaves, key=lambda leaf: leaf.stamp)
            assert entry.parent is not None
            del entry.parent.children[entry.tokens]
            out.append(entry.block)
        self.free.update(out)
        self.forget_empty()
        return out

    def forget_empty(self) -> None:
        used = {id(seq.root) for seq in self.sequences.values()}
        self.roots = {ns: root for ns, root in self.roots.items() if root.children or id(root) in used}

    def take(self, blocks: list[int]) -> None:
        assert set(blocks) <= self.free, f"blocks {set(blocks) - self.free} were handed out but not free"
        assert len(set(blocks)) == len(blocks), f"{blocks} names a block twice"
        self.free -= set(blocks)

    # -- operations on sequences

    def acquire(self, tokens: list[int], namespace: object, reserve: int, max_hit: int | None, partial: bool):
        """Return (hit path, new blocks, (common, sources)) after making room, or raise `Refused`."""
        limit = len(tokens) - 1 if max_hit is None else min(max_hit, len(tokens))
        path = self.find(tokens, namespace, limit)
        common, sources = self.partial(tokens, namespace, path, limit) if partial else (0, [])
        needed = self.blocks_for(len(tokens) + reserve) - len(path)
        return path, needed, (common, sources)

    def admitted(self, handle: int, tokens: list[int], namespace: object, path, table, source, common) -> None:
        root = self.roots.setdefault(namespace, Entry(namespace=namespace))
        cached = len(path) * self.block_size + common
        seq = OracleSequence(namespace, root, list(tokens), list(path), table[len(path) :], cached, cached, source)
        self.sequences[handle] = seq
        self.queried += len(tokens)
        self.hit += cached

    def grow(self, handle: int, num_tokens: int) -> int:
        needed = self.blocks_for(num_tokens) - len(self.sequences[handle].table)
        if needed > 0:
            self.need_room(needed)
            self.victims(needed - len(self.free))
        return max(needed, 0)

    def commit(self, handle: int, upto: int) -> list[tuple[int, int, int]]:
        """Publish; return the remaps (index, old, new) that have to come."""
        seq, size, remaps = self.sequences[handle], self.block_size, []
        if upto <= seq.committed:
            return []
        while len(seq.path) < upto // size:
            index = len(seq.path)
            tokens = tuple(seq.tokens[index * size : (index + 1) * size])
            own, parent = seq.private.pop(0), seq.end
            entry = parent.children.get(tokens)
            if entry is None:
                entry = parent.children[tokens] = Entry(own, parent, tokens, dead=parent.dead)
                if entry.dead:
                    self.dead.append(entry)
            else:
                remaps.append((index, own, entry.block))
            seq.path.append(entry)
        seq.committed = upto
        self.retire([old for _, old, _ in remaps], {w: step + 1 for w, step in self.workers.items()}, [])
        if seq.source is not None:
            seq.source, source = None, seq.source
            self.tick += 1
            self.stamp(source.path())
        return remaps

    def stamp(self, path: list[Entry]) -> None:
        """Give the present time to what nobody holds any more of a path, and free what died."""
        for entry in set(path) - self.held():
            entry.stamp = self.tick
        self.bury()

    def bury(self) -> None:
        kept = self.held() | self.fenced()
        gone = [entry for entry in self.dead if entry not in kept]
        for entry in gone:
            assert entry.parent is not None
            if entry.parent.children.get(entry.tokens) is entry:
                del entry.parent.children[entry.tokens]
            self.free.add(entry.block)
        self.dead = [entry for entry in self.dead if entry in kept]
        self.forget_empty()

    def retire(self, private: list[int], steps: dict[str, int], path: list[Entry]) -> None:
        steps = {worker: step for worker, step in steps.items() if step > self.workers[worker]}
        if steps:
            self.fences.append(Fence(steps, list(private), list(path)))
        else:
            self.free.update(private)

    def release(self, handle: int, steps: dict[str, int]) -> None:
        self.tick += 1
        seq = self.sequences.pop(handle)
        source = seq.source.path() if seq.source else []
        self.retire(seq.private, steps, [*seq.path, *source])
        if source:
            for entry in set(source) - self.held() - set(seq.path):
                entry.stamp = self.tick
            self.tick += 1
        self.stamp([*seq.path, *source[: len(seq.path)]])

    def rewind(self, handle: int, to: int, steps: dict[str, int]) -> None:
        seq = self.sequences[handle]
        keep = self.blocks_for(to) - len(seq.path)
        self.retire(seq.private[keep:], steps, [])
        seq.private = seq.private[:keep]
        seq.tokens = seq.tokens[:to]
        self.cut_content(seq)
        seq.committed = min(seq.committed, to)

    def cut_content(self, seq: OracleSequence) -> None:
        """Content whose last placeholders went is as long as what is left of it, in blocks not yet committed."""
        size = len(seq.tokens)
        first = len(seq.path) * self.block_size
        for i, token in enumerate(seq.tokens[first:], first):
            if isinstance(token, tuple):
                placeholder, digest, offset, length = token
                seq.tokens[i] = (placeholder, digest, offset, min(length, size - i + offset))

    def fork(self, handle: int, n: int) -> int:
        """Return how many blocks each fork gets, after making room."""
        seq = self.sequences[handle]
        own = self.blocks_for(len(seq.tokens)) - len(seq.path)
        if own:
            self.need_room(n * own)
        return own

    def forked(self, handle: int, fork: int, table: list[int]) -> None:
        seq = self.sequences[handle]
        assert table[: len(seq.path)] == seq.table[: len(seq.path)]
        self.victims(len(table) - len(seq.path) - len(self.free))
        private = table[len(seq.path) :]
        self.take(private)
        self.sequences[fork] = OracleSequence(
            seq.namespace, seq.root, list(seq.tokens), list(seq.path), private, seq.committed, seq.committed
        )

    def invalidate(self, handle: int, index: int) -> tuple[int, list[int]]:
        """Return how many blocks leave the tree and who holds one of them."""
        seq = self.sequences[handle]
        if index >= len(seq.path):
            seq.committed = min(seq.committed, index * self.block_size)
            return 0, []
        bad = seq.path[index]
        holders = []
        for name, other in self.sequences.items():
            if bad in other.path or (other.source is not None and bad in other.source.path()):
                first = index if bad in other.path else len(other.path)
                other.invalid_from = first if other.invalid_from is None else min(other.invalid_from, first)
                holders.append(name)
        for pin_id, (namespace, path) in list(self.pins.items()):
            if bad in path:
                self.pins[pin_id] = (namespace, path[: path.index(bad)])
        self.pins = {pin_id: pin for pin_id, pin in self.pins.items() if pin[1]}
        removed = self.kill([bad, *bad.below()])
        assert bad.parent is not None
        bad.parent.children = {t: e for t, e in bad.parent.children.items() if e is not bad}
        self.bury()
        return removed, holders

    def kill(self, entries: list[Entry]) -> int:
        alive = [entry for entry in entries if not entry.dead]
        for entry in alive:
            entry.dead = True
        self.dead += alive
        return len(alive)

    # -- operations on the pool

    def evict(self, count: int) -> list[int]:
        self.tick += 1
        return self.victims(count)

    def pin(self, pin_id: int, path: list[Entry], namespace: object) -> None:
        self.pins[pin_id] = (namespace, path)

    def unpin(self, pin_id: int) -> None:
        self.tick += 1
        _, path = self.pins.pop(pin_id)
        self.stamp(path)

    def flush(self, namespace: object | None, mode: str) -> None:
        self.tick += 1
        for pin_id in [i for i, (ns, _) in self.pins.items() if namespace in (None, ns)]:
            self.unpin(pin_id)
        scope = [ns for ns in self.roots if namespace in (None, ns)]
        if mode == "drain":
            kept = self.held() | self.fenced()
            while leaves := [e for ns in scope for e in self.roots[ns].below() if not e.children and e not in kept]:
                for entry in leaves:
                    assert entry.parent is not None
                    del entry.parent.children[entry.tokens]
                    self.free.add(entry.block)
            self.forget_empty()
            return
        for ns in scope:
            root = self.roots.pop(ns)
            root.dead = True
            self.kill(list(root.below()))
        self.bury()

    def busy(self, namespace: object | None) -> bool:
        used = any(namespace in (None, seq.namespace) for seq in self.sequences.values())
        fenced = any(namespace in (None, fence.path[0].parent.namespace) for fence in self.fences if fence.path)
        return used or fenced or (namespace is None and bool(self.states()["quarantined"]))

    def complete(self, worker: str, step: int) -> None:
        self.workers[worker] = max(self.workers[worker], step)
        self.settle()

    def remove_worker(self, worker: str) -> None:
        del self.workers[worker]
        self.settle()

    def settle(self) -> None:
        for fence in self.fences:
            fence.steps = {w: s for w, s in fence.steps.items() if w in self.workers and s > self.workers[w]}
            if not fence.steps:
                self.free.update(fence.private)
        self.fences = [fence for fence in self.fences if fence.steps]
        self.bury()
