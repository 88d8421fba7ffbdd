"""A configuration read from a YAML file and from command-line flags, with errors that name key, place and remedy.

YAML is read as YAML 1.2 has it: 1e-3 is a number, on and off are words. Neither torch nor MPI. No communication.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from lpnet.config import Config
from lpnet.configkeys import Entry, expected, known_keys, sections, typed, unknown_key
from lpnet.errors import ConfigError, UsageError

UNUSED_SECTIONS: dict[str, tuple[str, ...]] = {
    "serial": ("mgrit", "fdg"),
    "mgrit": ("fdg",),
    "fdg": ("mgrit",),
    "pipeline": ("mgrit",),
}
"""Sections that a method does not read."""

ALIASES = {"resume": "run.resume"}
"""Short flags and the keys they stand for."""

_ADJOINT = "mgrit.adjoint."


@dataclass(frozen=True)
class ParsedConfig:
    """What the user asked for.

    Args:
        config: the run.
        options: flags of the subcommand that are no configuration keys.
        warnings: sections that are set but unused.
    """

    config: Config
    options: Mapping[str, str]
    warnings: tuple[str, ...]


# files


_PLAIN: dict[str, tuple[str, list[str]]] = {
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "int": (r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    "float": (
        r"^(?:[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
    "null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
}
"""Unquoted words that are no text: their form and their first characters."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or YAML 1.2 would take for something else than a text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)
for _class in (_Loader, _Dumper):
    for _tag, (_pattern, _starts) in _PLAIN.items():
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _starts)


def _walk(loader: _Loader, node: yaml.Node, source: str, section: str = "") -> Iterator[tuple[str, Entry]]:
    """The keys below a mapping node and their values."""
    place = f"{source}:{node.start_mark.line + 1}: "
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return  # an empty file or section
    if not isinstance(node, yaml.MappingNode):
        what = f"{section} is a section" if section else "a configuration is a mapping"
        known = ", ".join(
            k[len(section) + 1 :] if section else k for k in known_keys() if k.rpartition(".")[0] == section
        )
        raise ConfigError(f"{place}{what}; expected keys with values ({known}{'' if section else ', and sections'})")
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{source}:{line}: a key is a word; found a list or a mapping")
        key = f"{section}.{key_node.value}" if section else key_node.value
        if key in lines:
            raise ConfigError(f"{source}:{line}: {key} is given twice, first in line {lines[key]}; keep one")
        lines[key] = line
        if key in sections():
            yield from _walk(loader, value_node, source, key)
        elif key not in known_keys():
            raise unknown_key(f"{source}:{line}: ", key)
        else:
            yield key, Entry(_construct(loader, value_node, f"{source}:{line}: {key}"), f"{source}:{line}: {key}")


def _construct(loader: _Loader, node: yaml.Node, place: str) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except yaml.YAMLError:
        raise
    except Exception as error:  # whatever the library meets in a text that does not fit its tag, such as !!int x
        raise ConfigError(f"{place} does not fit its tag {node.tag.rpartition(':')[2]}; leave the tag out") from error


def _read_yaml(text: str, source: str) -> dict[str, Entry]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return dict(_walk(loader, node, source)) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        context = f"{error.context}, " if error.context else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {context}{error.problem}") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start}); expected YAML") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot read the configuration: {reason}") from error


# command line


def _split(arguments: Sequence[str], options: Sequence[str]) -> tuple[list[str], dict[str, Entry], dict[str, str]]:
    """Positional arguments, configuration flags and the subcommand's own flags. Every flag takes one value."""
    positional: list[str] = []
    flags: dict[str, Entry] = {}
    own: dict[str, str] = {}
    rest = iter(arguments)
    for token in rest:
        if not token.startswith("-") or token == "-":
            positional.append(token)
            continue
        flag, equals, value = token.partition("=")
        key = flag[2:] if flag.startswith("--") else flag
        key = ALIASES.get(key, key)
        if key in sections():
            inside = next(known for known in known_keys() if known.startswith(f"{key}."))
            raise ConfigError(f"{flag} is a section; give its keys, such as --{inside}")
        if key not in known_keys() and key not in options:
            raise unknown_key("", key, "--" if flag.startswith("--") else "", [*options, *ALIASES])
        if not equals:
            following = next(rest, None)
            if following is None or following.startswith("--"):
                wanted = expected(known_keys()[key]) if key in known_keys() else "a value"
                raise ConfigError(f"{flag} has no value; expected {wanted}")
            value = following
        if key in options:
            own[key] = value
        else:
            flags[key] = Entry(value, flag)
    return positional, flags, own


def _build(file: Mapping[str, Entry], flags: Mapping[str, Entry]) -> Config:
    """The dataclass tree; flags win over the file."""
    values = {key: typed(key, entry, from_flag=False) for key, entry in file.items()}
    values |= {key: typed(key, entry, from_flag=True) for key, entry in flags.items()}
    hints = get_type_hints(Config)
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        branch = tree
        for part in section.split(".") if section else ():
            branch = branch.setdefault(part, {})
        branch[name] = value
    try:
        return Config(
            **{name: hints[name](**value) if is_dataclass(hints[name]) else value for name, value in tree.items()}
        )
    except (ValueError, TypeError) as error:
        words = str(error).split(maxsplit=1)
        entry = flags.get(words[0]) or file.get(words[0]) if words else None
        raise ConfigError(
            f"{entry.place} {words[1]}" if entry is not None and len(words) > 1 else str(error)
        ) from error


def parse(arguments: Sequence[str], *, options: Sequence[str] = ()) -> ParsedConfig:
    """`[CFG.yaml] --key value ...` as a configuration. No communication.

    Args:
        arguments: the command line after the subcommand; `--key=value` works too.
        options: flags of the subcommand that are no configuration keys, without the dashes.

    Raises:
        UsageError: more than one file.
        ConfigError: a file that cannot be read, an unknown key, a value of the wrong type or out of range.
    """
    positional, flags, own = _split(arguments, options)
    if len(positional) > 1:
        raise UsageError(
            f"expected one configuration file, got {len(positional)}: {', '.join(positional)}; flags are --key value"
        )
    file = _read_yaml(_read_file(positional[0]), positional[0]) if positional else {}
    config = _build(file, flags)
    warnings = []
    for section in UNUSED_SECTIONS[config.method]:
        if section == "mgrit" and config.method == "fdg" and config.parallel.modules is not None:
            continue  # the modules are layer-parallel
        given = [key for key in {**file, **flags} if key.startswith(section + ".")]
        if given:
            shown = ", ".join(given[:3]) + (", ..." if len(given) > 3 else "")
            warnings.append(f"{section} is set ({shown}) but method {config.method} does not use it")
    return ParsedConfig(config, own, tuple(warnings))


def from_yaml(text: str, source: str) -> Config:
    """The configuration in a YAML text. No communication.

    Args:
        text: YAML, as `to_yaml` or a user writes it; missing keys have their defaults.
        source: where it comes from, for error messages.

    Raises:
        ConfigError: invalid YAML, an unknown key, a value of the wrong type or out of range.
    """
    return _build(_read_yaml(text, source), {})


def to_yaml(config: Config) -> str:
    """The configuration with every default spelt out; `from_yaml` gives it back. No communication.

    A section the method does not read is left out where it has its defaults.
    """
    tree = asdict(config)
    default = asdict(Config())
    for section in UNUSED_SECTIONS[config.method]:
        if tree[section] == default[section]:
            del tree[section]
    text: str = yaml.dump(
        tree, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120, allow_unicode=True
    )
    return text


def read_tree(path: str) -> Any:
    """What a YAML file holds, numbers and words as in a configuration. No communication.

    Raises:
        ConfigError: a file that cannot be read, or no YAML.
    """
    try:
        return yaml.load(_read_file(path), _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def tree_to_config(tree: Mapping[str, Any], source: str) -> Config:
    """The configuration that a part of another file holds. No communication.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range.
    """
    return from_yaml(yaml.dump(dict(tree), Dumper=_Dumper), source)
