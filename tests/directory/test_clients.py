"""The table of clients that may hold blocks."""

import os

import pytest

from radixpool.rpc.directory.clients import ClientTable
from radixpool.rpc.directory.errors import DirectoryNoSpace
from radixpool.rpc.directory.layout import CLIENT_SLOT_BYTES
from radixpool.rpc.directory.processes import ProcessMark

ONE, TWO, THREE = (bytes([i]) * 16 for i in range(1, 4))


@pytest.fixture
def region() -> memoryview:
    return memoryview(bytearray(2 * CLIENT_SLOT_BYTES))


def test_a_later_life_knows_who_was_there(region: memoryview) -> None:
    table = ClientTable(region)
    table.add(ONE)
    table.add(TWO)
    table.add(TWO)
    table.discard(ONE)
    table.discard(THREE)
    assert ClientTable(region).client_ids == {TWO}


def test_a_client_is_known_with_its_present_process(region: memoryview) -> None:
    first, second = (ProcessMark(pid, 4026531836, bytes(range(16)), 77) for pid in (5, 6))
    table = ClientTable(region)
    table.add(ONE, first)
    table.add(ONE, first)
    assert ClientTable(region).processes() == {ONE: first}
    table.add(ONE, second)
    assert ClientTable(region).processes() == {ONE: second}
    table.add(ONE)
    assert ClientTable(region).processes() == {ONE: None}
    table.add(TWO, first)
    assert ClientTable(region).processes() == {ONE: None, TWO: first}


def test_a_full_table_refuses_and_says_its_limit(region: memoryview) -> None:
    table = ClientTable(region)
    table.add(ONE)
    table.add(TWO)
    with pytest.raises(DirectoryNoSpace, match="at most 2"):
        table.add(THREE)
    table.discard(ONE)
    table.add(THREE)
    assert ClientTable(region).client_ids == {TWO, THREE}


def test_a_slot_torn_at_any_byte_is_a_client_nobody_knows(region: memoryview) -> None:
    client = os.urandom(16).replace(b"\0", b"\1")
    ClientTable(region).add(client)
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
