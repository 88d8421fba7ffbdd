"""The keys of a configuration: which there are, what type a value has, and what each means.

All of it comes from the dataclasses in `lpnet.config`: the types from the annotations, through jsonargparse, and the
help from the docstrings. No communication.
"""

from __future__ import annotations

import textwrap
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import yaml

from lpnet.config import MGRIT, Config
from lpnet.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_ADJOINT = "mgrit.adjoint."


@dataclass(frozen=True)
class Entry:
    """A value of one key as the user wrote it, and the place, as an error message starts with it."""

    value: Any
    place: str


@lru_cache
def known_keys() -> dict[str, Any]:
    """Every configuration key, such as "mgrit.levels", and its type. No communication."""
    keys: dict[str, Any] = {}
    for name, hint in get_type_hints(Config).items():
        if is_dataclass(hint):
            keys |= {f"{name}.{key}": of_key for key, of_key in get_type_hints(hint).items()}
        else:
            keys[name] = hint
    del keys["mgrit.adjoint"]
    return keys | {_ADJOINT + key: hint for key, hint in get_type_hints(MGRIT).items() if key != "adjoint"}


@lru_cache
def sections() -> frozenset[str]:
    """Keys that hold other keys, such as "mgrit" and "mgrit.adjoint". No communication."""
    return frozenset(key.rpartition(".")[0] for key in known_keys() if "." in key)


def _nearest(key: str, extra: Sequence[str] = ()) -> str | None:
    """The known key a misspelt one most likely means."""
    keys = [*known_keys(), *sorted(sections()), *extra]
    section, _, name = key.rpartition(".")
    inside = get_close_matches(name, [k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == section], 1)
    if section in sections() and inside:
        return f"{section}.{inside[0]}"
    whole = get_close_matches(key, keys, 1, 0.7)
    if whole:
        return whole[0]
    names = [k.rpartition(".")[2] for k in keys]
    elsewhere = get_close_matches(name, names, 1, 0.7)
    return keys[names.index(elsewhere[0])] if elsewhere else None


def unknown_key(place: str, key: str, prefix: str = "", extra: Sequence[str] = ()) -> ConfigError:
    """The error of a key that does not exist, with the one that was meant. No communication.

    Args:
        place: file and line, with a colon; empty for flags.
        key: the key as given.
        prefix: what is written before a key: -- for flags.
        extra: flags that are known besides the keys.
    """
    nearest = _nearest(key, extra)
    if nearest is not None:
        remedy = f"did you mean {prefix}{nearest}?"
    elif key.rpartition(".")[0] in sections():
        section = key.rpartition(".")[0] + "."
        remedy = "known: " + ", ".join(
            k for k in known_keys() if k.startswith(section) and "." not in k[len(section) :]
        )
    else:
        remedy = "known: " + ", ".join(sorted({k.partition(".")[0] for k in known_keys()}))
    return ConfigError(f"{place}{prefix}{key} is not a known key; {remedy}")


# types


def expected(hint: Any) -> str:
    """A type in words. No communication."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is list:
        return "a list of " + expected(get_args(hint)[0]).partition(" ")[2] + "s"
    if get_args(hint):
        return " or ".join(expected(part) for part in get_args(hint))
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}.get(
        hint, str(hint)
    )


def typed(key: str, entry: Entry, *, from_flag: bool) -> Any:
    """The value in the type of its key. No communication.

    Raises:
        ConfigError: a value of another type.
    """
    hint = known_keys()[key]
    probe = key.replace(_ADJOINT, "mgrit.")  # settings of the adjoint have the types of those they replace
    section, _, name = probe.rpartition(".")
    nullable = get_origin(hint) is not Literal and NoneType in get_args(hint)
    try:
        if from_flag:
            parsed = _parser().parse_args([f"--{probe}={entry.value}"], defaults=False)
        else:
            parsed = _parser().parse_object(
                {section: {name: entry.value}} if section else {name: entry.value}, defaults=False
            )
        value = parsed[probe]
        if value is not None or nullable:
            return value
    except (ArgumentError, TypeError, ValueError, KeyError, AttributeError, RecursionError, yaml.YAMLError):
        pass  # the library's message names Python types; ours follows
    shown = "null" if entry.value is None else repr(entry.value)
    raise ConfigError(f"{entry.place} is {shown if len(shown) < 80 else shown[:80] + '...'}; expected {expected(hint)}")


@lru_cache
def _parser() -> ArgumentParser:
    from jsonargparse import ArgumentParser  # 80 ms: nothing that reads no configuration pays it

    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, default_env=False, add_help=False, usage="")
    parser.add_class_arguments(Config)
    return parser


def help_text() -> str:
    """All configuration keys with meaning, type and default, from the docstrings. No communication."""
    from docstring_parser import parse as parse_docstring

    lines: list[str] = []

    def add(key: str, text: str) -> None:
        lines.extend([f"  --{key}", *textwrap.wrap(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)])

    parts = {name: getattr(Config(), name) for name, hint in get_type_hints(Config).items() if is_dataclass(hint)}
    for section, default in {"": Config(), **parts}.items():
        doc = parse_docstring(type(default).__doc__ or "")
        meanings = {parameter.arg_name: " ".join((parameter.description or "").split()) for parameter in doc.params}
        lines.append(f"\n{doc.short_description}")
        for name, value in asdict(default).items():
            key = f"{section}.{name}" if section else name
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            if key in known_keys():
                add(key, f"{meanings.get(name, '')} ({expected(known_keys()[key])}; default {shown})".strip())
            elif f"{key}." == _ADJOINT:
                add(f"{key}.KEY", meanings[name])
    return "\n".join(lines) + "\n"
