"""The examples hold what this version understands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from radixpool.rpc.cli.serve import serve

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KNOWN_FLAGS = {name for parameter in serve.params for name in (*parameter.opts, *parameter.secondary_opts)}


def flags(command: list[str]) -> set[str]:
    assert "serve" in command
    return {word for word in command if word.startswith("--")}


def test_the_units_command_is_one_of_ours() -> None:
    text = (EXAMPLES / "radixpool.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert flags(shlex.split(command))
    assert flags(shlex.split(command)) <= KNOWN_FLAGS


@pytest.fixture
def container() -> dict[str, list[str]]:
    """The commands of the container file: ENTRYPOINT, CMD, and that of HEALTHCHECK."""
    text = re.sub(r"\s*\\\n\s*", " ", (EXAMPLES / "Containerfile").read_text())
    found = dict(re.findall(r"^(ENTRYPOINT|CMD|HEALTHCHECK).*?(\[.*\])$", text, re.MULTILINE))
    return {name: json.loads(command) for name, command in found.items()}


def test_the_containers_command_is_one_of_ours(container: dict[str, list[str]]) -> None:
    command = container["ENTRYPOINT"] + container["CMD"]
    assert len(flags(command)) >= 4
    assert flags(command) <= KNOWN_FLAGS


def test_the_container_serves_is_healthy_and_stops(container: dict[str, list[str]]) -> None:
    """Its commands as they stand, but for the folders: with an empty environment and no home, as its user has it."""
    with tempfile.TemporaryDirectory(prefix="rp", dir="/tmp") as folder:
        run = Path(folder)

        def here(command: list[str]) -> list[str]:
            assert command[0] == "/opt/radixpool/bin/radixpool"
            words = [word.replace("/run/radixpool", str(run)) for word in command[1:]]
            return [sys.executable, "-m", "radixpool.rpc.cli", *words]

        def is_healthy() -> bool:
            done = subprocess.run(here(container["HEALTHCHECK"]), capture_output=True, check=False, timeout=60, env={})
            return done.returncode == 0

        assert not is_healthy()
        serving = subprocess.Popen(
            here(container["ENTRYPOINT"] + container["CMD"]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"HOME": "/nonexistent"},
        )
        try:
            assert serving.stdout is not None
            assert "manager ready on unix:" in serving.stdout.readline()
            assert is_healthy()
            assert {path.name for path in run.iterdir()} >= {"radixpool.sock", "directory"}
        finally:
            serving.terminate()
            _, errors = serving.communicate(timeout=60)
        assert serving.returncode == 0
        assert all(json.loads(line)["level"] in ("info", "warning") for line in errors.splitlines())
        assert not is_healthy()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "radixpool.service"
    text = (EXAMPLES / "radixpool.service").read_text()
    unit.write_text(text.replace("/opt/radixpool/bin/radixpool", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    mine = [line for line in done.stderr.splitlines() if "radixpool" in line]
    assert mine == []
