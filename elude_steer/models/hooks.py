"""Record and change what a layer of any torch model computes, and leave the model as it was.

Everything here is a context manager: our hooks exist only inside it, however it ends, and hooks of others are never
touched. A hook acts only where it was opened, so that all can share one model: in the same thread and context (an
asyncio task has its own, and inherits that of its creator), on the same module and not on a copy of it, and, inside a
generator, only while the generator runs and not in the code that consumes it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elude_steer.errors import LayerError, did_you_mean, type_with_article
from elude_steer.method.layers import is_linear
from elude_steer.models.execution.compiled import Opaque, called_attribute


class _StopForward(BaseException):
    """Ends a forward pass at the recorded layer; a BaseException, so that no `except Exception` in a model stops it."""


class _Scope:
    """Where one change of a model acts: in the thread, context and generator that opened it, until it is closed."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        # The number of a frame, not the frame: a reference would keep an abandoned generator and its change alive.
        self.generator = next((id(frame) for frame in _frames() if _is_plain_generator(frame)), None)
        self.is_open = True

    @property
    def is_here(self) -> bool:
        """Whether the code that runs now is inside."""
        if not self.is_open or self.thread != threading.get_ident() or self not in _SCOPES.get():
            return False
        return self.generator is None or any(id(frame) == self.generator for frame in _frames())


_SCOPES: ContextVar[tuple[_Scope, ...]] = ContextVar("scopes", default=())
# These run a generator up to its `yield` and give the `with` block to their caller.
_MANAGERS = {
    getattr(contextlib, kind).__dict__[method].__code__
    for kind, method in (("_GeneratorContextManager", "__enter__"), ("_AsyncGeneratorContextManager", "__aenter__"))
}


@contextmanager
def _scope() -> Iterator[_Scope]:
    scope = _Scope()
    try:
        _SCOPES.set((*(one for one in _SCOPES.get() if one.is_open), scope))
        yield scope
    finally:
        scope.is_open = False
        # Not `reset`: a generator may be closed in another context than the one that opened it.
        _SCOPES.set(tuple(one for one in _SCOPES.get() if one is not scope))


def _frames() -> Iterator[types.FrameType]:
    """The frames of the running code, from the caller of this function's caller outwards."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_plain_generator(frame: types.FrameType) -> bool:
    """Whether a frame is that of a generator which may be suspended inside a `with`, and is no context manager."""
    if not frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        return False
    return frame.f_back is None or frame.f_back.f_code not in _MANAGERS


class Record:
    """The inputs of a recorded layer: `inputs` holds one tensor per call."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []

    @property
    def input(self) -> torch.Tensor:
        """The input of the layer's only call."""
        if len(self.inputs) != 1:
            raise LayerError(f"the layer ran {len(self.inputs)} times in this forward pass; it must run exactly once.")
        return self.inputs[0]


@contextmanager
def record(layer: nn.Module, *, stop: bool = True, argument: str | None = None) -> Iterator[Record]:
    """Record the inputs of `layer`; with `stop`, the forward pass ends there and so does the `with` block.

    The first argument of a call is its input, or the keyword `argument`.

    Example:
        >>> with record(model.fc2) as recorded:
        ...     model(pixels)
        >>> recorded.input  # (batch, tokens, d_in)
    """
    recorded = Record()

    def compute(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        value = first if argument is None else kwargs[argument]
        recorded.inputs.append(value.detach())
        if stop:
            raise _StopForward(recorded)
        return original(*args, **kwargs)

    with replace_forward(layer, compute, observes=True):
        try:
            yield recorded
        except _StopForward as end:
            if end.args[0] is not recorded:  # raised for an enclosing record
                raise


@contextmanager
def record_output(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Record the output of `module`, the first element of a tuple; the forward pass and the `with` block end there."""
    outputs: list[torch.Tensor] = []

    def compute(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        outputs.append((output[0] if isinstance(output, tuple) else output).detach())
        raise _StopForward(outputs)

    with replace_forward(module, compute, observes=True):
        try:
            yield outputs
        except _StopForward as end:
            if end.args[0] is not outputs:  # raised for an enclosing record
                raise


@contextmanager
def watch_inputs(module: nn.Module, on_call: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Call `on_call(kwargs)` with the keyword arguments of every call of `module` from inside."""

    def compute(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        on_call(kwargs)
        return original(*args, **kwargs)

    with replace_forward(module, compute, observes=True):
        yield


@contextmanager
def replace_forward(
    module: nn.Module, compute: Callable[..., Any], method: str = "forward", *, observes: bool = False
) -> Iterator[None]:
    """Call `compute(original, *args, **kwargs)` instead of the module's forward, or instead of another method.

    Unlike a forward hook, `compute` decides whether the module computes at all. The replacement acts only for calls
    from inside and is undone at the end. A method that others have replaced before (accelerate does) becomes
    `original` and comes back. A module that is compiled stays compiled, as does the model around it; see
    `models/execution/compiled.py`.

    Args:
        module: whose method is replaced.
        compute: what is called instead; of several, the innermost.
        method: the name of the method.
        observes: whether `compute` changes nothing, so that `original` is the next replacement outside of this one.
    """
    attribute = called_attribute(module, method)
    with _scope() as scope:
        with _REPLACING:
            current = vars(module).get(attribute)
            if isinstance(current, _Replacement):
                replacement = current
            else:
                replacement = _replacement_of(module, attribute)
                replacement.take_place_of(getattr(module, attribute), current)
                replacement.prepare()
                setattr(module, attribute, replacement)
            replacement.by_scope[scope] = (compute, observes)
        try:
            yield
        finally:
            with _REPLACING:
                del replacement.by_scope[scope]
                # If others have replaced our replacement in the meantime, theirs stays until they remove it.
                if vars(module).get(attribute) is replacement and not replacement.by_scope:
                    if replacement.previous is None:
                        delattr(module, attribute)
                    else:
                        setattr(module, attribute, replacement.previous)
                    replacement.forget()


_REPLACING = threading.Lock()


class _Replacement(Opaque):
    """Takes the place of a module's method as long as anybody replaces it.

    Each module keeps its own, because compiled code is made for the object that it found.
    """

    original: Callable[..., Any]
    previous: Any

    def __init__(self, d_out: int | None) -> None:
        super().__init__(d_out)
        self.by_scope: dict[_Scope, tuple[Callable[..., Any], bool]] = {}

    def take_place_of(self, original: Callable[..., Any], previous: Any) -> None:
        """Call this method where nobody replaces it, and put `previous` back at the end."""
        self.original, self.previous = original, previous
        self.__signature__ = inspect.signature(original)  # transformers reads it to choose what it passes

    def forget(self) -> None:
        """Hold the module no longer."""
        del self.original, self.previous, self.__signature__

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the innermost `compute` that is inside, or else the original."""
        return self._find(reversed(_SCOPES.get()))(*args, **kwargs)

    def _find(self, scopes: Iterator[_Scope]) -> Callable[..., Any]:
        for scope in scopes:
            compute, observes = self.by_scope.get(scope, (None, False))
            if compute is not None and scope.is_here:
                return partial(compute, self._find(scopes) if observes else self.original)
        return self.original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of a model is without our changes: it gets the method that we took the place of."""
        return copy.deepcopy(self.original, memo)


_REPLACEMENTS: WeakKeyDictionary[nn.Module, dict[str, _Replacement]] = WeakKeyDictionary()


def _replacement_of(module: nn.Module, attribute: str) -> _Replacement:
    kept = _REPLACEMENTS.setdefault(module, {})
    if attribute not in kept or kept[attribute].by_scope:  # the one that others have wrapped may still be called
        kept[attribute] = _Replacement(module.out_features if isinstance(module, nn.Linear) else None)
    return kept[attribute]


@contextmanager
def swap_module(model: nn.Module, name: str, new: nn.Module) -> Iterator[nn.Module]:
    """Put `new` in the place of the module called `name`, and put the old module back at the end."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    old = getattr(parent, child)
    try:
        setattr(parent, child, new)
        yield new
    finally:
        setattr(parent, child, old)


def block_of(model: nn.Module, layer_name: str) -> nn.Module:
    """Return the block that contains a layer: the innermost member of a module list around it, or the layer itself."""
    parts = layer_name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if parts[end - 1].isdigit():
            return model.get_submodule(".".join(parts[:end]))
    return model.get_submodule(layer_name)


def find_stream_scale(model: nn.Module, layer_name: str, width: int) -> torch.Tensor | None:
    """Return what a block multiplies a layer's output by, per channel, before adding it to the stream (LayerScale).

    It is found by structure: a parameter with one number for each of the layer's `width` outputs that belongs neither
    to a norm nor to a linear layer, in a module behind the layer's own, or of the two such parameters of the
    block that of attention or that of the MLP.
    """
    block = block_of(model, layer_name)
    name = next((name for name, module in model.named_modules() if module is block), "")
    inside = layer_name[len(name) + 1 :] if name else layer_name
    if not inside or block is model.get_submodule(layer_name):
        return None
    children = list(dict(block.named_children()))
    behind = children[children.index(inside.split(".")[0]) + 1 :]
    for child in behind:
        found = dict(block.get_submodule(child).named_parameters())
        if len(found) == 1 and "norm" not in type(block.get_submodule(child)).__name__.lower():
            (scale,) = found.values()
            if scale.shape == (width,):
                return scale.detach()
    own = [parameter for parameter in block.parameters(recurse=False) if parameter.shape == (width,)]
    if len(own) != 2:
        return None
    return own[0 if "att" in inside.split(".")[0].lower() else 1].detach()  # one for attention, one for the MLP


def find_layer(model: nn.Module, suffix: str, *, within: str = "") -> tuple[str, nn.Module]:
    """Find the one linear layer of `model` whose dotted name ends with `suffix`.

    Args:
        model: any torch model.
        suffix: the end of the layer's name in complete dotted parts, e.g. `layers.25.mlp.fc2`.
        within: search only below this module, e.g. `model.vision_tower`.

    Returns:
        The full dotted name and the module: an `nn.Linear`, or an `nn.Conv2d` with a 1x1 kernel.
    """
    if not isinstance(model, nn.Module) or not isinstance(suffix, str) or not suffix:
        raise LayerError(
            f"give a torch model and the end of a layer's name, not {type_with_article(model)} and {suffix!r}."
        )
    inside = {n: m for n, m in model.named_modules() if n and (not within or n.startswith(within + "."))}
    found = [name for name in inside if name == suffix or name.endswith("." + suffix)]
    if not found:
        raise LayerError(_no_such_layer(model, suffix, within, inside))
    if len(found) > 1:
        raise LayerError(
            f"layer '{suffix}' matches {len(found)} layers of {type(model).__name__}: {_some(found)}. "
            "Give more of the name."
        )
    layer = inside[found[0]]
    if not is_linear(layer):
        linear = [name for name, module in inside.items() if is_linear(module) and name.startswith(found[0] + ".")]
        raise LayerError(
            f"layer '{found[0]}' is a {type(layer).__name__}, and only nn.Linear and 1x1 nn.Conv2d can be split"
            + (f"; inside it: {_some(linear)}." if linear else f"; for example {_some(_linear_names(inside))}.")
        )
    return found[0], layer


def _no_such_layer(model: nn.Module, suffix: str, within: str, inside: dict[str, nn.Module]) -> str:
    place = "its vision tower" if within else "it"
    line = f"layer '{suffix}' is not in {type(model).__name__}"
    # The most common mistake is an index past the end, so match the name with any number in it.
    pattern = re.compile(r"(?:^|\.)" + re.sub(r"\\?\b\d+\b", r"(\\d+)", re.escape(suffix)) + "$")
    matches = [match for name in inside if (match := pattern.search(name))]
    if matches and pattern.groups == 1:
        indices = sorted({int(match.group(1)) for match in matches})
        line += f": {place} has layers {indices[0]} to {indices[-1]}."
        requested = re.search(r"\b\d+\b", suffix)
        if requested and int(requested.group()) == indices[-1] + 1:
            line += f' The paper\'s "layer {indices[-1] + 1}" is index {indices[-1]}.'
        return line
    linear = _linear_names(inside)
    ends = [".".join(name.split(".")[-len(suffix.split(".")) :]) for name in linear]
    return f"{line}.{did_you_mean(suffix, ends)} The last layers that can be split: {_some(linear)}."


def _linear_names(inside: dict[str, nn.Module]) -> list[str]:
    """The names of the linear layers, last first, because people usually want one near the end."""
    return [name for name, module in inside.items() if is_linear(module)][::-1]


def _some(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(f"'{name}'" for name in names[:limit]) or "none") + more
