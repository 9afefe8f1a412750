"""The examples hold what this version understands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
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


def test_the_containers_command_is_one_of_ours() -> None:
    text = (EXAMPLES / "Containerfile").read_text().replace("\\\n", "")
    found = dict(re.findall(r"^(ENTRYPOINT|CMD) (\[.*\])$", text, re.MULTILINE))
    command = json.loads(found["ENTRYPOINT"]) + json.loads(found["CMD"])
    assert len(flags(command)) >= 4
    assert flags(command) <= KNOWN_FLAGS


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
