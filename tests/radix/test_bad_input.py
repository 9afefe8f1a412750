"""Bad input gives one clear error that names the field, the limit and the value, and changes nothing."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from radixpool.radix import (
    EventLog,
    MediaSpan,
    Namespace,
    RadixCache,
    UnknownSequence,
    UnknownWorker,
    pack_tokens,
)

PACKED = b"\1\0\0\0\2\0\0\0"


@pytest.mark.parametrize(
    "tokens",
    [
        PACKED,
        bytearray(PACKED),
        memoryview(PACKED),
        [1, 2],
        (1, 2),
        range(1, 3),
        array("q", [1, 2]),
        np.array([1, 2], dtype=np.uint32),
        np.array([1, 2], dtype=np.int32),
        np.array([1, 2], dtype=np.int64),
        np.array([1, 9, 2, 9], dtype=np.uint32)[::2],
        [np.int64(1), np.uint8(2)],
    ],
)
def test_all_forms_of_tokens_pack_alike(tokens) -> None:
    assert pack_tokens(tokens) == PACKED


def test_extreme_ids_and_nothing() -> None:
    assert pack_tokens([0, 2**32 - 1]) == b"\0\0\0\0\xff\xff\xff\xff"
    assert pack_tokens(np.array([2**32 - 1])) == b"\xff\xff\xff\xff"
    assert pack_tokens([]) == pack_tokens(np.array([], dtype=np.int64)) == b""


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, -2], ValueError, r"tokens\[1\] is -2: token ids are 0 to 4294967295"),
        ([2**32], ValueError, r"tokens\[0\] is 4294967296"),
        (np.array([1, -2]), ValueError, r"tokens\[1\] is -2"),
        (np.array([3, 2**40]), ValueError, r"tokens\[1\] is 1099511627776"),
        ([1, 2.5], TypeError, r"not list with float at \[1\]"),
        ([[1]], TypeError, r"not list with list at \[0\]"),
        (["1"], TypeError, r"not list with str at \[0\]"),
        ("abc", TypeError, "not str: tokenize the text first"),
        (7, TypeError, "not int"),
        (np.array([1.0]), TypeError, "array of integers, not of float64"),
        (np.array([[1]]), ValueError, "one-dimensional, not of shape"),
        (b"\1\0\0", ValueError, "3 bytes is not a multiple of 4"),
    ],
)
def test_bad_tokens(tokens, error, message) -> None:
    cache = RadixCache(4, 2)
    before = cache.stats()
    for call in (pack_tokens, cache.acquire, cache.match, cache.pin):
        with pytest.raises(error, match=message):
            call(tokens)
    assert cache.stats() == before


@pytest.mark.parametrize("tokens", [b"", [], np.array([], dtype=np.uint32)])
def test_an_empty_prompt_is_no_request(tokens) -> None:
    with pytest.raises(ValueError, match="tokens is empty: a request has at least 1 token"):
        RadixCache(4, 2).acquire(tokens)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks must be at least 1, not 0"),
        ({"num_blocks": 2.0}, TypeError, "num_blocks must be int, not float"),
        ({"num_blocks": True}, TypeError, "num_blocks must be int, not bool"),
        ({"num_blocks": 2**31}, ValueError, "num_blocks must be at most 2147483647, not 2147483648"),
        ({"num_blocks": 4, "block_size": 0}, ValueError, "block_size must be at least 1, not 0"),
        ({"num_blocks": 4, "pin_budget": -1}, ValueError, "pin_budget must be at least 0, not -1"),
        ({"num_blocks": 4, "policy": "best"}, ValueError, "unknown eviction policy 'best'; there are: .*lru"),
        ({"num_blocks": 4, "policy": "lru:k=2"}, ValueError, "lru has no parameter 'k'; it has: none"),
    ],
)
def test_bad_settings(options, error, message) -> None:
    with pytest.raises(error, match=message):
        RadixCache(**options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reserve": -1}, ValueError, "reserve must be at least 0, not -1"),
        ({"reserve": 1.5}, TypeError, "reserve must be int, not float"),
        ({"max_hit": -1}, ValueError, "max_hit must be at least 0, not -1"),
        ({"media": [MediaSpan(1, 0, b"x")]}, ValueError, r"media\[0\] must begin at or after token 0"),
        ({"media": [MediaSpan(1, 3, b"x")]}, ValueError, r"media\[0\] covers tokens 1 to 3, there are 3"),
        ({"media": [MediaSpan(1, 1, b"")]}, TypeError, r"media\[0\].digest must be non-empty bytes"),
        ({"media": [MediaSpan(1, 1, b"x" * 257)]}, ValueError, r"media\[0\].digest must be at most 256 bytes, not 257"),
        (
            {"media": [MediaSpan(0, 2, b"x"), MediaSpan(1, 1, b"y")]},
            ValueError,
            r"media\[1\] must begin at or after token 2",
        ),
    ],
)
def test_bad_arguments_of_acquire(arguments, error, message) -> None:
    cache = RadixCache(4, 2)
    before = cache.stats()
    with pytest.raises(error, match=message):
        cache.acquire([1, 2, 3], **arguments)
    assert cache.stats() == before


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": 1}, TypeError, "namespace.model must be str, not int"),
        ({"adapter_generation": -1}, ValueError, "namespace.adapter_generation must be an integer >= 0, not -1"),
        ({"adapter_generation": "1"}, ValueError, "namespace.adapter_generation must be an integer >= 0, not '1'"),
    ],
)
def test_bad_namespaces(fields, error, message) -> None:
    with pytest.raises(error, match=message):
        Namespace(**fields)


def test_bad_counts_on_a_sequence() -> None:
    cache = RadixCache(4, 2)
    seq = cache.acquire([1, 2, 3])
    for upto in (-1, 4, 1.0, None):
        with pytest.raises(ValueError, match=r"upto must be an integer from 0 to 3, the known tokens, not"):
            cache.commit(seq, upto)
    with pytest.raises(ValueError, match="num_tokens must be at least 0"):
        cache.reserve(seq, -1)
    with pytest.raises(ValueError, match="num_blocks must be at least 0"):
        cache.evict(-1)
    with pytest.raises(ValueError, match="block_id must be an integer from 0 to 3, not 4"):
        cache.block_info(4)


def test_a_released_sequence_is_unknown_to_everything_but_release() -> None:
    cache = RadixCache(4, 2)
    seq = cache.acquire([1, 2, 3])
    cache.release(seq)
    for call in (
        lambda: cache.extend(seq, [1]),
        lambda: cache.reserve(seq, 1),
        lambda: cache.commit(seq, 1),
        lambda: cache.rewind(seq, 1),
        lambda: cache.fork(seq),
        lambda: cache.invalidate(seq, 0),
        lambda: cache.set_retention(seq, 1),
        lambda: cache.sequence(seq.handle),
        lambda: cache.sequence(99),
    ):
        with pytest.raises(UnknownSequence, match="it was released or never existed"):
            call()
    assert seq.state == "released"
    cache.check()


def test_bad_fences_change_nothing() -> None:
    cache = RadixCache(4, 2)
    seq = cache.acquire([1, 2, 3])
    with pytest.raises(UnknownWorker, match="unknown worker 'gpu'"):
        cache.release(seq, after_step={"gpu": 1})
    for fence in (-1, "1", {"gpu": -1}):
        cache.add_worker("gpu") if not cache.workers() else None
        with pytest.raises(ValueError, match="must be a step number >= 0"):
            cache.release(seq, after_step=fence)
    assert not seq.released
    with pytest.raises(ValueError, match="worker 'gpu' is already registered"):
        cache.add_worker("gpu")
    for call in (lambda: cache.complete_step("cpu", 1), lambda: cache.remove_worker("cpu")):
        with pytest.raises(UnknownWorker):
            call()
    assert cache.complete_step("gpu", 3) == cache.complete_step("gpu", 2) == 0
    assert cache.workers() == {"gpu": 3}
    assert (cache.completed_step("gpu"), cache.completed_step("cpu")) == (3, None)
    assert cache.next_step_fence() == {"gpu": 4}


def test_bad_event_logs() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, not 0"):
        EventLog(0)
    with pytest.raises(ValueError, match="seq must be 0 to 0, not 1"):
        EventLog().since(1)
    with pytest.raises(ValueError, match="this cache has no event log"):
        RadixCache(4, 2).snapshot()
