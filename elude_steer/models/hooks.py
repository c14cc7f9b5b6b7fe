"""Looking into and changing a layer of somebody's model, and leaving it as it was.

Everything here is a context manager: our hooks live only inside it, whatever ends it, and hooks of others are never
touched. A hook acts only in the thread that opened it, so that threads can share one model.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elude_steer.errors import LayerError, did_you_mean
from elude_steer.method.layers import is_linear


class _StopForward(BaseException):
    """Ends a forward pass at the recorded layer; a BaseException, so that no `except Exception` inside keeps it."""


class Record:
    """What a recorded layer was given: `inputs`, one tensor a call."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []

    @property
    def input(self) -> torch.Tensor:
        """The input of the layer's only call."""
        if len(self.inputs) != 1:
            raise LayerError(f"the layer ran {len(self.inputs)} times in this forward pass, where once was expected.")
        return self.inputs[0]


@contextmanager
def record(layer: nn.Module, *, stop: bool = True) -> Iterator[Record]:
    """Records what `layer` is given; with `stop`, the forward pass ends there and so does the `with` block.

    Example:
        >>> with record(model.fc2) as seen:
        ...     model(pixels)
        >>> seen.input  # (batch, tokens, d_in)
    """
    seen, owner = Record(), threading.get_ident()

    # Another thread may call it while it is half registered, and then without kwargs.
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if threading.get_ident() != owner:
            return
        seen.inputs.append(_first(args, kwargs or {}).detach())
        if stop:
            raise _StopForward(seen)

    with _registered(lambda: layer.register_forward_pre_hook(hook, with_kwargs=True)):
        try:
            yield seen
        except _StopForward as end:
            if end.args[0] is not seen:  # of a record around this one
                raise


@contextmanager
def record_output(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Records what `module` gives, of a tuple the first; the forward pass ends there, and so does the `with` block."""
    seen: list[torch.Tensor] = []
    owner = threading.get_ident()

    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() == owner:
            seen.append((output[0] if isinstance(output, tuple) else output).detach())
            raise _StopForward(seen)

    with _registered(lambda: module.register_forward_hook(hook)):
        try:
            yield seen
        except _StopForward as end:
            if end.args[0] is not seen:  # of a record around this one
                raise


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else next(iter(kwargs.values()))


@contextmanager
def rewrite(layer: nn.Module, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Lets `change(input, output)` return what `layer` gives instead of its output; None leaves it as it is."""
    owner = threading.get_ident()

    def hook(_module: nn.Module, args: tuple[Any, ...], *rest: Any) -> torch.Tensor | None:
        if threading.get_ident() != owner:  # half registered, another thread calls it without kwargs
            return None
        kwargs, output = rest
        return change(_first(args, kwargs), output)

    with _registered(lambda: layer.register_forward_hook(hook, with_kwargs=True)):
        yield


@contextmanager
def watch_inputs(module: nn.Module, see: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Shows `see` the keyword arguments of every call of a module in this thread."""
    owner = threading.get_ident()

    def hook(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if threading.get_ident() == owner:
            see(kwargs or {})

    with _registered(lambda: module.register_forward_pre_hook(hook, with_kwargs=True)):
        yield


@contextmanager
def replace_forward(module: nn.Module, compute: Callable[..., Any], method: str = "forward") -> Iterator[None]:
    """Lets `compute(original, *args, **kwargs)` stand for a module's forward, or for another of its methods.

    Unlike `rewrite` it decides whether the module computes at all. Only in this thread, and undone at the end; what
    others have put in the place of the method (accelerate does) stays below it.
    """
    owner = threading.get_ident()
    with _STANDING:
        stand_in = vars(module).get(method)
        if not isinstance(stand_in, _StandIn):
            stand_in = _StandIn(getattr(module, method), stand_in)
            setattr(module, method, stand_in)
        stand_in.of_thread.setdefault(owner, []).append(compute)
    try:
        yield
    finally:
        with _STANDING:
            stand_in.of_thread[owner].remove(compute)
            if not stand_in.of_thread[owner]:
                del stand_in.of_thread[owner]
            # What others have put on top of ours in the meantime is theirs to take away.
            on_top = vars(module).get(method) is stand_in
            if on_top and not stand_in.of_thread and stand_in.before is None:
                delattr(module, method)
            elif on_top and not stand_in.of_thread:
                setattr(module, method, stand_in.before)


_STANDING = threading.Lock()


class _StandIn:
    """In the place of a module's method as long as any thread wants something else there."""

    def __init__(self, original: Callable[..., Any], before: Any) -> None:
        self.original, self.before = original, before
        self.of_thread: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wanted = self.of_thread.get(threading.get_ident())
        return wanted[-1](self.original, *args, **kwargs) if wanted else self.original(*args, **kwargs)


@contextmanager
def _registered(register: Callable[[], RemovableHandle]) -> Iterator[None]:
    handles: list[RemovableHandle] = []
    try:
        handles.append(register())
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def swap_module(model: nn.Module, name: str, new: nn.Module) -> Iterator[nn.Module]:
    """Puts `new` in the place of the module called `name`, and the old one back at the end."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    old = getattr(parent, child)
    try:
        setattr(parent, child, new)
        yield new
    finally:
        setattr(parent, child, old)


def block_of(model: nn.Module, layer_name: str) -> nn.Module:
    """The block that a layer is in: the innermost member of a numbered list around it, or the layer itself."""
    parts = layer_name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if parts[end - 1].isdigit():
            return model.get_submodule(".".join(parts[:end]))
    return model.get_submodule(layer_name)


def find_layer(model: nn.Module, suffix: str, *, within: str = "") -> tuple[str, nn.Module]:
    """The one linear layer of `model` whose dotted name ends with `suffix`.

    Args:
        model: any torch model.
        suffix: the end of the layer's name, e.g. `layers.25.mlp.fc2`; whole dotted parts only.
        within: only below this module, e.g. `model.vision_tower`.

    Returns:
        The full dotted name and the module: an `nn.Linear`, or an `nn.Conv2d` with a 1x1 kernel.
    """
    if not isinstance(model, nn.Module) or not isinstance(suffix, str) or not suffix:
        raise LayerError(
            f"a torch model and the end of a layer's name are wanted, not a {type(model).__name__} and {suffix!r}."
        )
    inside = {n: m for n, m in model.named_modules() if n and (not within or n.startswith(within + "."))}
    found = [name for name in inside if name == suffix or name.endswith("." + suffix)]
    if not found:
        raise LayerError(_no_such_layer(model, suffix, within, inside))
    if len(found) > 1:
        raise LayerError(
            f"layer '{suffix}' names {len(found)} layers of {type(model).__name__}: {_some(found)}. "
            "Give more of the name."
        )
    layer = inside[found[0]]
    if not is_linear(layer):
        linear = [name for name, module in inside.items() if is_linear(module) and name.startswith(found[0] + ".")]
        raise LayerError(
            f"layer '{found[0]}' is a {type(layer).__name__}, and only nn.Linear and 1x1 nn.Conv2d can be split"
            + (f"; inside it: {_some(linear)}." if linear else f"; for example {_some(_linear_like(inside))}.")
        )
    return found[0], layer


def _no_such_layer(model: nn.Module, suffix: str, within: str, inside: dict[str, nn.Module]) -> str:
    place = "its vision tower" if within else "it"
    line = f"layer '{suffix}' is not in {type(model).__name__}"
    # The same name with any number in it: most often the index is past the end.
    pattern = re.compile(r"(?:^|\.)" + re.sub(r"\\?\b\d+\b", r"(\\d+)", re.escape(suffix)) + "$")
    matches = [match for name in inside if (match := pattern.search(name))]
    if matches and pattern.groups == 1:
        indices = sorted({int(match.group(1)) for match in matches})
        line += f": {place} has layers {indices[0]} to {indices[-1]}."
        asked = re.search(r"\b\d+\b", suffix)
        if asked and int(asked.group()) == indices[-1] + 1:
            line += f' The paper\'s "layer {indices[-1] + 1}" is index {indices[-1]}.'
        return line
    known = _linear_like(inside)
    ends = [".".join(name.split(".")[-len(suffix.split(".")) :]) for name in known]
    return f"{line}.{did_you_mean(suffix, ends)} The last that can be split: {_some(known)}."


def _linear_like(inside: dict[str, nn.Module]) -> list[str]:
    """The linear layers, last first: people usually want one near the end."""
    return [name for name, module in inside.items() if is_linear(module)][::-1]


def _some(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(f"'{name}'" for name in names[:most]) or "none") + more
