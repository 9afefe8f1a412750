"""More rows of scenarios/control.md over the wire: eviction, pins, flushes, replicas, and followers of events.

Block size 2, letters are tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from radixpool.radix import PoolExhausted
from radixpool.radix.errors import CacheBusy, PinBudgetExceeded, UnknownPin
from radixpool.radix.eventindex import EventIndex, ResyncNeeded
from radixpool.radix.events import Removed, Snapshot, Stored
from radixpool.rpc import operations as ops
from radixpool.rpc.client import Client
from radixpool.rpc.events import EventBatch
from radixpool.rpc.inspection import FlushMode
from radixpool.rpc.manager import ManagerServer


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def start(make_server: Callable[..., ManagerServer]) -> Iterator[Callable[[int], Client]]:
    """Start a manager with so many blocks; return a client of it."""
    clients: list[Client] = []

    def make(num_blocks: int = 8) -> Client:
        clients.append(Client(make_server(num_blocks=num_blocks, block_size=2).address))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def keep(client: Client, text: str) -> None:
    with client.acquire(letters(text)) as seq:
        seq.commit(len(text))


def matched(client: Client, text: str) -> int:
    return client.match(letters(text)).cached_tokens


def states(client: Client) -> tuple[int, int, int]:
    cache = client.stats().cache
    return cache.free_blocks, cache.cached_blocks, cache.held_blocks


def test_row_05_a_refused_try_leaves_no_hit_count_behind(start: Callable[..., Client]) -> None:
    client = start(4)
    keep(client, "abcd")
    busy = client.acquire(letters("uvwx"))
    with pytest.raises(PoolExhausted):
        client.acquire(letters("abcdef"))
    assert len(client.evict(2)) == 2
    busy.release()
    with client.acquire(letters("abcdef")) as seq:
        assert seq.cached_tokens == 0


def test_row_16_a_block_that_was_evicted_answers_to_nothing(start: Callable[..., Client]) -> None:
    client = start(4)
    for _ in range(50):
        keep(client, "abcd")
        assert len(client.evict(2)) == 2
        with client.acquire(letters("wxyz")):
            pass
        assert (matched(client, "abcd"), matched(client, "wxyz")) == (0, 0)
    assert states(client) == (4, 0, 0)
    assert client.check().violations == ()


def test_row_18_a_load_that_fails_leaks_nothing(start: Callable[..., Client]) -> None:
    """Blocks that a loader had got and could not fill come back with the release."""
    client = start()
    for _ in range(20):
        with pytest.raises(OSError, match="transfer"), client.acquire(letters("abcdef")) as seq:
            seq.commit(2)
            raise OSError("transfer failed")
    assert states(client) == (7, 1, 0)


def test_row_23_and_28_what_is_held_or_has_something_below_is_not_evicted(start: Callable[..., Client]) -> None:
    client = start()
    keep(client, "abcd")
    keep(client, "abef")
    with client.acquire(letters("ab"), max_hit=2):
        gone = [client.evict(1).tolist(), client.evict(1).tolist()]
        assert all(len(blocks) == 1 for blocks in gone), "the leaves"
        assert client.evict(8).tolist() == []
        assert matched(client, "ab") == 2
    assert len(client.evict(8)) == 1


def test_row_24_holds_stay_right_over_a_split(start: Callable[..., Client]) -> None:
    client = start()
    for first_out in (0, 1):
        holders = [client.acquire(letters("abcd"))]
        holders[0].commit(4)
        holders.append(client.acquire(letters("abxy")))
        block = int(holders[0].block_table[0])
        assert len(client.inspect_block(block).holders) == 2
        holders[first_out].release()
        assert len(client.inspect_block(block).holders) == 1
        holders[1 - first_out].release()
        assert len(client.inspect_block(block).holders) == 0


def test_row_31_and_34_long_chains_and_many_of_them_leave_nothing(start: Callable[..., Client]) -> None:
    client = start(512)
    tokens: list[int] = []
    for depth in range(250):  # a branch at each block
        for last in (1, 2):
            with client.acquire([*tokens, depth, last]) as seq:
                seq.commit(2 * depth + 2)
        tokens += [depth, 1]
    assert client.inspect_tree().total_nodes >= 400
    assert client.match(tokens).cached_tokens == 500
    assert client.check().violations == ()
    assert len(client.evict(512)) == 500
    assert client.inspect_tree().total_nodes <= 1
    assert states(client) == (512, 0, 0)


def test_row_32_a_tail_that_is_half_a_block_is_freed_once(start: Callable[..., Client]) -> None:
    client = start()
    keep(client, "abcde")
    assert states(client) == (6, 2, 0)


def test_row_36_and_38_the_tail_goes_first_and_a_split_leaves_it_cold(start: Callable[..., Client]) -> None:
    client = start()
    for text in ("abcd", "uv", "ab"):
        keep(client, text)
    for left in ((2, 2), (2, 0), (0, 0)):
        client.evict(1)
        assert (matched(client, "abcd"), matched(client, "uv")) == left
    keep(client, "abcdef")
    for length in (4, 2):
        client.evict(1)
        assert matched(client, "abcdef") == length


def test_row_40_what_was_never_committed_pushes_nothing_out(start: Callable[..., Client]) -> None:
    client = start(4)
    keep(client, "abcd")
    with client.acquire(letters("x")):
        pass
    with client.acquire(letters("uvwx")):
        assert matched(client, "abcd") == 4


def test_row_42_a_pin_counts_once_and_ends_once(start: Callable[..., Client]) -> None:
    client = start()
    keep(client, "ab")
    pin = client.pin(letters("ab"))
    assert client.evict(8).tolist() == []
    client.unpin(pin.pin_id)
    with pytest.raises(UnknownPin):
        client.unpin(pin.pin_id)
    assert len(client.evict(8, dry_run=True)) == 1
    assert len(client.evict(8)) == 1


def test_row_43_pins_cannot_take_the_whole_pool(start: Callable[..., Client]) -> None:
    client = start(4)
    keep(client, "abcd")
    client.pin(letters("abcd"))
    keep(client, "efgh")
    with pytest.raises(PinBudgetExceeded):
        client.pin(letters("efgh"))
    with client.acquire(letters("uvwx")) as seq:
        assert len(seq.block_table) == 2


def test_row_44_two_managers_that_hear_the_same_choose_the_same(start: Callable[..., Client]) -> None:
    """The clocks, addresses and handles of the two differ; tables and victims do not."""
    replicas = [start(12), start(12)]
    choice = random.Random(3)
    live: list[tuple] = []
    for _ in range(150):
        if live and choice.random() < 0.5:
            pair = live.pop(choice.randrange(len(live)))
            for seq in pair:
                seq.release()
        text = "".join(choice.choice("ab") for _ in range(choice.randrange(1, 10)))
        outcomes = [acquire_or_refusal(client, text) for client in replicas]
        assert outcomes[0][1] == outcomes[1][1]
        if outcomes[0][0] is not None:
            live.append(tuple(seq for seq, _ in outcomes))
        count = choice.randrange(3)
        assert replicas[0].evict(count).tolist() == replicas[1].evict(count).tolist()


def acquire_or_refusal(client: Client, text: str) -> tuple:
    try:
        seq = client.acquire(letters(text))
    except PoolExhausted as refusal:
        return None, str(refusal)
    seq.commit(len(text))
    return seq, (seq.cached_tokens, seq.block_table.tolist())


def test_row_50_a_flush_while_busy_says_so_or_begins_a_generation(start: Callable[..., Client]) -> None:
    client = start()
    seq = client.acquire(letters("abcd"))
    seq.commit(4)
    with pytest.raises(CacheBusy):
        client.flush(FlushMode.IDLE_ONLY)
    assert matched(client, "abcd") == 4
    assert client.flush(FlushMode.NEW_GENERATION).held_blocks == 2
    assert matched(client, "abcd") == 0
    seq.extend(letters("ef"))
    seq.commit(6)
    seq.release()
    assert states(client) == (8, 0, 0)


def test_row_53_nothing_leaks_through_batches_of_valid_operations(start: Callable[..., Client]) -> None:
    client = start(64)
    choice = random.Random(11)
    handles: list[bytes] = []
    for _ in range(150):
        batch: list[ops.Operation] = [ops.Acquire(letters(random_text(choice))) for _ in range(4)]
        batch += [ops.Extend(handle, letters(random_text(choice))) for handle in handles if choice.random() < 0.3]
        leaving = {handle for handle in handles if choice.random() < 0.5}
        batch += [ops.Release(handle) for handle in leaving]
        results = client.batch(batch)
        handles = [handle for handle in handles if handle not in leaving]
        handles += [result.handle for result in results if isinstance(result, ops.Acquired)]
        client.batch([ops.Commit(handle, 1) for handle in handles])
    client.batch([ops.Release(handle) for handle in handles])
    client.flush(FlushMode.IDLE_ONLY)
    assert states(client) == (64, 0, 0)
    assert client.list_sequences().total_sequences == 0
    assert client.inspect_tree().total_nodes <= 1
    assert client.check().violations == ()


def random_text(choice: random.Random) -> str:
    return "".join(choice.choice("abc") for _ in range(choice.randrange(1, 12)))


# --- followers of the event stream


class Follower:
    """What a router does: one index of one manager, from a snapshot, and from another when something does not fit."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.resyncs = 0
        self._begin()

    def _begin(self) -> None:
        self.index = EventIndex(2)
        self._stream = self._client.subscribe_events()
        self.take(next(self._stream))

    def read(self) -> EventBatch:
        """Return the next batch without taking it in."""
        return next(self._stream)

    def take(self, batch: EventBatch) -> None:
        """Take a batch in; begin anew when it does not fit."""
        if batch.is_snapshot:
            self.index.load(Snapshot(batch.position.seq, batch.events))
            return
        try:
            for event in batch.events:
                self.index.apply(event)
        except ResyncNeeded:
            self.resyncs += 1
            self._stream.close()
            self._begin()

    def close(self) -> None:
        self._stream.close()


@pytest.fixture
def follow() -> Iterator[Callable[[Client], Follower]]:
    followers: list[Follower] = []

    def make(client: Client) -> Follower:
        followers.append(Follower(client))
        return followers[-1]

    yield make
    for follower in followers:
        follower.close()


def test_row_64_what_a_follower_hears_twice_changes_nothing(
    start: Callable[..., Client], follow: Callable[[Client], Follower]
) -> None:
    """It resumes at an older position than it had taken in, and hears Stored and Removed again."""
    client = start()
    follower = follow(client)
    position = next(client.subscribe_events()).position
    keep(client, "abcd")
    client.evict(1)
    batches = [follower.read()]
    while batches[-1].position.seq < position.seq + 2:
        batches.append(follower.read())
    again = client.subscribe_events(position)
    batches += [next(again)]
    again.close()
    assert any(isinstance(event, Removed) for event in batches[-1].events)
    for batch in batches:
        follower.take(batch)
        follower.take(batch)
    assert len(follower.index) == 1
    assert len(follower.index.match(letters("abcd"))) == 1
    assert follower.resyncs == 0


def test_row_64_a_follower_that_lost_a_batch_asks_for_everything_instead_of_guessing(
    start: Callable[..., Client], follow: Callable[[Client], Follower]
) -> None:
    client = start()
    follower = follow(client)
    keep(client, "ab")
    follower.read()  # lost on the way
    keep(client, "abcd")
    batch = follower.read()
    (stored,) = batch.events
    assert isinstance(stored, Stored)
    assert stored.parent >= 0
    follower.take(batch)
    assert follower.resyncs == 1
    for text in ("abcd", "cd"):
        assert 2 * len(follower.index.match(letters(text))) == matched(client, text)


@pytest.mark.parametrize("parent", ["unknown", "itself"])
def test_row_64_a_run_under_an_impossible_parent_is_hung_nowhere(
    start: Callable[..., Client], follow: Callable[[Client], Follower], parent: str
) -> None:
    """As a faulty manager would send it: the follower keeps what it has, and what follows fits again."""
    client = start()
    follower = follow(client)
    keep(client, "ab")
    follower.take(follower.read())
    keep(client, "abcd")
    batch = follower.read()
    (stored,) = batch.events
    own = int(np.frombuffer(stored.blocks, dtype="<i4")[0])
    bad = stored._replace(parent=own if parent == "itself" else 7)
    with pytest.raises(ResyncNeeded, match="its own parent" if parent == "itself" else "unknown"):
        follower.index.apply(bad)
    assert len(follower.index) == 1
    assert follower.index.match(letters("cd")) == [], "not at the root either"
    follower.take(batch)
    assert len(follower.index.match(letters("abcd"))) == 2
    assert follower.resyncs == 0


def test_row_65_what_leaves_one_node_stays_on_the_other(
    start: Callable[..., Client], follow: Callable[[Client], Follower]
) -> None:
    nodes = {"A": start(), "B": start()}
    followers = {name: follow(client) for name, client in nodes.items()}
    for name, client in nodes.items():
        keep(client, "ab")
        followers[name].take(followers[name].read())

    def who_has(text: str) -> set[str]:
        return {name for name, follower in followers.items() if follower.index.match(letters(text))}

    assert who_has("ab") == {"A", "B"}
    nodes["A"].evict(8)
    followers["A"].take(followers["A"].read())
    assert who_has("ab") == {"B"}
    assert matched(nodes["B"], "ab") == 2
    followers.pop("A").close()
    assert who_has("ab") == {"B"}, "node A has left"
    keep(nodes["B"], "abcd")
    followers["B"].take(followers["B"].read())
    assert len(followers["B"].index.match(letters("abcd"))) == 2
