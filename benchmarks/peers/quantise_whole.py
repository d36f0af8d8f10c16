"""A GGUF file as the quantizer of ik_llama.cpp makes it of another one. quantise_whole.py SOURCE TYPE TARGET

The quantizer says which tensors get another type than the one that is asked for, because their rows are no whole blocks.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

KINDS = {"q4_0": 2, "q8_0": 7, "q2_k": 10, "q3_k_s": 11, "q4_k_m": 15}


class Params(ctypes.Structure):
    """The beginning of `llama_model_quantize_params`, and more room than the rest needs."""

    _fields_ = (
        ("num_threads", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("types", ctypes.c_int32 * 11),
        ("allow_requantize", ctypes.c_bool),
        ("rest", ctypes.c_uint8 * 203),
    )


def main() -> None:
    import ik_llama_cpp

    source, name, target = sys.argv[1:]
    library = ctypes.CDLL(str(Path(ik_llama_cpp.__file__).parent / "lib" / "libllama.so"))
    library.llama_model_quantize_default_params.restype = Params
    library.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
    params = library.llama_model_quantize_default_params()
    params.kind = KINDS[name]
    params.allow_requantize = True
    library.llama_backend_init()
    if library.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        sys.exit(f"ik_llama.cpp could not pack {source}")


if __name__ == "__main__":
    main()
