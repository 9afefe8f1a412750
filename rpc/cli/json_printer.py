"""Results as JSON: field names as in the Python API, block ids as lists, states as words."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Any

import click
import numpy as np


def print_json(result: Any) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(plain(result), indent=2, ensure_ascii=False))


def plain(value: Any) -> Any:
    """Return `value` as dicts, lists and scalars. Bytes become hex, enums their value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
