"""A simulated deployment around one cache: clients with leases, workers with steps in flight, a memory, a directory.

One seed decides everything. The memory holds, for every slot, which token after which prefix was written there; a step
touches it as late as it can, when it completes. So a block that is handed out too early, or found too early, shows as
wrong content, whatever the cache believes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixpool.radix import (
    EventLog,
    Namespace,
    NotCached,
    PendingPrefix,
    PinBudgetExceeded,
    PoolExhausted,
    QuotaExceeded,
    Sequence,
)
from radixpool.radix.errors import CacheBusy
from radixpool.radix.eventindex import EventIndex
from radixpool.radix.replay import Operation, RecordedCache

from .directory import BLOCK, Directory, DiskFull

LEASE = 60.0
NAMESPACES = (Namespace(), Namespace(tenant="a"), Namespace(tenant="a", adapter="x"))
STEMS = ([0, 0, 1], [0, 0, 1, 1], [1, 0])
Action = tuple[int, int, int, int]


@dataclass(eq=False)
class Task:
    """A sequence as its client and its worker see it."""

    seq: Sequence
    client: int
    busy: tuple[str, int] | None = None  # the step that computes for it
    target: int = 0  # tokens that step computes up to
    copied: bool = False  # its copy orders were carried out


@dataclass
class Step:
    number: int
    tasks: list[Task]
    work: list[Callable[[], None]]


@dataclass
class Simulation:
    """The deployment. `act` takes one action; four numbers, taken modulo whatever there is, decide what it does."""

    seed: int
    policy: str = "lru"
    num_blocks: int = 20

    def __post_init__(self) -> None:
        self.now = 0.0
        self.log: list[Operation] = []
        self.directory = Directory()
        self.cache = RecordedCache(
            self.num_blocks,
            BLOCK,
            policy=self.policy,
            clock=lambda: self.now,
            pin_budget=4,
            persistence=self.directory,
            events=EventLog(100_000),
            sink=self.log.append,
        )
        self.index = EventIndex(BLOCK)
        self.memory: list[list[object]] = [[None] * BLOCK for _ in range(self.num_blocks)]
        self.leases = [LEASE] * 8
        self.tasks: list[Task] = []
        self.steps: dict[str, Step | None] = {}
        self.next_step: dict[str, int] = {}
        self.pins: list[int] = []
        self.start_worker(0, 0, 0)
        if self.seed % 3 == 0:
            self.cache.set_quota("a", guaranteed_blocks=4, max_blocks=14)

    # -- what may happen

    def act(self, action: Action) -> None:
        kind, a, b, c = action
        self.now += 1.0
        happenings = (
            *[self.arrive] * 8, *[self.launch] * 6, *[self.complete] * 6, *[self.grow] * 2, *[self.finish] * 3,
            self.abort, self.heartbeat, self.sweep, self.crash_worker, self.start_worker, self.pin, self.unpin,
            self.fork, self.rewind, self.invalidate, self.evict, self.flush, self.retain, self.break_disk,
        )  # fmt: skip
        happenings[kind % len(happenings)](a, b, c)
        self.prove()

    def arrive(self, a: int, b: int, c: int) -> None:
        """A client sends a prompt."""
        client = a % 8
        if self.leases[client] <= self.now:
            return
        tokens = (STEMS[b % 3] * 6)[: 1 + b % 11]
        if c % 2:
            tokens[-1] = 2 + b % 2
        mode = ("ignore", "report", "wait")[c % 3]
        reserve, partial = c % 4, c % 5 == 0
        try:
            found = self.cache.acquire(
                tokens, namespace=NAMESPACES[b % 3], reserve=reserve, partial=partial, in_flight=mode
            )
        except (PoolExhausted, QuotaExceeded):
            return
        if isinstance(found, PendingPrefix):
            assert any(task.seq.handle == found.producer for task in self.tasks)
            return
        self.tasks.append(Task(found, client))

    def launch(self, a: int, b: int, c: int) -> None:
        """A worker begins a step over some of the sequences that have something to compute."""
        worker = self.some(sorted(self.steps), a)
        if worker is None or self.steps[worker] is not None:
            return
        ready = [t for t in self.tasks if t.busy is None and t.seq.committed_tokens < t.seq.num_tokens]
        step = Step(self.next_step[worker], [], [])
        for task in ready[: 1 + b % 4]:
            task.busy = (worker, step.number)
            left = task.seq.num_tokens - task.seq.committed_tokens
            task.target = task.seq.committed_tokens + (left if c % 3 else 1 + c % left)  # chunked now and then
            step.tasks.append(task)
            step.work.append(self.compute(task))
        self.next_step[worker] += 1
        self.steps[worker] = step

    def compute(self, task: Task) -> Callable[[], None]:
        """Return what the step does to the memory when it completes; the table is the one it was launched with."""
        seq, table, target = task.seq, task.seq.block_table.tolist(), task.target
        done, names = seq.committed_tokens, self.names(seq)
        copies = () if task.copied else seq.copies
        started_valid = seq.invalid_from is None

        def work() -> None:
            for copy in copies:
                self.memory[copy.dst][: copy.num_tokens] = self.memory[copy.src][: copy.num_tokens]
            for i in range(done):
                if started_valid and not seq.released and seq.invalid_from is None:
                    found = self.memory[table[i // BLOCK]][i % BLOCK]
                    assert found == names[i], f"sequence {seq.handle} reads {found} at token {i} instead of {names[i]}"
            for i in range(done, target):
                self.memory[table[i // BLOCK]][i % BLOCK] = names[i]

        return work

    def complete(self, a: int, b: int, c: int) -> None:
        """A worker's step completes; the sequences in it commit."""
        worker = self.some(sorted(self.steps), a)
        step = self.steps.get(worker) if worker else None
        if worker is None or step is None:
            return
        for work in step.work:
            work()
        self.steps[worker] = None
        self.cache.complete_step(worker, step.number)
        for task in step.tasks:
            task.copied = True
            if task.busy == (worker, step.number) and not task.seq.released:
                task.busy = None
                self.commit(task)

    def commit(self, task: Task) -> None:
        try:
            self.cache.commit(task.seq, min(task.target, task.seq.num_tokens))
        except DiskFull:
            return  # computed again by a later step

    def grow(self, a: int, b: int, c: int) -> None:
        """A sequence gets its next tokens, or room for them."""
        task = self.some([t for t in self.tasks if t.busy is None], a)
        if task is not None and task.seq.num_tokens < 14:
            try:
                if c % 3:
                    self.cache.extend(task.seq, [c % 2] * (1 + b % 2))
                else:
                    self.cache.reserve(task.seq, b % 5)
            except (PoolExhausted, QuotaExceeded):
                return

    def finish(self, a: int, b: int, c: int) -> None:
        """A client releases a sequence, in a step or not."""
        task = self.some(self.tasks, a)
        if task is not None:
            self.drop(task)

    def drop(self, task: Task) -> None:
        self.tasks.remove(task)
        fence = dict([task.busy]) if task.busy and task.busy[0] in self.steps else None
        self.cache.release(task.seq, after_step=fence)
        assert self.cache.release(task.seq) == (0, 0)

    def abort(self, a: int, b: int, c: int) -> None:
        """A client dies; its lease runs out later."""
        self.leases[a % 8] = min(self.leases[a % 8], self.now + 5)

    def heartbeat(self, a: int, b: int, c: int) -> None:
        for client, deadline in enumerate(self.leases):
            if deadline > self.now and client != a % 8:
                self.leases[client] = self.now + LEASE

    def sweep(self, a: int, b: int, c: int) -> None:
        """The manager ends expired leases, pins and priorities; a new client takes the dead one's place."""
        for client, deadline in enumerate(self.leases):
            if deadline <= self.now:
                for task in [t for t in self.tasks if t.client == client]:
                    self.tasks.remove(task)
                    self.cache.release(task.seq, after_step=self.cache.next_step_fence() or None)
                self.leases[client] = self.now + LEASE
        expired = self.cache.expire().pins
        self.pins = [pin for pin in self.pins if pin not in expired]

    def crash_worker(self, a: int, b: int, c: int) -> None:
        """A worker dies within its step: some of its writes were made."""
        worker = self.some(sorted(self.steps), a)
        if worker is None or b % 3:
            return
        step = self.steps.pop(worker)
        if step is not None:
            for work in step.work[: c % (len(step.work) + 1)]:
                work()
            for task in step.tasks:
                if task.busy == (worker, step.number):
                    task.busy = None
        self.cache.remove_worker(worker)

    def start_worker(self, a: int, b: int, c: int) -> None:
        worker = f"w{a % 2}"
        if worker not in self.steps:
            self.cache.add_worker(worker, completed_step=self.next_step.get(worker, 0) - 1)
            self.next_step.setdefault(worker, 0)
            self.steps[worker] = None

    def pin(self, a: int, b: int, c: int) -> None:
        task = self.some(self.tasks, a)
        if task is not None:
            ttl = None if b % 2 else float(1 + b % 20)
            try:
                pin = self.cache.pin(task.seq.packed_tokens, namespace=task.seq.namespace, ttl=ttl)
            except (NotCached, PinBudgetExceeded):
                return
            self.pins.append(pin.pin_id)

    def unpin(self, a: int, b: int, c: int) -> None:
        pin = self.some(self.pins, a)
        if pin is not None:
            self.pins.remove(pin)
            self.cache.unpin(pin)

    def fork(self, a: int, b: int, c: int) -> None:
        task = self.some([t for t in self.tasks if t.busy is None and t.seq.invalid_from is None], a)
        if task is None or len(self.tasks) > 12:
            return
        if task.seq.copies and not task.copied:
            return  # its own copy was not made yet
        try:
            result = self.cache.fork(task.seq, 1 + b % 2)
        except (PoolExhausted, QuotaExceeded):
            return
        for copy in result.copies:  # before the next write to either
            self.memory[copy.dst][: copy.num_tokens] = self.memory[copy.src][: copy.num_tokens]
        forks = [self.cache.sequence(handle) for handle in result.handles]
        self.tasks += [Task(fork, task.client, copied=True) for fork in forks]

    def rewind(self, a: int, b: int, c: int) -> None:
        task = self.some([t for t in self.tasks if t.busy is None], a)
        if task is not None:
            lowest = task.seq.committed_tokens
            self.cache.rewind(task.seq, lowest + b % (task.seq.num_tokens - lowest + 1))

    def invalidate(self, a: int, b: int, c: int) -> None:
        """A block's data turns out bad; its holders give up."""
        task = self.some([t for t in self.tasks if t.busy is None], a)
        if task is None or c % 4 or not task.seq.num_blocks:
            return
        result = self.cache.invalidate(task.seq, b % task.seq.num_blocks)
        self.forget_dead_pins()
        for holder in [t for t in self.tasks if t.seq.handle in result.holders]:
            self.drop(holder)

    def evict(self, a: int, b: int, c: int) -> None:
        foreseen = self.cache.evict(a % 4, dry_run=True)
        assert self.cache.evict(a % 4).blocks.tolist() == foreseen.blocks.tolist()

    def flush(self, a: int, b: int, c: int) -> None:
        if c % 3:
            return
        mode = ("idle_only", "drain", "new_generation")[a % 3]
        try:
            self.cache.flush((None, *NAMESPACES)[b % 4], mode=mode)
        except CacheBusy:
            return
        self.forget_dead_pins()

    def forget_dead_pins(self) -> None:
        live = {pin.pin_id for pin in self.cache.pins()}
        self.pins = [pin for pin in self.pins if pin in live]

    def retain(self, a: int, b: int, c: int) -> None:
        task = self.some(self.tasks, a)
        if task is not None:
            ttl = None if b % 2 else float(1 + b % 9)
            self.cache.set_retention(task.seq, 10 * (b % 10), start=c % 5, stop=c % 5 + b % 7, ttl=ttl)

    def break_disk(self, a: int, b: int, c: int) -> None:
        self.directory.refuse = True

    # -- what must hold

    def some(self, things, number: int):
        return things[number % len(things)] if things else None

    def names(self, seq: Sequence) -> list[object]:
        """Return what the memory must hold for each token: itself after its whole prefix."""
        tokens = seq.tokens.tolist()
        return [(seq.namespace, tuple(tokens[: i + 1])) for i in range(len(tokens))]

    def prove(self) -> None:
        """Check the cache, the memory behind everything findable, the directory and the index of events."""
        self.cache.check()
        prefixes: dict[int, tuple[int, ...]] = {}
        findable = set()
        for info in self.cache.nodes():
            before = prefixes.get(info.level - 1, ()) if info.level else ()
            tokens = before + tuple(info.tokens.tolist())
            prefixes[info.level] = tokens
            for i, block in enumerate(info.blocks.tolist()):
                findable.add(block)
                for slot in range(BLOCK):
                    end = (info.start + i) * BLOCK + slot + 1
                    assert self.memory[block][slot] == (info.namespace, tokens[:end]), f"block {block} has bad content"
        stored = {block for block, state in self.directory.state.items() if state == "stored"}
        assert stored == findable, f"the directory has {stored}, findable are {findable}"
        assert len(self.directory.state) == self.num_blocks - self.cache.stats().free_blocks
        for event in self.cache.events.since(self.index.seq):
            self.index.apply(event)
        assert len(self.index) == len(findable)
        for task in self.tasks[:3]:
            found = self.cache.match(task.seq.packed_tokens, namespace=task.seq.namespace).blocks.tolist()
            assert self.index.match(task.seq.packed_tokens, namespace=task.seq.namespace) == found

    def drain(self) -> None:
        """No more faults: everything ends, and the pool is whole."""
        self.directory.refuse = False
        for worker in sorted(self.steps):
            self.complete(sorted(self.steps).index(worker), 0, 0)
        for task in list(self.tasks):
            self.drop(task)
        for pin in self.pins:
            self.cache.unpin(pin)
        for worker in sorted(self.steps):
            self.cache.remove_worker(worker)
        self.prove()
        self.cache.evict(self.num_blocks)
        self.prove()
        stats = self.cache.stats()
        assert stats.free_blocks == stats.num_blocks, f"{stats.num_blocks - stats.free_blocks} blocks leaked"
        assert (stats.num_nodes, stats.num_sequences, stats.num_namespaces, stats.num_pins) == (0, 0, 0, 0)
