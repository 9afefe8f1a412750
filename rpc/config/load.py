"""Read a TOML file, put flags over it, check everything, and return a ServeConfig."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from radixpool.rpc.config.checks import check_together
from radixpool.rpc.config.errors import ConfigError
from radixpool.rpc.config.option import Option, Value, options_of, section_class
from radixpool.rpc.config.schema import ServeConfig

MAX_FILE_BYTES: Final = 1 << 20
OPTIONS: Final = {item.key: item for item in options_of(ServeConfig)}
"""Every option by its dotted key, in the order of the sections."""


def load_config(path: Path | str | None = None, *, flags: Mapping[str, Value] | None = None) -> ServeConfig:
    """Return the configuration of the file at `path` with `flags` (by dotted key) over it.

    Raises ConfigError that names the file or flag, the option, what it must be and what it is.
    """
    values: dict[str, Value] = {}
    if path is not None:
        values.update(_file_values(Path(path)))
    for key, value in (flags or {}).items():
        values[key] = _accept(OPTIONS[key], value, where=OPTIONS[key].flag)
    config = _assemble(values)
    check_together(config)
    return config


def _file_values(path: Path) -> dict[str, Value]:
    sections = {key.partition(".")[0] for key in OPTIONS}
    values: dict[str, Value] = {}
    for section, table in _parse(path).items():
        if section not in sections:
            raise ConfigError(f"{path}: unknown section [{section}]{_closest(section, sections)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} must be a section [{section}], got {table!r}")
        for name, value in table.items():
            key = f"{section}.{name}"
            if key not in OPTIONS:
                raise ConfigError(f"{path}: unknown key {key}{_closest(key, OPTIONS)}")
            values[key] = _accept(OPTIONS[key], value, where=f"{path}: {key}")
    return values


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: a configuration has at most {MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _accept(item: Option, value: object, *, where: str) -> Value:
    try:
        return item.accept(value, where=where)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _closest(wrong: str, known: Mapping[str, object] | set[str]) -> str:
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"


def _assemble(values: Mapping[str, Value]) -> ServeConfig:
    sections = {}
    for section in fields(ServeConfig):
        kind = section_class(section)
        given = {
            item.name: values[f"{section.name}.{item.name}"]
            for item in fields(kind)
            if f"{section.name}.{item.name}" in values
        }
        sections[section.name] = kind(**given)
    return ServeConfig(**sections)
