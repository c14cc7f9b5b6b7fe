"""YAML text to frozen dataclasses, strictly: every problem is reported at once, each with its line and its cure.

A document is a dataclass, a section is a dataclass inside it, choices are `Literal`s and minima stand in a field's
metadata. The reader works on YAML's nodes, not on loaded values, because loading has already forgotten what matters
here: line numbers, repeated keys, and that `on` was written where the value is now True.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from elude_steer.errors import SpecError, did_you_mean

Document = TypeVar("Document")
_TAG = "tag:yaml.org,2002:"
_WORDS = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false", None: "null"}
_TRUE = ("true", "yes", "on")
_READ_AS = {"int": "a number", "float": "a number", "timestamp": "a date", "null": "nothing"}


def parse_document(kind: type[Document], text: str, where: str = "<text>") -> Document:
    """A document of the dataclass `kind` from YAML text.

    Raises:
        SpecError: With one line for every problem of the text, each with its place and its cure.
    """
    reader = _Reader(where)
    node = reader.compose(text)
    document = reader.section(kind, node, "", 1) if node is not None else None
    if reader.problems:
        raise SpecError(reader.problems)
    return cast(Document, document)


def dump_document(spec: Any, *, brief: bool = False) -> str:
    """The YAML text of a document; `parse_document` reads it back to an equal one.

    Args:
        spec: the document.
        brief: leaves out what is as it would be anyway.
    """
    # Other than ASCII is escaped: unescaped, PyYAML loses some line breaks of Unicode on the way back.
    return yaml.safe_dump(_brief(spec) if brief else asdict(spec), sort_keys=False)


def _brief(value: Any) -> Any:
    """Plain values without those that are defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = {}
        for item in fields(value):
            own = getattr(value, item.name)
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if own != default:
                kept[item.name] = _brief(own)
        return kept
    return [_brief(one) for one in value] if isinstance(value, tuple) else value


def validate(document: Document) -> Document:
    """A document made in Python, held to the same rules as one from a file."""
    for item in fields(cast(Any, document)):
        value, kind = getattr(document, item.name), get_type_hints(type(document))[item.name]
        if isinstance(kind, type) and is_dataclass(kind) and not isinstance(value, kind):
            raise SpecError(f"{item.name} wants a {kind.__name__}, not a {type(value).__name__}.")
    try:
        text = dump_document(document)
    except yaml.YAMLError as error:
        raise SpecError(f"the {type(document).__name__} holds something that is no plain value: {error}") from error
    return parse_document(type(document), text, type(document).__name__)


def override(spec: Document, assignments: Sequence[str]) -> Document:
    """A copy of a document with some values replaced, checked as strictly as its file.

    Args:
        spec: The document.
        assignments: Such as `clusters.top_k=5000`; the value is read as YAML.
    """
    problems: list[str] = []
    seen: set[str] = set()
    assignments = [assignments] if isinstance(assignments, str) else assignments
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        path = path.strip()
        reader = _Reader(f"'{assignment}'")
        if not (equals and path and text.strip()):
            reader.note(0, "", "is not an assignment: write section.key=value, such as clusters.top_k=5000.")
        elif path in seen:
            reader.note(0, path, "given twice: keep one.")
        elif (node := reader.compose(text)) is not None:
            for key in reversed(path.split(".")):
                node = yaml.MappingNode(f"{_TAG}map", [(yaml.ScalarNode(f"{_TAG}str", key), node)])
            spec = reader.section(type(spec), node, "", 0, base=spec)
        seen.add(path)
        problems += reader.problems
    if problems:
        raise SpecError(problems)
    return spec


class _Reader:
    """Reads nodes into dataclasses and collects what is wrong with them."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[str] = []

    def note(self, line: int, path: str, problem: str) -> None:
        place = f"{self.where}:{line}" if line else self.where
        self.problems.append(": ".join(part for part in (place, path, problem) if part))

    def compose(self, text: str) -> yaml.Node | None:
        """The root node, or None after noting why there is none."""
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
        else:
            if node is None:
                self.note(1, "", "the document is empty: start from a recipe of `elude-steer recipes list`.")
            return node
        return None

    def section(self, kind: type, node: yaml.Node, path: str, line: int, base: Any = None) -> Any:
        """An instance of the dataclass `kind`; with a `base`, a copy of it in which only the given keys change."""
        kinds, known = get_type_hints(kind), {item.name: item for item in fields(kind)}
        if not isinstance(node, yaml.MappingNode):
            cure = "write its keys below it, indented" if path else f"its keys are {', '.join(known)}"
            self.note(line, path, f"wants keys and values, not {_shown(node)}: {cure}.")
            return None
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, at = _said(key_node), _line(key_node)
            inner = f"{path}.{key}" if path else key
            if key not in known:
                hint = did_you_mean(key, list(known)) or f" Its keys are {', '.join(known)}."
                self.note(at, inner, f"no such key in {path or 'this document'}.{hint}")
            elif key in lines:
                self.note(at, inner, f"given twice, first on line {lines[key]}: keep one.")
            else:
                lines[key] = at
                minimum = known[key].metadata.get("min")
                values[key] = self.value(kinds[key], value_node, inner, at, minimum, getattr(base, key, None))
        if base is None:
            self.missing([item for item in known.values() if item.name not in lines], kinds, path, line)
        if self.problems:
            return base
        return kind(**values) if base is None else replace(base, **values)

    def missing(self, absent: Sequence[Field[Any]], kinds: dict[str, Any], path: str, line: int) -> None:
        """Note those of the absent keys that have no default."""
        for item in absent:
            if item.default is not MISSING or item.default_factory is not MISSING:
                continue
            kind, inner = kinds[item.name], f"{path}.{item.name}" if path else item.name
            if is_dataclass(kind):
                self.missing(fields(kind), get_type_hints(kind), inner, line)
            else:
                several = get_origin(kind) is tuple
                wanted = "a list" if several else _wanted(_alternatives(kind), item.metadata.get("min"))
                self.note(line, inner, f"missing, and has no default: give it {wanted}.")

    def value(self, kind: Any, node: yaml.Node, path: str, line: int, minimum: float | None, base: Any) -> Any:
        """What a key's node says, by the type of its field."""
        if isinstance(kind, type) and is_dataclass(kind):
            return self.section(kind, node, path, line, base)
        if get_origin(kind) is tuple:
            if not isinstance(node, yaml.SequenceNode):
                self.note(line, path, f"wants a list, not {_shown(node)}: write [one, two].")
                return None
            item_kind = get_args(kind)[0]
            items = enumerate(node.value)
            return tuple(self.value(item_kind, item, f"{path}[{i}]", _line(item), minimum, None) for i, item in items)
        try:
            return _scalar(_alternatives(kind), node, minimum)
        except ValueError as refused:
            self.note(line, path, str(refused))
            return None


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1 if node.start_mark else 0


def _alternatives(kind: Any) -> list[Any]:
    """The types a field takes, its choices as plain strings and `None` as None: `int | Literal["all"]` -> int, all."""
    if get_origin(kind) in (Union, types.UnionType):
        return [inner for part in get_args(kind) for inner in _alternatives(part)]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [None if kind is type(None) else kind]


def _scalar(kinds: list[Any], node: yaml.Node, minimum: float | None) -> str | int | float | bool | None:
    """The value of a node that should be a single value; the ValueError says what it should have been."""
    cure = "."
    if isinstance(node, yaml.ScalarNode):
        tag, text = node.tag.removeprefix(_TAG), node.value
        if tag == "null" and None in kinds:
            return None
        # Python's None is plain text to YAML, and a revision of that name would be looked for in earnest.
        pythons_null = None in kinds and text == "None" and not node.style
        if tag == "str" and (text in kinds or (str in kinds and text.strip() and not pythons_null)):
            return cast(str, text)
        if tag == "bool" and bool in kinds:
            return text.lower() in _TRUE
        number = _number(kinds, tag, text)
        if number is not None and (minimum is None or number >= minimum):
            return number
        cure = _cure_text(kinds, node) if tag == "str" else _cure_other(kinds, tag, node)
    raise ValueError(f"wants {_wanted(kinds, minimum)}, not {_shown(node)}{cure}")


def _number(kinds: list[Any], tag: str, text: str) -> int | float | None:
    """The number a text says, if one is wanted and the text says it in plain decimals."""
    digits = text.replace("_", "")
    # YAML 1.1 also reads 010 as 8 and 1:30 as 90, which nobody means.
    if tag == "int" and re.fullmatch(r"[-+]?(0|[1-9][0-9]{0,17})", digits):
        return int(digits) if int in kinds else float(digits) if float in kinds else None
    return _finite(digits) if tag == "float" and float in kinds else None


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _cure_text(kinds: list[Any], node: yaml.ScalarNode) -> str:
    """What to write instead of text that is no choice, or that was meant to be something else than text."""
    text, number, meant = node.value.strip(), _finite(node.value), ""
    if None in kinds and text == "None":
        meant = "null"
    elif bool in kinds and text.lower() in ("true", "false"):
        meant = text.lower()
    elif number is not None and float in kinds:
        # YAML 1.1 wants a point before the exponent and a sign in it.
        mantissa, e, exponent = text.lower().partition("e")
        point, sign = "" if "." in mantissa else ".0", "" if exponent[:1] in ("+", "-") else "+"
        meant = f"{mantissa}{point}e{sign}{exponent}" if e else mantissa
    elif number is not None and int in kinds and number.is_integer():
        meant = str(int(number))
    if not meant:
        return "." + did_you_mean(text, [kind for kind in kinds if isinstance(kind, str)])
    said = f'"{text}"' if node.style else text
    return f": YAML reads `{said}` as text: write {meant}."


def _cure_other(kinds: list[Any], tag: str, node: yaml.ScalarNode) -> str:
    """What to write instead of a plain value that YAML does not read as text, or reads in a way of its own."""
    said, number = _said(node), _finite(node.value)
    truth = "true" if node.value.lower() in _TRUE else "false"
    reads = f": YAML reads `{said}` as {truth if tag == 'bool' else _READ_AS.get(tag, 'something special')}"
    if said and (str in kinds or said in kinds):
        return f'{reads}: write "{said}" in quotes.'
    if tag == "bool" and said.lower() != truth:
        return f"{reads}."
    if tag == "int" and int in kinds and _number(kinds, tag, node.value) is None:
        return ": write it in plain decimal digits."
    if tag == "float" and int in kinds and number is not None and number.is_integer():
        return f": write {int(number)}."
    return "."


def _wanted(kinds: list[Any], minimum: float | None) -> str:
    words = [kind if isinstance(kind, str) else _WORDS[kind] for kind in kinds]
    if minimum is not None:
        words = [f"{word} of at least {minimum}" if word.endswith("number") else word for word in words]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _said(node: yaml.Node) -> str:
    """What a node says, in one short piece of a line."""
    if isinstance(node, yaml.ScalarNode):
        text = " ".join(node.value.split())
        return text if len(text) <= 60 else text[:57] + "..."
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys and values"


def _shown(node: yaml.Node) -> str:
    return f"'{_said(node)}'" if node.tag == f"{_TAG}str" else _said(node) or "nothing"
