"""One option: its type, default, limits and help, as metadata of a dataclass field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeAlias

Value: TypeAlias = str | int | float | bool
Check: TypeAlias = Callable[[Any], object]
"""Raises ValueError when a value cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Everything there is to say about one option.

    Attributes:
        section: table of the file that it stands in.
        name: key in that table.
        kind: type of its value; an int is accepted where a float is wanted.
        default: value when nothing is given.
        help: one sentence for `--help`, the rendered file and the docs.
        low, high: limits of a number, inclusive.
        choices: the only strings allowed, when not empty.
        flag: the command-line flag.
        env: environment variable that stands between flag and file; empty for none.
        check: further test of a non-empty value.

    """

    section: str
    name: str
    kind: type[Value]
    default: Value
    help: str
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    flag: str
    env: str
    check: Check | None

    @property
    def key(self) -> str:
        """Section and name as one dotted key."""
        return f"{self.section}.{self.name}"

    @property
    def wanted(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "a string"
        noun = "an integer" if self.kind is int else "a number"
        return noun if self.low is None else f"{noun} from {self.low:,} to {self.high:,}".replace(",", "")

    def accept(self, value: object, *, where: str) -> Value:
        """Return `value` as this option's type. Raises ValueError that begins with `where`."""
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise ValueError(f"{where} must be {self.wanted}, got {value!r}")
        if self.choices and value not in self.choices:
            raise ValueError(f"{where} must be {self.wanted}, got {value!r}")
        # Written so that a nan is out of range too.
        if self.low is not None and self.high is not None and not self.low <= float(value) <= self.high:
            raise ValueError(f"{where} must be {self.wanted}, got {value!r}")
        if self.check is not None and value != "":
            try:
                self.check(value)
            except ValueError as error:
                raise ValueError(f"{where} is {value!r}: {error}") from None
        return value


def option(
    default: Value,
    text: str,
    *,
    flag: str,
    env: str = "",
    limits: tuple[float, float] | None = None,
    choices: tuple[str, ...] = (),
    check: Check | None = None,
) -> Any:
    """Declare a dataclass field that is an option; section and name come from where it is declared."""
    low, high = limits or (None, None)
    # `kind` and `default` stand here too, because those of a dataclass field are not typed.
    metadata = {
        "kind": type(default),
        "default": default,
        "help": text,
        "low": low,
        "high": high,
        "choices": choices,
        "flag": flag,
        "env": env,
        "check": check,
    }
    return field(default=default, metadata=metadata)


def options_of(config: type[Any]) -> Iterator[Option]:
    """Yield every option of a configuration class whose fields are sections."""
    for section in fields(config):
        for item in fields(section_class(section)):
            yield Option(section=section.name, name=item.name, **item.metadata)


def section_class(section: Field[Any]) -> type[Any]:
    """Return the class of one section of a configuration class: what makes its default."""
    kind = section.default_factory
    assert isinstance(kind, type), "every field of a configuration is a section made by its class"
    return kind
