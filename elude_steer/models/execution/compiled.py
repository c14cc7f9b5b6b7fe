"""Changes of a layer that survive `torch.compile`, whether they begin before or after the model is compiled.

Compiled code asks before each call whether a module's `forward` is still the one it was compiled for, so a replaced
`forward` takes effect at once, and the code of the unchanged model comes back with the old one. (It does not ask
whether hooks were added: those are ignored.) What replaces a forward cannot be compiled itself, because it depends on
the running thread. A linear layer therefore becomes one call of an operator that the compiler does not look into, and
the graph around it stays whole, also with `fullgraph=True`. Any other module breaks the graph.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

_NUMBERS = itertools.count()
_OPAQUE: WeakValueDictionary[int, Opaque] = WeakValueDictionary()


class Opaque:
    """A function that runs as it is wherever it is called from, also inside compiled code.

    Args:
        d_out: the number of outputs, if the function does what a linear layer does; None for any other.
    """

    def __init__(self, d_out: int | None) -> None:
        self.number, self.d_out = next(_NUMBERS), d_out
        _OPAQUE[self.number] = self

    def prepare(self) -> None:
        """Make it callable from compiled code; only where torch's compiler is in use, because its import is slow."""
        if "torch._dynamo" in sys.modules:
            _define_operator()
            self._run_outside = _outside()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the function does."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what `run` does."""
        if not torch.compiler.is_dynamo_compiling():
            return self.run(*args, **kwargs)
        if self.d_out is not None and len(args) == 1 and not kwargs:
            return torch.ops.elude_steer.call_layer(args[0], self.number, self.d_out)
        return self._run_outside(self.number, args, kwargs)


def _run(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _OPAQUE[number].run(*args, **kwargs)


@cache
def _outside() -> Callable[..., Any]:
    """`_run`, which compiled code calls between two graphs."""
    return torch.compiler.disable(_run)


@cache
def _define_operator() -> torch.library.Library:
    """The operator that runs an `Opaque` on one tensor; it lives as long as the library that is returned."""
    library = torch.library.Library("elude_steer", "FRAGMENT")
    # A recorded CUDA graph would repeat the kernels of one edit for all others.
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    tags = () if unsafe is None else (unsafe,)
    library.define("call_layer(Tensor x, int number, int d_out) -> Tensor", tags=tags)

    def call(x: torch.Tensor, number: int, _d_out: int) -> torch.Tensor:
        output: torch.Tensor = _run(number, (x,), {})
        return output.contiguous()

    def describe(x: torch.Tensor, _number: int, d_out: int) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], d_out)

    library.impl("call_layer", call, "CompositeExplicitAutograd")
    torch.library.register_fake("elude_steer::call_layer", describe, lib=library)
    return library


def called_attribute(module: nn.Module, method: str) -> str:
    """The attribute that calls of a module reach: of one that is compiled itself, the compiled code."""
    compiled = method == "forward" and module._compiled_call_impl is not None
    return "_compiled_call_impl" if compiled else method


def is_compiled(model: nn.Module, name: str) -> bool:
    """Whether the module of this name runs inside compiled code: it or a module around it is compiled."""
    module: nn.Module | None = model
    for part in ["", *name.split(".")]:
        module = module if not part or module is None else getattr(module, part, None)
        forward = getattr(module, "forward", None)
        if getattr(module, "_compiled_call_impl", None) or hasattr(forward, "_torchdynamo_orig_callable"):
            return True
    return False
