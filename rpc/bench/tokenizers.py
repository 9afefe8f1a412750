"""Turn text into token ids for the trace readers: bytes, or a Hugging Face tokenizer where one is at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Tokenize = Callable[[str], list[int]]


def utf8_bytes(text: str) -> list[int]:
    """Return the text's UTF-8 bytes as token ids: no model needed, about four bytes to a model's token; O(len).

    >>> utf8_bytes("ab")
    [97, 98]
    """
    return list(text.encode())


def load_tokenizer(name: str) -> Tokenize:
    """Return the tokenizer called `name`: "bytes", a `tokenizer.json` file, or a directory or hub name.

    Raises `ValueError` naming the option when it cannot be loaded.
    """
    if name == "bytes":
        return utf8_bytes
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(f"tokenizer {name!r} needs the package tokenizers: pip install tokenizers") from error
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded = Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"tokenizer {name!r}: {error}") from error

    def tokenize(text: str) -> list[int]:
        return list(loaded.encode(text, add_special_tokens=False).ids)

    return tokenize
