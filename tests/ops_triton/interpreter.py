"""Triton's interpreter, made quicker. For each call of a function it looks through all members of
its language for what to replace, and for each tensor it makes a table of numpy's types, the name of
its type and tuples of its shape."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import index
from types import FunctionType
from typing import Any


def is_recent() -> bool:
    """Whether there is a Triton that interprets weft's kernels. There is none but on Linux, and an
    older one, which a torch for CUDA may bring, lacks numpy 2.4."""
    try:
        numbers = version("triton").split(".")
    except PackageNotFoundError:
        return False
    return sys.platform == "linux" and tuple(map(int, numbers[:2])) >= (3, 9)


@cache
def make_quick() -> None:
    from triton.runtime import interpreter

    _make_patches_quick(interpreter)
    _make_types_quick(interpreter.tl.core)
    # It computes whether sums and products overflow, and says so only to who debugs.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _make_patches_quick(interpreter: Any) -> None:
    language = interpreter.tl
    pointer, block = language.pointer_type, language.core.block_type
    usual_patch, usual_type = interpreter._patch_lang, interpreter._get_np_dtype
    # What is replaced for a function that sees both modules of the language.
    both = {"tl": language, "core": language.core}
    scope = usual_patch(FunctionType((lambda: None).__code__, both))
    semantic = interpreter.interpreter_semantic
    changes = [
        (owner, name, _direct(getattr(owner, name), semantic)) for owner, name, _ in scope._changes
    ]
    scope.restore()

    def patch(function: Callable[..., Any]) -> Any:
        owner, name, replaced = changes[0]
        scope = interpreter._LangPatchScope()
        if getattr(owner, name) is replaced:
            return scope  # by the kernel that calls this function
        for change in changes:
            scope.set_attr(*change)
        return scope

    type_of_scalars = cache(usual_type)

    def type_of(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, block) else kind
        if isinstance(scalar, pointer):
            return usual_type(scalar)
        return type_of_scalars(scalar)

    vars(interpreter).update(_patch_lang=patch, _get_np_dtype=type_of)


def _direct(usual: Any, semantic: Any) -> Any:
    """The call of a member of the language, without two calls on the way that only add this."""
    member = (getattr(usual, "__kwdefaults__", None) or {}).get("member")
    if member is None:
        return usual
    meant = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return meant(*args, **kwargs)

    return call


def _make_types_quick(core: Any) -> None:
    """What follows from a type, and from a shape, is made once."""
    usual_type = core.block_type.__init__
    parts: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make_type(self: Any, element: Any, shape: Sequence[Any]) -> None:
        key = (element.name, *map(index, shape))
        if key not in parts:
            usual_type(self, element, shape)
            parts[key] = vars(self)
        vars(self).update(parts[key])

    @cache
    def shape_of(*sizes: int) -> dict[str, Any]:
        made = core.block_type(core.int1, [*sizes]) if sizes else core.int1
        tensor = object.__new__(core.tensor)
        usual_tensor(tensor, None, made)
        return {"shape": tensor.shape, "numel": tensor.numel}

    usual_tensor = core.tensor.__init__

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = type.shape.values if type.is_block() else ()
        vars(self).update(shape_of(*sizes), handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__ = make_type
    core.tensor.__init__ = make_tensor
