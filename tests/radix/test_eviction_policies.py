"""What each eviction policy is for, on the smallest cache that shows it. One block a token, letters are tokens."""

from __future__ import annotations

import copy

import pytest

from radixpool.radix import RadixCache
from radixpool.radix.eviction import available_policies, make_policy, parse_policy
from radixpool.radix.eviction.ghosts import GhostList

ALL = sorted(available_policies())


class Flat:
    """A checked cache of one-token blocks."""

    def __init__(self, num_blocks: int, policy: str) -> None:
        self.cache = RadixCache(num_blocks, 1, policy=policy)

    def use(self, *texts: str) -> list[int]:
        """Run each text as one request; return what each hit."""
        return [self.one(text) for text in texts]

    def one(self, text: str) -> int:
        tokens = [ord(c) for c in text]
        seq = self.cache.acquire(tokens, max_hit=len(tokens))
        self.cache.commit(seq, len(tokens))
        self.cache.release(seq)
        self.cache.check()
        return seq.cached_tokens

    def has(self, text: str) -> int:
        """Return how many blocks of `text` are cached, touching nothing."""
        return self.cache.match([ord(c) for c in text]).tokens

    def cached(self, candidates: str) -> str:
        """Return which of the one-block paths are cached."""
        return "".join(c for c in candidates if self.has(c))


def test_every_policy_of_the_list_is_there():
    assert set(ALL) >= {
        "lru",
        "fifo",
        "lfu",
        "slru",
        "2q",
        "arc",
        "s3fifo",
        "sieve",
        "lfu-da",
        "gdsf",
        "w-tinylfu",
        "priority",
        "tail-lru",
        "request",
        "random",
    }


@pytest.mark.parametrize("name", ALL)
def test_each_policy_says_what_it_is_from_where_what_it_costs_and_when_not_to_use_it(name):
    import sys

    doc = sys.modules[available_policies()[name].__module__].__doc__
    assert "When not to use it" in doc
    assert "O(" in doc


def test_parameters_are_read_from_the_name():
    cls, params = parse_policy("s3fifo:small=0.25,promote=1")
    assert cls.name == "s3fifo"
    assert params == {"small": 0.25, "promote": 1}
    assert make_policy("random:seed=7", 10).name == "random"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nosuch", "unknown eviction policy 'nosuch'; there are: 2q, arc"),
        ("s3fifo:big=1", "s3fifo has no parameter 'big'; it has: small, ghost, promote"),
        ("lru:x=1", "lru has no parameter 'x'; it has: none"),
        ("s3fifo:small=lots", "s3fifo:small must be float, not 'lots'"),
        ("random:seed=0.5", "random:seed must be int, not '0.5'"),
        ("s3fifo:small=1.5", "small=1.5"),
        ("s3fifo:promote=0", "promote=0"),
        ("2q:kin=-1", "kin=-1"),
        ("slru:protected=2", "slru:protected must be in 0..1, not 2.0"),
        ("gdsf:double_at=0", "gdsf:double_at must be above 0 blocks, not 0.0"),
        ("w-tinylfu:window=nan", "window=nan"),
        ("priority:ttl=-1", "priority:ttl must be at least 0, not -1"),
        ("tail-lru:limit=4,turn=5", "turn=5, limit=4"),
    ],
)
def test_bad_names_and_parameters_are_one_clear_error(spec, message):
    with pytest.raises(ValueError, match="policy: ") as caught:
        RadixCache(8, 1, policy=spec)
    assert message in str(caught.value)


@pytest.mark.parametrize("policy", ALL)
def test_an_empty_policy_has_no_victim_and_no_candidates(policy):
    made = make_policy(policy, 8)
    assert made.victim() is None
    assert list(made.candidates()) == []


def test_fifo_goes_by_insertion_and_hits_change_nothing():
    flat = Flat(3, "fifo")
    flat.use("a", "b", "c", "a", "a", "d")
    assert flat.cached("abcd") == "bcd"


def test_lfu_keeps_what_was_used_most_and_breaks_ties_by_age():
    flat = Flat(3, "lfu")
    flat.use("a", "a", "b", "b", "c", "d")
    assert flat.cached("abcd") == "abd"
    flat.use("e")
    assert flat.cached("abde") == "abe"


def test_lfu_counts_each_part_of_a_path():
    flat = Flat(4, "lfu")
    flat.use("abc", "ab", "x", "y")  # c, used once, goes before a and b, and x before them too
    assert flat.has("abc") == 2
    assert flat.use("z") == [0]
    assert flat.has("ab") == 2


def test_lfu_da_lets_what_was_hot_long_ago_go():
    plain, ageing = Flat(2, "lfu"), Flat(2, "lfu-da")
    for flat in (plain, ageing):
        flat.use(*"aaaa", *"bcdefghij")
    assert plain.has("a") == 1
    assert ageing.has("a") == 0


def test_gdsf_gives_up_the_cheap_shallow_block_before_the_dear_deep_one():
    deep, shallow = Flat(8, "gdsf:double_at=1"), Flat(8, "lru")
    for flat in (deep, shallow):
        flat.use("abcdef", "x", "y", "z")
    assert deep.has("abcdef") == 6  # its tail costs seven times what x costs
    assert deep.cached("xyz") == "yz"
    assert shallow.has("abcdef") == 5


def test_slru_protects_what_was_hit_once():
    flat = Flat(4, "slru:protected=0.5")
    flat.use("a", "a", "b", *"cdefgh")
    assert flat.has("a") == 1
    assert flat.has("b") == 0


def test_slru_lets_the_oldest_protected_fall_back():
    flat = Flat(4, "slru:protected=0.5")
    flat.use(*"aabbcc", "d", "e")  # a falls back when c is protected, and goes first of all
    assert flat.cached("abcde") == "bcde"


def test_2q_takes_back_what_its_ghosts_remember():
    flat = Flat(4, "2q:kin=0.5,kout=2")
    flat.use(*"abcde")  # a left the FIFO for the ghosts
    assert flat.has("a") == 0
    flat.use("a", *"fghi")  # now it is in the LRU, and one-time blocks pass through the FIFO
    assert flat.has("a") == 1


def test_2q_hits_in_the_fifo_change_nothing():
    flat = Flat(4, "2q:kin=0.5,kout=0")
    flat.use("a", "a", "a", *"bcde")
    assert flat.has("a") == 0


def test_arc_moves_its_border_towards_what_comes_back():
    flat = Flat(4, "arc")
    flat.use(*"aabb", *"cdef")  # a and b are used often, c and d became ghosts of those used once
    policy = flat.cache._policy
    before = policy._target
    flat.use("c")
    assert policy._target > before


def test_arc_survives_a_scan_that_lru_does_not():
    arc, lru = Flat(4, "arc"), Flat(4, "lru")
    for flat in (arc, lru):
        flat.use(*"aabb", *"cdefghi")
    assert lru.cached("ab") == ""
    assert arc.cached("ab") == "ab"


def test_s3fifo_promotes_what_was_hit_twice_and_remembers_the_rest():
    flat = Flat(4, "s3fifo:small=0.5")
    flat.use("a", "a", "a", *"bcde")
    assert flat.has("a") == 1  # went on to the main queue
    assert flat.has("b") == 0
    flat.use("b", *"fghi")  # its ghost takes it to the main queue at once
    assert flat.has("b") == 1


def test_sieve_spares_the_visited_once_and_its_hand_goes_on():
    flat = Flat(3, "sieve")
    flat.use("a", "b", "c", "a", "d")  # the hand clears a and takes b
    assert flat.cached("abcd") == "acd"
    flat.use("e")  # it goes on at c
    assert flat.cached("acde") == "ade"


def test_sieve_starts_over_at_the_oldest_after_the_newest_went():
    flat = Flat(3, "sieve")
    flat.use("a", "b", "c", "a", "b", "d")  # a and b are cleared, c was the newest and goes
    flat.use("e")
    assert flat.cached("abde") == "bde"


def test_w_tinylfu_admits_only_what_is_used_more_than_what_it_replaces():
    flat = Flat(10, "w-tinylfu:window=0.1,protected=0.5")
    flat.use(*"aaabbbcccdddeeefffggghhhiii", *"stuvwxyz")
    assert flat.cached("abcdefghi") == "abcdefghi"
    assert flat.cached("stuvwxyz") == "z"


def uses(flat: Flat, text: str) -> int:
    """Return the count that the policy has for the run of the one-block path `text`."""
    policy = flat.cache._policy
    return next(policy._uses(run.data) for run in policy.candidates() if run.key == ord(text).to_bytes(4, "little"))


def test_w_tinylfu_remembers_the_uses_of_what_it_evicted():
    flat = Flat(4, "w-tinylfu")
    flat.use("x", "x", "x", "a")
    assert uses(flat, "x") == 3
    flat.cache.evict(4)
    flat.use("x", "a", "b")
    assert uses(flat, "x") == 4
    assert uses(flat, "a") == 2
    assert uses(flat, "b") == 1


def test_w_tinylfu_halves_all_counts_after_ten_uses_of_every_block():
    flat = Flat(4, "w-tinylfu")
    flat.use(*["x"] * 9, "y", "y", "y")
    flat.cache.evict(2)  # remembered, too
    flat.use(*["a"] * 28)  # the fortieth use of a block
    policy = flat.cache._policy
    assert policy._epoch == 1
    flat.use("x", "y")
    assert uses(flat, "x") == 9 // 2 + 1
    assert uses(flat, "y") == 3 // 2 + 1


def test_w_tinylfu_starts_without_a_contest():
    flat = Flat(8, "w-tinylfu:window=0.25,protected=0.5")
    flat.use(*"abcde", *"abcd")  # a, b and c left the window of two for want of room in it, and were hit there
    policy = flat.cache._policy
    assert policy._blocks == [2, 0, 3]


def test_random_is_seeded():
    outcomes = set()
    for seed in (1, 1, 2, 3, 4):
        flat = Flat(5, f"random:seed={seed}")
        flat.use(*"abcdefghijklm")
        outcomes.add((seed, flat.cached("abcdefghijklm")))
    assert len(outcomes) == 4
    assert len({cached for _, cached in outcomes}) > 1


def test_request_level_keeps_nothing_of_a_finished_request():
    flat = Flat(8, "request")
    assert flat.use("abc", "abc") == [0, 0]
    assert flat.cache.stats().free_blocks == 8


def test_request_level_shares_among_running_requests():
    cache = RadixCache(8, 1, policy="request")
    first = cache.acquire([1, 2, 3], max_hit=3)
    cache.commit(first, 3)
    second = cache.acquire([1, 2, 4], max_hit=3)
    assert second.cached_tokens == 2
    cache.commit(second, 3)
    cache.release(first)
    assert cache.match([1, 2, 3]).tokens == 2
    cache.release(second)
    cache.check()
    assert cache.stats().free_blocks == 8


def test_priority_keeps_the_first_blocks_of_every_path():
    kept, lru = Flat(6, "priority:protect=2"), Flat(6, "lru")
    for flat in (kept, lru):
        flat.use("abcd", "xyz", "uv")
    assert kept.has("abcd") == 2
    assert kept.has("xyz") == 2
    assert kept.use("abcd")[0] == 2
    assert lru.has("abcd") == 1


def test_priority_lapses_after_its_time_to_live():
    kept, lapsed = Flat(4, "priority:protect=1"), Flat(4, "priority:protect=1,ttl=4")
    for flat in (kept, lapsed):
        flat.use("a", *["bc"] * 8, "bd", "be")
    assert kept.has("a") == 1
    assert lapsed.has("a") == 0


def test_tail_lru_drops_ends_that_are_cheap_to_compute_again():
    flat = Flat(10, "tail-lru:limit=3,turn=1")
    flat.use("abcdef", "uvwx", "yz")  # two blocks may go from each end before anything is slow
    assert flat.has("abcdef") == 4
    flat.use("pq")
    assert flat.has("abcdef") == 4  # it has lost what it can spare; uvwx is next
    assert flat.has("uvwx") == 2


def test_tail_lru_hands_losses_on_to_the_parent():
    flat = Flat(7, "tail-lru:limit=3,turn=1")
    flat.use("abc", "abcde")  # two runs on one path, the lower of two blocks
    flat.use("uvwx")  # needs two: the whole lower run goes, and abc cannot spare more
    flat.use("pq")
    assert flat.has("abcde") == 3
    assert flat.has("uvwx") == 2


@pytest.mark.parametrize("policy", ALL)
def test_a_run_that_grows_under_its_producer_stays_one_entry(policy):
    cache = RadixCache(8, 1, policy=policy)
    seq = cache.acquire([1, 2])
    for token in (3, 4, 5):
        cache.commit(seq, seq.num_tokens)
        cache.extend(seq, [token])
        cache.check()
    cache.commit(seq, 5)
    cache.release(seq)
    cache.check()
    kept = cache.stats().cached_blocks
    assert kept == (0 if policy == "request" else 5)
    assert len(cache.evict(8).blocks) == kept
    assert cache.stats().free_blocks == 8


def test_protected_runs_that_are_held_cannot_fall_back():
    cache = RadixCache(8, 1, policy="slru:protected=0.25")
    for _ in range(2):
        held = [cache.acquire([10 * i + j for j in range(3)], max_hit=3) for i in range(2)]
        for seq in held:
            cache.commit(seq, 3)
        cache.check()
        for seq in held:
            cache.release(seq)
        cache.check()
    again = [cache.acquire([10 * i + j for j in range(3)], max_hit=3) for i in range(2)]
    assert [seq.cached_tokens for seq in again] == [3, 3]
    assert cache._policy._blocks[-1] == 6  # three times its share, all of it held
    cache.release(again[0])
    cache.acquire([10 * 1], max_hit=1)  # a part of the held path is hit: now the released one falls back
    assert cache._policy._blocks[-1] == 3
    cache.check()


def test_w_tinylfu_lets_a_window_run_in_that_is_used_more():
    flat = Flat(6, "w-tinylfu:window=0.34,protected=0.5")
    flat.use(*"abcd", "e", "f", "e", "e")  # e is hit in the window, the others never
    flat.use("g", "h", "i")
    assert flat.has("e") == 1  # it left the window against one used once
    assert flat.cached("abcd") != "abcd"


@pytest.mark.parametrize("policy", [name for name in ALL if name != "request"])  # it keeps nothing to evict
def test_a_dry_run_names_the_victims_and_changes_nothing(policy):
    flat = Flat(30, policy)
    flat.use("abcde", "abxy", "uvw", "uvz", "q")
    before = flat.cache.stats()
    foreseen = flat.cache.evict(6, dry_run=True).blocks.tolist()
    flat.cache.check()
    assert flat.cache.stats() == before
    assert flat.cache.evict(6).blocks.tolist() == foreseen
    flat.cache.check()


def test_ghosts_are_bounded_in_blocks_and_forget_the_oldest():
    ghosts = GhostList(10)
    for i in range(10):
        ghosts.add(bytes([i]), 3)
        ghosts.trim()
        assert ghosts.blocks <= 10
        assert len(ghosts) <= 3
    assert bytes([9]) in ghosts
    assert bytes([0]) not in ghosts
    assert ghosts.pop(bytes([9])) == 3
    assert ghosts.pop(bytes([9])) == 0
    ghosts.add(bytes([8]), 1)  # the same identity again counts once
    assert ghosts.blocks == 4
    assert copy.deepcopy(ghosts).blocks == 4
