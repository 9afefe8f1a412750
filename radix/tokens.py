"""Token ids in, packed little-endian uint32 `bytes` out: the form in which the cache stores and compares them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence as SequenceABC

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_TOKEN_ID", "TokensLike", "pack_tokens"]

MAX_TOKEN_ID = 2**32 - 1

TokensLike = bytes | bytearray | memoryview | npt.NDArray[np.integer] | SequenceABC[int]

if sys.byteorder != "little":  # pragma: no cover - array and frombuffer views below rely on it
    raise ImportError("radixpool stores token ids little-endian and runs on little-endian machines only")


def pack_tokens(tokens: TokensLike, *, name: str = "tokens") -> bytes:
    """Pack token ids; `bytes` pass through unchanged. O(len(tokens)), without Python code per token.

    Args:
        tokens: packed little-endian uint32 bytes, a one-dimensional integer ndarray, or a sequence of ints, each
            0 <= id < 2^32.
        name: what to call it in an error.

    Raises:
        TypeError: not token ids at all (floats, strings, a nested list).
        ValueError: an id out of range (the message gives its position), or bytes that end within a token.

    >>> pack_tokens([1, 2])
    b'\\x01\\x00\\x00\\x00\\x02\\x00\\x00\\x00'

    """
    if type(tokens) is bytes or isinstance(tokens, bytes | bytearray | memoryview):
        packed = bytes(tokens)
        if len(packed) & 3:
            raise ValueError(f"{name}: packed uint32 takes 4 bytes a token, {len(packed)} bytes is not a multiple of 4")
        return packed
    if isinstance(tokens, np.ndarray):
        return _pack_array(tokens, name)
    if isinstance(tokens, str):
        raise TypeError(f"{name} must be token ids, not str: tokenize the text first")
    try:
        return array("I", tokens).tobytes()
    except OverflowError:
        position = next(i for i, token in enumerate(tokens) if not 0 <= token <= MAX_TOKEN_ID)
        raise _out_of_range(name, position, tokens[position]) from None
    except TypeError:
        raise TypeError(
            f"{name} must be packed uint32 bytes, an integer ndarray or a sequence of ints, not {_kind(tokens)}"
        ) from None


def _pack_array(tokens: npt.NDArray[np.integer], name: str) -> bytes:
    if tokens.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {tokens.shape}")
    if tokens.dtype == np.uint32:
        return tokens.astype("<u4", copy=False).tobytes()
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{name} must be an array of integers, not of {tokens.dtype}")
    if tokens.size:
        for position in (int(tokens.argmin()), int(tokens.argmax())):
            if not 0 <= tokens[position] <= MAX_TOKEN_ID:
                raise _out_of_range(name, position, int(tokens[position]))
    return tokens.astype("<u4").tobytes()


def _out_of_range(name: str, position: int, value: int) -> ValueError:
    return ValueError(f"{name}[{position}] is {value}: token ids are 0 to {MAX_TOKEN_ID}")


def _kind(tokens: object) -> str:
    """Describe what was passed, down to the first element that is no integer."""
    for i, token in enumerate(tokens if isinstance(tokens, SequenceABC) else ()):
        if not hasattr(type(token), "__index__"):
            return f"{type(tokens).__name__} with {type(token).__name__} at [{i}]"
    return type(tokens).__name__
