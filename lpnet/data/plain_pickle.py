"""Reads pickles of numpy arrays and plain containers, and nothing else: no name of the file is imported or called.

A pickle is a program (Slaviero, "Sour pickles", 2011): it names functions and the ordinary reader calls them. Here the
few names that numpy arrays need stand for the small functions below, which check what they are given; every other name
is refused. Not even numpy's own array constructors see the file's numbers before they are checked. No communication.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lpnet.errors import DataError


def read_dictionary(path: Path) -> dict[str, Any]:
    """The dictionary that a file holds, keys as text and arrays as numpy arrays. No communication.

    Args:
        path: the file, written by Python 2 or 3, in any protocol.

    Raises:
        DataError: the file cannot be read, asks for a name that is not needed for arrays and plain containers, is
            damaged or truncated, or holds something else than a dictionary; names the file, and the name or the byte.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); check the file and its rights") from error
    stream = io.BytesIO(content)
    try:
        value = _PlainUnpickler(stream, encoding="bytes").load()
    except _Refused as refusal:
        raise DataError(
            f"{path} is refused: {refusal}. Only numbers, text, lists, dictionaries and numpy arrays of numbers are "
            "read; fetch the original file again"
        ) from None
    except Exception as error:  # whatever a damaged program of the reader's little machine can raise
        raise DataError(
            f"{path} is damaged or truncated at or before byte {stream.tell():,} of {len(content):,} ({error}); "
            "fetch it again"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}; expected a dictionary; give the original file")
    return {_text(key): entry.values if isinstance(entry, _Array) else entry for key, entry in value.items()}


class _Refused(Exception):
    """The file asks for something that is not read."""


class _PlainUnpickler(pickle._Unpickler):
    """The reader written in Python: its memo is a dictionary, so that a wild index cannot ask for gigabytes."""

    def find_class(self, module: str, name: str) -> Any:
        """Stand-ins for the names that arrays need."""
        stand_in = _STAND_INS.get((_text(module), _text(name)))
        if stand_in is None:
            raise _Refused(f"it asks for {_text(module)}.{_text(name)}, which is neither imported nor called")
        return stand_in

    def get_extension(self, code: int) -> None:
        """Refuse names by number."""
        raise _Refused(f"it asks for the registered name number {code}, which is neither imported nor called")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to what lies outside of the file."""
        raise _Refused("it refers to an object outside of the file")


class _StandIn:
    """Something the file may call or hand on, but neither look into nor change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _Refused("it tries to change a function")


class _Type:
    """A numpy dtype of plain numbers."""

    __slots__ = ("value",)

    def __init__(self, code: Any, *_: Any) -> None:
        found = re.fullmatch(r"[|<>=]?([biuf])(1|2|4|8)", _text(code))
        if not found:
            raise _Refused(f"it holds an array of type {_text(code)[:40]!r}, which is no type of plain numbers")
        self.value = np.dtype(_text(code))

    def __setstate__(self, state: Any) -> None:
        _, order, *structure = state
        if any(part is not None for part in structure[:3]):
            raise _Refused("it holds an array of records")
        self.value = self.value.newbyteorder(_text(order))  # type: ignore[arg-type]  # a wrong one raises


class _Array:
    """An array; its shape, type and bytes come after it was made."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = np.zeros(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, content = state
        self.values = _values(content, kind, shape, "F" if by_columns else "C")


def _values(content: Any, kind: Any, shape: Any, order: str) -> np.ndarray:
    """An array of checked type and size."""
    if not isinstance(kind, _Type):
        raise _Refused("it holds an array without a type of plain numbers")
    lengths = tuple(int(n) for n in shape)
    if len(lengths) > 8 or min(lengths, default=0) < 0:
        raise ValueError(f"an array has the shape {lengths}")
    if math.prod(lengths) * kind.value.itemsize != len(content):
        raise ValueError(f"an array of shape {lengths} and type {kind.value} has {len(content):,} bytes")
    flat = np.frombuffer(bytes(content), dtype=kind.value)
    return flat.reshape(lengths, order="F" if order == "F" else "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(content: Any, kind: Any, shape: Any, order: Any, *_: Any) -> _Array:
    array = _Array()
    array.values = _values(content, kind, shape, _text(order))
    return array


def _scalar(kind: Any, content: Any) -> Any:
    return _values(content, kind, (), "C").item()


def _latin1(text: str, encoding: Any) -> bytes:
    """How Python 3 writes bytes in old protocols; other encodings could be made to unpack to gigabytes."""
    if _text(encoding) != "latin1":
        raise _Refused(f"it asks for the encoding {_text(encoding)!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """How Python 3 writes empty bytes in old protocols."""
    return b""


def _no_array(*_: Any) -> None:
    raise _Refused("it calls numpy.ndarray")


def _text(word: Any) -> str:
    """Names and keys as text, from Python 2 (bytes) or 3."""
    return word.decode("latin1") if isinstance(word, bytes) else str(word)


_NUMPY: dict[tuple[str, str], Callable[..., Any]] = {
    ("multiarray", "_reconstruct"): _reconstruct,
    ("multiarray", "scalar"): _scalar,
    ("numeric", "_frombuffer"): _from_buffer,
}
_STAND_INS: dict[tuple[str, str], _StandIn] = {
    ("numpy", "ndarray"): _StandIn(_no_array),
    ("numpy", "dtype"): _StandIn(_Type),
    ("_codecs", "encode"): _StandIn(_latin1),
    ("__builtin__", "bytes"): _StandIn(_no_bytes),
    **{
        (f"numpy.{core}.{module}", name): _StandIn(function)
        for core in ("core", "_core")  # before and since numpy 2
        for (module, name), function in _NUMPY.items()
    },
}
