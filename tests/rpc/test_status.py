from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from radixpool.radix import errors as radix_errors
from radixpool.rpc import errors as rpc_errors
from radixpool.rpc import status
from radixpool.rpc.status import error_from_status, row_of, status_from_error

EXAMPLES = [
    radix_errors.PoolExhausted(9, allocatable_blocks=4, num_blocks=8),
    radix_errors.PoolExhausted(5, allocatable_blocks=4, num_blocks=8, retry_after_step=7),
    radix_errors.QuotaExceeded("acme", needed_blocks=5, allocatable_blocks=1, max_blocks=3),
    radix_errors.PinBudgetExceeded(needed_blocks=5, pinned_blocks=1, budget_blocks=3),
    radix_errors.UnknownSequence("ab12…"),
    radix_errors.UnknownSequence(4711),
    radix_errors.UnknownPin(4),
    radix_errors.UnknownWorker("w"),
    radix_errors.NotCached(3),
    radix_errors.EventsLost(3, first_seq=9),
    radix_errors.CacheBusy(held_blocks=2, quarantined_blocks=1),
    radix_errors.InvariantViolation("free + cached != num_blocks"),
    rpc_errors.Fenced("epoch 3 is over"),
    rpc_errors.ReplyExpired("request_id 4"),
    rpc_errors.LimitExceeded("clients"),
    rpc_errors.PoolMismatch("head_dim"),
    rpc_errors.PoolUnavailable("no pool"),
    rpc_errors.ManagerUnavailable("nobody"),
    rpc_errors.Draining("shutting down"),
    rpc_errors.Recovering("waits"),
    rpc_errors.SequenceLost("with the manager"),
    radix_errors.RadixPoolError("anything"),
    ValueError("tokens is empty"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_itself(error):
    travelled = status_pb2.Status.FromString(status_from_error(error).SerializeToString())
    arrived = error_from_status(travelled)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_every_cache_error_has_a_row_of_its_own():
    declared = {getattr(radix_errors, name) for name in radix_errors.__all__}
    assert declared <= {row.error for row in status.TABLE}


def test_reasons_name_one_code_each():
    codes: dict[str, set[grpc.StatusCode]] = {}
    for row in status.TABLE:
        codes.setdefault(row.reason, set()).add(row.code)
    assert {reason: len(found) for reason, found in codes.items() if len(found) > 1} == {}


def test_the_guide_names_every_reason():
    guide = Path(__file__).parents[2] / "docs" / "service.md"
    named = set(re.findall(r"[A-Z][A-Z_]+", guide.read_text(encoding="utf-8")))
    assert {row.reason for row in status.TABLE} - {"INTERNAL", "UNAVAILABLE", "INVARIANT_VIOLATION"} <= named


def test_an_unknown_subclass_travels_as_its_base():
    class Special(rpc_errors.Fenced):
        pass

    assert type(error_from_status(status_from_error(Special("x")))) is rpc_errors.Fenced


def test_a_bug_shows_nothing_of_itself():
    secret = KeyError("token 4711")
    assert row_of(secret) is None
    travelled = status_from_error(secret)
    assert travelled.code == grpc.StatusCode.INTERNAL.value[0]
    assert "4711" not in str(travelled)


def test_retry_info_only_where_waiting_can_help():
    def has_retry_info(error: Exception) -> bool:
        details = status_from_error(error).details
        return any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)

    assert has_retry_info(radix_errors.PoolExhausted(5, allocatable_blocks=4, num_blocks=8))
    assert not has_retry_info(radix_errors.PoolExhausted(9, allocatable_blocks=4, num_blocks=8))
    assert not has_retry_info(rpc_errors.Fenced("x"))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, rpc_errors.ManagerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, rpc_errors.ManagerUnavailable),
        (grpc.StatusCode.UNIMPLEMENTED, rpc_errors.ProtocolError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, rpc_errors.LimitExceeded),
        (grpc.StatusCode.UNKNOWN, radix_errors.RadixPoolError),
    ],
)
def test_statuses_that_grpc_itself_makes(code, error):
    assert type(error_from_status(status_pb2.Status(code=code.value[0], message="m"))) is error
