"""Marks of processes: gone only when that is certain."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from radixpool.rpc.directory.processes import ProcessMark, mark_process
from radixpool.rpc.liveness import own_process


@pytest.fixture
def own() -> ProcessMark:
    me = own_process()
    mark = mark_process(me.pid, namespace=me.namespace, boot_id=me.boot_id)
    assert mark is not None
    return mark


def test_a_living_process_is_not_gone(own: ProcessMark) -> None:
    assert own.pid == os.getpid()
    assert not own.is_gone


def test_an_ended_process_is_gone(own: ProcessMark) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        me = own_process()
        mark = mark_process(process.pid, namespace=me.namespace, boot_id=me.boot_id)
        assert mark is not None
        assert not mark.is_gone
    assert mark.is_gone


def test_a_later_process_with_the_same_number_does_not_pass_for_it(own: ProcessMark) -> None:
    assert replace(own, start_ticks=own.start_ticks - 1).is_gone


def test_a_machine_that_was_started_again_has_no_old_process(own: ProcessMark) -> None:
    assert replace(own, boot_id=bytes(16)).is_gone


def test_what_cannot_be_seen_is_not_gone(own: ProcessMark) -> None:
    assert not replace(own, namespace=own.namespace + 1, pid=2**22).is_gone


@pytest.mark.parametrize(
    "change", [{"pid": 0}, {"pid": 2**22 + 1}, {"namespace": 1}, {"boot_id": ""}, {"boot_id": "x"}]
)
def test_what_cannot_be_watched_has_no_mark(own: ProcessMark, change: dict[str, object]) -> None:
    me = own_process()
    given = {"pid": me.pid, "namespace": me.namespace, "boot_id": me.boot_id, **change}
    assert mark_process(given.pop("pid"), **given) is None
