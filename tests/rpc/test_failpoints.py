"""Failpoints: off unless asked for, asked for by name only, and hit once."""

from __future__ import annotations

import importlib
import pkgutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import radixpool.rpc
from radixpool.rpc import failpoints

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_declared_steps_are_those_in_use():
    for module in pkgutil.walk_packages(radixpool.rpc.__path__, "radixpool.rpc."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert failpoints.steps_in_use() == set(failpoints.STEPS)


def test_every_step_is_in_the_documentation():
    page = (REPOSITORY / "docs" / "chaos.md").read_text()
    assert [row for step, row in failpoints.STEPS.items() if f"| `{step}` | {row} |" not in page] == []


def test_a_step_that_is_not_armed_does_nothing():
    assert failpoints.armed_steps() == ()
    step = failpoints.failpoint("commit.findable")
    assert step is failpoints.failpoint("acquire.begun")
    step()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("commit.fundable=kill", "no step is called 'commit.fundable'; steps are: recovery.scanned, "),
        ("commit.findable", "commit.findable must be one of kill, stop, got ''"),
        ("commit.findable=pause", "commit.findable must be one of kill, stop, got 'pause'"),
        ("commit.findable=kill@0", "the passage must be a whole number from 1, got '0'"),
        ("commit.findable=kill@-1", "the passage must be a whole number from 1, got '-1'"),
        ("commit.findable=kill@x", "the passage must be a whole number from 1, got 'x'"),
    ],
)
def test_a_setting_that_is_wrong_says_so(setting, message, monkeypatch):
    monkeypatch.setenv(failpoints.VARIABLE, f"heartbeat.renewed=stop;{setting}")
    with pytest.raises(ValueError) as refusal:
        failpoints.armed_steps()
    assert str(refusal.value).startswith(failpoints.VARIABLE)
    assert message in str(refusal.value)


def passing(setting: str) -> subprocess.CompletedProcess[str]:
    """Pass one step five times, and another one each time, in a process of its own."""
    program = """
    from radixpool.rpc.failpoints import failpoint

    findable, renewed = failpoint("commit.findable"), failpoint("heartbeat.renewed")
    for passage in range(1, 6):
        print(passage, flush=True)
        findable()
        renewed()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {failpoints.VARIABLE: setting}
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment, check=False)


def test_a_process_dies_at_the_passage_that_was_named():
    assert [passing("commit.findable=kill@3").stdout, passing("").stdout] == ["1\n2\n3\n", "1\n2\n3\n4\n5\n"]
    assert passing("commit.findable=kill").returncode == -signal.SIGKILL


def test_a_process_freezes_once():
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from radixpool.rpc.failpoints import failpoint as f; [f('reply.kept')() for _ in 'abc']",
        ],
        env={failpoints.VARIABLE: "reply.kept=stop@2"},
    ) as process:
        while not Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].startswith("T"):
            assert process.poll() is None
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0


def serve(setting: str, listen: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "radixpool.rpc.cli", "serve", "--num-blocks", "8", "--listen", listen]
    environment = {failpoints.VARIABLE: setting}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_serve_refuses_an_unknown_step_and_lists_the_known_ones():
    ended = serve("commit.fundable=kill", "127.0.0.1:0")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no step is called 'commit.fundable'" in ended.stderr
    assert "directory.store.bodies" in ended.stderr


def test_serve_says_that_steps_are_armed():
    ended = serve("manager.bound=kill", "127.0.0.1:0")
    assert ended.returncode == -signal.SIGKILL
    assert ended.stderr == f"radixpool: {failpoints.VARIABLE} is set, which is for tests only: manager.bound\n"


def test_a_manager_beyond_this_machine_refuses_failpoints(monkeypatch):
    from radixpool.rpc.manager import ManagerOptions, server

    monkeypatch.setattr(server, "armed_steps", lambda: ("commit.findable",))
    monkeypatch.setattr(server, "check_listen", lambda _listen, secure: None)
    with pytest.raises(ValueError, match=r"for tests on one machine; unset it to listen on 0\.0\.0\.0:0"):
        server.ManagerServer(ManagerOptions(listen="0.0.0.0:0", num_blocks=8, block_size=4))
