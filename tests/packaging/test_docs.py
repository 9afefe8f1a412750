"""What the pages tell people to type and to click exists: commands, options, scripts, targets, links, files."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from radixpool.rpc.cli import main

REPO = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPO.glob("*.md"), *REPO.glob("docs/*.md")])
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FILE = re.compile(r"^(?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml|proto|c|json|csv|png)$")


def commands(start: str) -> list[object]:
    """The words of every command that begins with `start`, of all pages: lines of code blocks, and code in text."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for _, block in CODE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
        lines += [" ".join(code.split()) for code in INLINE.findall(CODE.sub("", text))]
        for line in lines:
            for part in re.split(r"\s+\|\s+", line.removeprefix("$ ")):
                words = _words(part)
                if words[:1] == [start] and len(words) > 1:
                    found.append(pytest.param(words, id=f"{page.name}: {' '.join(words)}"[:90]))
    assert found, start
    return found


def _words(line: str) -> list[str]:
    """Split a command into words: without assignments before it, redirections, comments and what stands for more."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []  # prose with an apostrophe
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return [word for word in words if word not in ("…", "...") and not re.match(r"\d?>", word)]


def parse(words: list[str]) -> None:
    """Let click parse a command line and run nothing. Raises click.UsageError."""
    command: click.Command = main
    context = None
    while True:
        context = command.make_context(words[0], words[1:], parent=context)
        rest = [*context._protected_args, *context.args]
        if not isinstance(command, click.Group):
            return
        _, found, words = command.resolve_command(context, rest)
        assert found is not None
        command, words = found, [rest[0], *words]


@pytest.mark.parametrize("words", commands("radixpool"))
def test_a_command_line_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for word in words[1:]:
        if re.fullmatch(r"[\w.-]+\.(jsonl?(\.xz)?|toml|pem|key|token)", word):
            (tmp_path / word).touch()
    if len(words) > 2 and words[-1].isupper():
        words = words[:-1]  # `--directory PATH` as the name of an option
        option = words.pop()
        assert option in _options(words), option
    elif len(words) > 2 and words[-1].startswith("--"):
        option = words.pop()  # `radixpool serve --credentials`: the option is spoken of, not used
        assert option in _options(words), option
    else:
        try:
            parse(words)
        except click.MissingParameter as error:
            assert len(words) <= 3, f"{' '.join(words)}: {error.format_message()}"  # a command that is spoken of


def _options(words: list[str]) -> set[str]:
    shown = CliRunner().invoke(main, [*words[1:], "--help"])
    assert shown.exit_code == 0, shown.output
    return set(re.findall(r"--[\w-]+", shown.output))


@pytest.mark.parametrize("words", commands("make"))
def test_a_target_of_make_exists(words: list[str]) -> None:
    targets = [word for word in words[1:] if "=" not in word]
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for variable in (word.partition("=")[0] for word in words[1:] if "=" in word):
        assert re.search(rf"\$[({{](or \$\()?{variable}\b", makefile), variable


@pytest.mark.parametrize("words", commands("python"))
def test_a_script_has_the_options(words: list[str]) -> None:
    if words[1] == "-m":
        pytest.importorskip(words[2].replace("-", "_"))
        return
    script = REPO / words[1]
    source = script.read_text(encoding="utf-8")
    imported = re.findall(r"^from ([\w.]+) import", source, re.MULTILINE)
    paths = [REPO / "src" / f"{name.replace('.', '/')}.py" for name in imported] + [
        script.parent / f"{name}.py" for name in imported
    ]
    sources = [source, *(path.read_text(encoding="utf-8") for path in paths if path.exists())]
    for option in (word for word in words[2:] if word.startswith("--")):
        assert any(f'"{option}"' in source for source in sources), option


def examples() -> list[object]:
    """Python of the pages that is no doctest (those run elsewhere)."""
    blocks = [
        pytest.param(code, id=f"{page.name}: {' '.join(code.split())}"[:70])
        for page in PAGES
        for language, code in CODE.findall(page.read_text(encoding="utf-8"))
        if language == "python" and ">>>" not in code
    ]
    assert blocks
    return blocks


@pytest.mark.parametrize("code", examples())
def test_an_example_imports_what_there_is(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("radixpool"):
            module = importlib.import_module(str(node.module))
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


def references() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        text = CODE.sub("", page.read_text(encoding="utf-8"))
        yield from ((page, target) for target in LINK.findall(text) if "://" not in target)
        yield from ((page, f"/{code}") for code in INLINE.findall(text) if FILE.match(code))


def test_links_and_named_files_exist() -> None:
    tracked = set(
        subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, check=True, text=True).stdout.split()
    )
    broken = []
    for page, target in references():
        name, _, anchor = target.partition("#")
        path = REPO / name[1:] if name.startswith("/") else (page.parent / name if name else page).resolve()
        exists = str(path.relative_to(REPO)) in tracked
        if not exists or (anchor and anchor not in anchors(path)):
            broken.append(f"{page.name}: {target}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
