"""Strict reading of YAML into frozen dataclasses: all problems at once, each with its line and its fix.

A document is a dataclass, a section is a dataclass inside it, choices are `Literal`s, and a field's metadata may hold
`min` and `max`. The reader works on YAML's nodes, because loaded values no longer show what matters here: line numbers,
repeated keys, and that `on` was written where the value is now True. `validate` applies the same rules to a document
made in Python.
"""

from __future__ import annotations

import math
import re
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from elude_steer.errors import EludeSteerWarning, SpecError, did_you_mean, type_with_article, with_article

Document = TypeVar("Document")
_TAG = "tag:yaml.org,2002:"
_TYPE_NAMES = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false", None: "null"}
_TRUE = ("true", "yes", "on")
_READ_AS = {"int": "a number", "float": "a number", "timestamp": "a date", "null": "nothing"}
_INVALID = object()
_MAX_LENGTH = 1_000_000  # characters of a document; the longest recipe that somebody wrote has a few thousand
_MAX_NODES = 100_000  # keys and values of a document, counted as often as aliases repeat them
_MAX_PROBLEMS = 50  # lines of an error


def parse_document(kind: type[Document], text: str, source: str = "<text>") -> Document:
    """Read YAML text into a document of the dataclass `kind`; `source` names the text in error messages.

    Raises:
        SpecError: With one line for each problem: its place, what is wrong and how to fix it.
    """
    reader = _Reader(source)
    node = reader.compose(text)
    document = reader.read_section(kind, node, "", 1) if node is not None else None
    if reader.problems:
        more = len(reader.problems) - _MAX_PROBLEMS
        rest = [f"{source}: … and {more} more problems."] if more > 0 else []
        raise SpecError(reader.problems[:_MAX_PROBLEMS] + rest)
    reader.warn_of_removed()
    return cast(Document, document)


def dump_document(document: Any, *, brief: bool = False) -> str:
    """Write a document as YAML; `parse_document` reads it back to an equal one.

    Args:
        document: The document.
        brief: Leave out values that equal their defaults.
    """
    # Everything but ASCII is escaped: unescaped, PyYAML loses some Unicode line breaks when it reads the text back.
    return yaml.safe_dump(_without_defaults(document) if brief else asdict(document), sort_keys=False)


def _without_defaults(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        values = {}
        for item in fields(value):
            current = getattr(value, item.name)
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if current != default:
                values[item.name] = _without_defaults(current)
        return values
    return [_without_defaults(part) for part in value] if isinstance(value, tuple) else value


def validate(document: Document) -> Document:
    """Check a document made in Python by the rules for files.

    Returns:
        An equal document in which whole numbers of float fields are floats and lists are tuples.

    Raises:
        SpecError: With one line for each problem.
    """
    problems: list[str] = []
    checked = _check_value(type(document), document, "", {}, problems)
    if problems:
        raise SpecError(problems)
    return cast(Document, checked)


def _check_value(kind: Any, value: Any, path: str, limits: Mapping[str, Any], problems: list[str]) -> Any:
    """The value as its field's type holds it; adds to `problems` if it is not valid."""
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, kind):
            problems.append(f"{path}: must be {with_article(kind.__name__)}, not {type_with_article(value)}.")
            return value
        values = {}
        for item in fields(kind):
            inner = f"{path}.{item.name}" if path else item.name
            field_kind = _field_types(kind)[item.name]
            values[item.name] = _check_value(field_kind, getattr(value, item.name), inner, item.metadata, problems)
        return value if problems else replace(cast(Any, value), **values)
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            problems.append(f"{path}: must be a list, not {value!r}.")
            return value
        item_kind = get_args(kind)[0]
        return tuple(_check_value(item_kind, v, f"{path}[{i}]", limits, problems) for i, v in enumerate(value))
    kinds = _alternatives(kind)
    # "None" as text is a slip for None: a revision of that name would be looked for.
    result = _INVALID if isinstance(value, str) and value == "None" and None in kinds else _accept(kinds, value, limits)
    if result is _INVALID:
        hint = _suggest_choice(kinds, value) if isinstance(value, str) else ""
        problems.append(f"{path}: must be {_describe(kinds, limits)}, not {value!r}.{hint}")
    return result


def check_keys(
    kind: type, values: Any, path: str, absent: Mapping[str, Sequence[str]] | None = None, section: str = ""
) -> tuple[list[str], list[str]]:
    """Check keys and values that `asdict` made of a document, perhaps of an earlier or a later version.

    Args:
        kind: The document's dataclass.
        values: Its keys and values.
        path: What the document is called in the messages.
        absent: The keys that may be absent, by section; those of the document itself under `""`.
        section: The name of the section that `kind` is.

    Returns:
        The unknown keys, and the other problems.
    """
    if not isinstance(values, Mapping):
        return [], [f"'{path}' must be keys with values"]
    unknown, problems = [], []
    items = {item.name: item for item in fields(kind)}
    for key, value in values.items():
        if key not in items:
            if key not in getattr(kind, "removed", {}) or isinstance(value, Mapping | list):
                unknown.append(f"{path}.{key}")
            continue
        field_kind = _field_types(kind)[key]
        if is_dataclass(field_kind):
            inner = check_keys(cast(type, field_kind), value, f"{path}.{key}", absent, key)
            unknown += inner[0]
            problems += inner[1]
        elif _accept(kinds := _alternatives(field_kind), value, items[key].metadata) is _INVALID:
            problems.append(f"'{path}.{key}' must be {_describe(kinds, items[key].metadata)}")
    optional = (absent or {}).get(section, ())
    problems += [f"it has no '{path}.{name}'" for name in items if name not in values and name not in optional]
    return unknown, problems


def override(document: Document, assignments: Sequence[str]) -> Document:
    """Copy a document with some values replaced, checked as strictly as a file.

    Args:
        document: The document.
        assignments: Such as `clusters.top_k=5000`; the value is read as YAML.
    """
    problems: list[str] = []
    assigned: set[str] = set()
    assignments = [assignments] if isinstance(assignments, str) else assignments
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        path = path.strip()
        reader = _Reader(f"'{assignment}'")
        if not (equals and path and text.strip()):
            reader.note(0, "", "is not an assignment: write section.key=value, such as clusters.top_k=5000.")
        elif path in assigned:
            reader.note(0, path, "given twice: keep one.")
        elif (node := reader.compose(text)) is not None:
            for key in reversed(path.split(".")):
                node = yaml.MappingNode(f"{_TAG}map", [(yaml.ScalarNode(f"{_TAG}str", key), node)])
            document = reader.read_section(type(document), node, "", 0, base=document)
        assigned.add(path)
        problems += reader.problems
        reader.warn_of_removed()
    if problems:
        raise SpecError(problems)
    return document


class _Reader:
    """Reads YAML nodes into dataclasses and collects the problems."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[str] = []
        self.removed: dict[str, list[str]] = {}  # keys of older versions by the reason why they have no effect

    def note(self, line: int, path: str, problem: str) -> None:
        place = f"{self.source}:{line}" if line else self.source
        self.problems.append(": ".join(part for part in (place, path, problem) if part))

    def compose(self, text: str) -> yaml.Node | None:
        """The root node, or None after noting why there is none."""
        if len(text) > _MAX_LENGTH:
            self.note(0, "", f"has {len(text):,} characters; at most {_MAX_LENGTH:,} are read.")
            return None
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            self.note(line, "", f"not YAML: {' '.join(filter(None, (error.context, error.problem)))}.")
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self.note(line, "", f"not YAML: the character {chr(error.character)!r} is not allowed.")
        except RecursionError:
            self.note(1, "", "not YAML: nested too deeply.")
        except (ValueError, OverflowError):  # PyYAML takes any number behind \\U for a character
            self.note(1, "", "not YAML: an escape such as \\U00110000 names no character.")
        else:
            if node is None:
                self.note(1, "", "the document is empty: start from a recipe of `elude-steer recipes list`.")
            elif _count_nodes(node, {}) > _MAX_NODES:
                self.note(1, "", f"has more than {_MAX_NODES:,} keys and values, aliases resolved.")
                return None
            return node
        return None

    def read_section(self, kind: type, node: yaml.Node, path: str, line: int, base: Any = None) -> Any:
        """An instance of the dataclass `kind`; with a `base`, a copy of it with the keys of the node replaced."""
        kinds, items = _field_types(kind), {item.name: item for item in fields(kind)}
        if not isinstance(node, yaml.MappingNode):
            fix = "write its keys below it, indented" if path else f"its keys are {', '.join(items)}"
            self.note(line, path, f"must be keys with values, not {_quote(node)}: {fix}.")
            return None
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, key_line = _node_text(key_node), _line(key_node)
            inner = f"{path}.{key}" if path else key
            if key in getattr(kind, "removed", {}):
                self.removed.setdefault(kind.removed[key], []).append(inner)  # type: ignore[attr-defined]
            elif key not in items:
                hint = did_you_mean(key, list(items)) or f" Its keys are {', '.join(items)}."
                self.note(key_line, inner, f"no such key in {path or 'this document'}.{hint}")
            elif key in lines:
                self.note(key_line, inner, f"given twice, first on line {lines[key]}: keep one.")
            else:
                lines[key] = key_line
                limits = items[key].metadata
                values[key] = self.read_value(kinds[key], value_node, inner, key_line, limits, getattr(base, key, None))
        if base is None:
            self.note_missing([item for item in items.values() if item.name not in lines], kinds, path, line)
        if self.problems:
            return base
        return kind(**values) if base is None else replace(base, **values)

    def warn_of_removed(self) -> None:
        """Say which keys of an older version have no effect any more; the rest of the document counts."""
        parts = []
        for reason, places in self.removed.items():
            verb = (
                "is a key of an older version and has" if len(places) == 1 else "are keys of an older version and have"
            )
            parts.append(f"{', '.join(places)} {verb} no effect: {reason}.")
        if parts:
            warnings.warn(f"{self.source}: {' '.join(parts)}", EludeSteerWarning, stacklevel=4)

    def note_missing(self, absent: Sequence[Field[Any]], kinds: Mapping[str, Any], path: str, line: int) -> None:
        """Note the absent keys that have no default."""
        for item in absent:
            if item.default is not MISSING or item.default_factory is not MISSING:
                continue
            kind, inner = kinds[item.name], f"{path}.{item.name}" if path else item.name
            if is_dataclass(kind):
                self.note_missing(fields(kind), _field_types(cast(type, kind)), inner, line)
            else:
                is_list = get_origin(kind) is tuple
                expected = "a list" if is_list else _describe(_alternatives(kind), item.metadata)
                self.note(line, inner, f"missing, and has no default: give it {expected}.")

    def read_value(self, kind: Any, node: yaml.Node, path: str, line: int, limits: Mapping[str, Any], base: Any) -> Any:
        """The value of a key's node, by the type of its field."""
        if isinstance(kind, type) and is_dataclass(kind):
            return self.read_section(kind, node, path, line, base)
        if get_origin(kind) is tuple:
            if not isinstance(node, yaml.SequenceNode):
                self.note(line, path, f"must be a list, not {_quote(node)}: write [one, two].")
                return None
            item_kind = get_args(kind)[0]
            items = enumerate(node.value)
            return tuple(
                self.read_value(item_kind, item, f"{path}[{i}]", _line(item), limits, None) for i, item in items
            )
        kinds = _alternatives(kind)
        value = _accept(kinds, _node_value(kinds, node), limits)
        if value is _INVALID:
            self.note(line, path, f"must be {_describe(kinds, limits)}, not {_quote(node)}{_fix(kinds, node)}")
            return None
        return value


def _count_nodes(node: yaml.Node, counted: dict[int, float]) -> float:
    """The nodes below a node and itself, where an alias counts as all that it repeats; infinite if it holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in counted:
        counted[id(node)] = math.inf  # until it is known
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        counted[id(node)] = 1 + sum(_count_nodes(part, counted) for part in parts)
    return counted[id(node)]


@lru_cache(maxsize=64)
def _field_types(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _alternatives(kind: Any) -> list[Any]:
    """The types a field takes, with choices as strings and `None` as None: `int | Literal["all"]` -> [int, "all"]."""
    if get_origin(kind) in (Union, types.UnionType):
        return [inner for part in get_args(kind) for inner in _alternatives(part)]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [None if kind is type(None) else kind]


def _accept(kinds: list[Any], value: Any, limits: Mapping[str, Any]) -> Any:
    """A single value as one of the types holds it, or `_INVALID`."""
    if value is None or isinstance(value, bool):
        return value if (None if value is None else bool) in kinds else _INVALID
    if isinstance(value, str):
        return value if value in kinds or (str in kinds and value.strip() and _is_text(value)) else _INVALID
    if isinstance(value, int) and abs(value) >= 10**18:  # longer than what the reader takes for a number
        return _INVALID
    if isinstance(value, int) and int in kinds:
        number: int | float = int(value)
    elif isinstance(value, int | float) and float in kinds and math.isfinite(value):
        number = float(value)
    else:
        return _INVALID
    return number if limits.get("min", number) <= number <= limits.get("max", number) else _INVALID


def _is_text(value: str) -> bool:
    """Whether text can be printed and be the name of a file: it has no NUL and no half of a surrogate pair."""
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _node_value(kinds: list[Any], node: yaml.Node) -> Any:
    """The value that a node stands for, or `_INVALID`."""
    if not isinstance(node, yaml.ScalarNode):
        return _INVALID
    tag, text = node.tag.removeprefix(_TAG), node.value
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() in _TRUE
    if tag == "str":
        # Python's None is plain text to YAML, and a revision of that name would be looked for.
        return _INVALID if text == "None" and None in kinds and not node.style else text
    number = _read_number(tag, text)
    return _INVALID if number is None else number


def _read_number(tag: str, text: str) -> int | float | None:
    """The number that a text writes in plain decimals, or None."""
    digits = text.replace("_", "")
    if tag == "int":
        # YAML 1.1 also reads 010 as 8 and 1:30 as 90, which nobody means.
        return int(digits) if re.fullmatch(r"[-+]?(0|[1-9][0-9]{0,17})", digits) else None
    return _read_float(digits) if tag == "float" else None


def _read_float(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _fix(kinds: list[Any], node: yaml.Node) -> str:
    """The end of a message: what to write instead."""
    if not isinstance(node, yaml.ScalarNode):
        return "."
    tag = node.tag.removeprefix(_TAG)
    return _fix_text(kinds, node) if tag == "str" else _fix_other(kinds, tag, node)


def _fix_text(kinds: list[Any], node: yaml.ScalarNode) -> str:
    """What to write instead of text that is no choice, or that was meant to be something else."""
    text, number, meant = node.value.strip(), _read_float(node.value), ""
    if None in kinds and text == "None":
        meant = "null"
    elif bool in kinds and text.lower() in ("true", "false"):
        meant = text.lower()
    elif number is not None and float in kinds:
        # YAML 1.1 needs a point before the exponent and a sign in it.
        mantissa, e, exponent = text.lower().partition("e")
        point, sign = "" if "." in mantissa else ".0", "" if exponent[:1] in ("+", "-") else "+"
        meant = f"{mantissa}{point}e{sign}{exponent}" if e else mantissa
    elif number is not None and int in kinds and number.is_integer():
        meant = str(int(number))
    if not meant:
        return "." + _suggest_choice(kinds, text)
    written = f'"{text}"' if node.style else text
    return f": YAML reads `{written}` as text: write {meant}."


def _fix_other(kinds: list[Any], tag: str, node: yaml.ScalarNode) -> str:
    """What to write instead of a value that YAML does not read as text."""
    written, number = _node_text(node), _read_float(node.value)
    truth = "true" if node.value.lower() in _TRUE else "false"
    reads = f": YAML reads `{written}` as {truth if tag == 'bool' else _READ_AS.get(tag, 'something special')}"
    if written and (str in kinds or written in kinds):
        return f'{reads}: write "{written}" in quotes.'
    if tag == "bool" and written.lower() != truth:
        return f"{reads}."
    if tag == "int" and int in kinds and _read_number(tag, node.value) is None:
        return ": write it in plain decimal digits."
    if tag == "float" and int in kinds and number is not None and number.is_integer():
        return f": write {int(number)}."
    return "."


def _suggest_choice(kinds: list[Any], text: str) -> str:
    return did_you_mean(text, [kind for kind in kinds if isinstance(kind, str)])


def _describe(kinds: list[Any], limits: Mapping[str, Any]) -> str:
    """The types in words: `a whole number of at least 1, all or null`."""
    low, high = limits.get("min"), limits.get("max")
    bounds = "" if low is None else f" of at least {low}"
    if high is not None:
        bounds = f" of at most {high}" if low is None else f" from {low} to {high}"
    words = [kind if isinstance(kind, str) else _TYPE_NAMES[kind] for kind in kinds]
    words = [f"{word}{bounds}" if word.endswith("number") else word for word in words]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1 if node.start_mark else 0


def _node_text(node: yaml.Node) -> str:
    """What a node says, in one short piece of a line."""
    if isinstance(node, yaml.ScalarNode):
        text = " ".join(node.value.split())
        text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:61])
        return text if len(text) <= 60 else text[:57] + "..."
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys with values"


def _quote(node: yaml.Node) -> str:
    return f"'{_node_text(node)}'" if node.tag == f"{_TAG}str" else _node_text(node) or "nothing"
