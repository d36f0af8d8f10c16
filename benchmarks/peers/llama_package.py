"""The C interface of llama.cpp from the package that this environment has: `llama-cpp-python` (llama.cpp), or
`ik-llama-cpp-python` (ik_llama.cpp), which has the older of two ways to forget sequences."""

from __future__ import annotations

from types import ModuleType

try:
    import llama_cpp as package

    IS_IK = False
except ModuleNotFoundError:
    from ik_llama_cpp import _ctypes_api as package

    IS_IK = True

ll: ModuleType = package


def clear(context: int) -> None:
    """Forget all sequences."""
    if IS_IK:
        ll.llama_kv_cache_clear(context)
    else:
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
