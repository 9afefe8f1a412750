"""Logs: one form for every source, bounded, and without secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from radixpool.rpc.metrics.logs import FORBIDDEN, LogFormat, RequestScope, configure_logging, current_request


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_structlog_and_logging_come_out_alike(output: io.StringIO) -> None:
    configure_logging(form=LogFormat.JSON, stream=output)
    structlog.get_logger("a").info("client registered", name="frontend-1", num_clients=3)
    logging.getLogger("grpc").warning("from a library: %d", 7)
    first, second = map(json.loads, output.getvalue().splitlines())
    assert (first["event"], first["name"], first["num_clients"], first["level"]) == (
        "client registered",
        "frontend-1",
        3,
        "info",
    )
    assert (second["event"], second["level"]) == ("from a library: 7", "warning")
    assert set(second) == {"event", "level", "timestamp"}


@pytest.mark.parametrize("form", list(LogFormat))
def test_forbidden_keys_and_bytes_never_come_out(output: io.StringIO, form: LogFormat) -> None:
    configure_logging(form=form, stream=output)
    event = dict.fromkeys(FORBIDDEN, "canary")
    structlog.get_logger().error("something", **event, anything=b"canary", again=memoryview(b"canary"))
    assert "canary" not in output.getvalue()
    assert "6 withheld" in output.getvalue()


@pytest.mark.parametrize("form", list(LogFormat))
def test_exceptions_show_where_but_neither_message_nor_locals(output: io.StringIO, form: LogFormat) -> None:
    configure_logging(form=form, stream=output)

    def fail() -> None:
        prompt = "canary-in-a-local"
        raise KeyError(prompt.replace("local", "message"))

    for log in (structlog.get_logger().exception, logging.getLogger("grpc").exception):
        try:
            fail()
        except KeyError:
            log("it broke")
    text = output.getvalue()
    assert "canary" not in text
    assert text.count("KeyError") == 2
    assert text.count("test_logs.py") >= 2


def test_a_process_names_itself_in_every_line(output: io.StringIO) -> None:
    configure_logging(form=LogFormat.JSON, stream=output, process="worker a")
    structlog.get_logger().info("one")
    logging.getLogger("x").info("two")
    assert [json.loads(line)["process"] for line in output.getvalue().splitlines()] == ["worker a"] * 2


def test_level_filters_both(output: io.StringIO) -> None:
    configure_logging(level="warning", form=LogFormat.JSON, stream=output)
    structlog.get_logger().info("quiet")
    logging.getLogger("x").info("quiet")
    structlog.get_logger().warning("loud")
    assert [json.loads(line)["event"] for line in output.getvalue().splitlines()] == ["loud"]


def test_unknown_level_is_named(output: io.StringIO) -> None:
    with pytest.raises(ValueError, match="log level must be debug, info, warning or error, got 'chatty'"):
        configure_logging(level="chatty", stream=output)


def test_a_line_carries_the_id_of_the_request_being_served(output: io.StringIO) -> None:
    configure_logging(form=LogFormat.JSON, stream=output)
    token = current_request.set(RequestScope([("x-request-id", "abc")]))
    structlog.get_logger().info("inside")
    current_request.reset(token)
    structlog.get_logger().info("outside")
    inside, outside = map(json.loads, output.getvalue().splitlines())
    assert inside["request_id"] == "abc"
    assert "request_id" not in outside


def test_ids_that_the_server_makes_are_stable_and_distinct() -> None:
    first, second = RequestScope(None), RequestScope([("other", "x")])
    assert first.request_id == first.request_id
    assert first.request_id != second.request_id
