"""Write a configuration as a commented TOML file, and the reference of all options as Markdown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from radixpool.rpc.config.load import OPTIONS
from radixpool.rpc.config.option import Option, Value, section_class
from radixpool.rpc.config.schema import ServeConfig

COMMENT_WIDTH: Final = 100


def render_toml(config: ServeConfig) -> str:
    """Return a file that `load_config` reads back as `config`: every option with its help and its flag."""
    return "\n".join(_toml_lines(config)) + "\n"


def _toml_lines(config: ServeConfig) -> Iterator[str]:
    for index, section in enumerate(fields(config)):
        if index:
            yield ""
        yield f"# {section_class(section).__doc__}"
        yield f"[{section.name}]"
        values = getattr(config, section.name)
        for item in (item for item in OPTIONS.values() if item.section == section.name):
            yield from _comment(item)
            yield f"{item.name} = {_toml_value(getattr(values, item.name))}"


def _comment(item: Option) -> Iterator[str]:
    limit = "" if item.wanted in {"a string", "true or false"} else f" {item.wanted[0].upper()}{item.wanted[1:]}."
    yield from (
        f"# {line}"
        for line in textwrap.wrap(f"{item.help}{limit} ({item.flag})", COMMENT_WIDTH, break_on_hyphens=False)
    )


def _toml_value(value: Value) -> str:
    # A JSON string is a TOML basic string, DEL apart; JSON's true, false and numbers are TOML's.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def render_markdown() -> str:
    """Return a table of every option: key, flag, default, allowed values, meaning."""
    lines = ["| key | flag | default | allowed | meaning |", "| --- | --- | --- | --- | --- |"]
    for item in OPTIONS.values():
        default = "empty" if item.default == "" else f"`{_toml_value(item.default)}`"
        lines.append(f"| `{item.key}` | `{item.flag}` | {default} | {item.wanted} | {item.help} |")
    return "\n".join(lines) + "\n"
