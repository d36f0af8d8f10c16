"""Triton's interpreter, made quicker: for each call of a function it looks through all members of
its language for what to replace, and for each tensor it makes a table of numpy's types."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
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

    language = interpreter.tl
    pointer, block = language.pointer_type, language.core.block_type
    usual_patch, usual_type = interpreter._patch_lang, interpreter._get_np_dtype
    # What is replaced for a function that sees both modules of the language.
    both = {"tl": language, "core": language.core}
    scope = usual_patch(FunctionType((lambda: None).__code__, both))
    changes = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
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
