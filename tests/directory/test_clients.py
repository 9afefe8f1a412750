"""The table of clients that may hold blocks."""

import os

import pytest

from radixpool.rpc.directory.clients import ClientTable, KnownClient
from radixpool.rpc.directory.errors import DirectoryNoSpace
from radixpool.rpc.directory.layout import CLIENT_SLOT_BYTES
from radixpool.rpc.directory.processes import ProcessMark

NOBODY = KnownClient(0, None)
ONE, TWO, THREE = (bytes([i]) * 16 for i in range(1, 4))


@pytest.fixture
def region() -> memoryview:
    return memoryview(bytearray(2 * CLIENT_SLOT_BYTES))


def test_a_later_life_knows_who_was_there(region: memoryview) -> None:
    table = ClientTable(region)
    table.add(ONE, NOBODY)
    table.add(TWO, NOBODY)
    table.add(TWO, NOBODY)
    table.discard(ONE)
    table.discard(THREE)
    assert ClientTable(region).client_ids == {TWO}


def test_a_client_is_known_as_it_is_now(region: memoryview) -> None:
    first, second = (ProcessMark(pid, 4026531836, bytes(range(16)), 77) for pid in (5, 6))
    table = ClientTable(region)
    for client in (
        KnownClient(1, first),
        KnownClient(1, first),
        KnownClient(1, second),
        KnownClient(2, second),
        NOBODY,
    ):
        table.add(ONE, client)
        assert ClientTable(region).known() == {ONE: client}
    table.add(TWO, KnownClient(1, first))
    assert ClientTable(region).known() == {ONE: NOBODY, TWO: KnownClient(1, first)}


def test_a_full_table_refuses_and_says_its_limit(region: memoryview) -> None:
    table = ClientTable(region)
    table.add(ONE, NOBODY)
    table.add(TWO, NOBODY)
    with pytest.raises(DirectoryNoSpace, match="at most 2"):
        table.add(THREE, NOBODY)
    table.discard(ONE)
    table.add(THREE, NOBODY)
    assert ClientTable(region).client_ids == {TWO, THREE}


def test_a_full_table_still_knows_its_clients_as_they_are_now(region: memoryview) -> None:
    table = ClientTable(region)
    for client_id in (ONE, TWO):
        table.add(client_id, NOBODY)
    worker = KnownClient(2, ProcessMark(5, 4026531836, bytes(range(16)), 77))
    table.add(ONE, worker)
    assert table.known() == ClientTable(region).known() == {ONE: worker, TWO: NOBODY}
    table.discard(ONE)
    table.add(THREE, NOBODY)
    assert ClientTable(region).client_ids == {TWO, THREE}


def test_a_slot_torn_at_any_byte_is_a_client_nobody_knows(region: memoryview) -> None:
    client = os.urandom(16).replace(b"\0", b"\1")
    ClientTable(region).add(client, NOBODY)
    whole = bytes(region)
    length = len(whole.rstrip(b"\0"))
    for written in range(length):
        region[:] = whole[:written] + bytes(len(whole) - written)
        table = ClientTable(region)
        assert not table.client_ids
        assert table.num_unreadable == (written > 0)
        table.discard_unreadable()
        assert bytes(region) == bytes(len(whole))
        assert table.num_unreadable == 0
