"""A GGUF file with its down projections in another type. requantise.py SOURCE TYPE TARGET

Of SmolLM2, these are the matrices whose rows have a multiple of 256 weights, the block of most types; all others become Q8_0.
llama.cpp's own function chooses the codes, without an importance matrix (all inputs count the same).
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

BLOCK = 256


def library() -> ctypes.CDLL:
    """ggml of the package that this environment has."""
    import ik_llama_cpp

    (path,) = Path(ik_llama_cpp.__file__).parent.parent.glob(
        "ik_llama_cpp_python.libs/libggml-*.so"
    )
    found = ctypes.CDLL(str(path))
    found.ggml_quantize_chunk.restype = ctypes.c_size_t
    found.ggml_quantize_chunk.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    return found


def packed(
    ggml: ctypes.CDLL, rows: NDArray[np.float32], kind: gguf.GGMLQuantizationType
) -> NDArray[np.uint8]:
    """[n, in] -> [n, bytes]"""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    found = np.zeros((len(rows), rows.shape[1] // size * num_bytes), np.uint8)
    importance = np.ones(rows.shape[1], np.float32)
    rows = np.ascontiguousarray(rows)
    ggml.ggml_quantize_chunk(
        int(kind), rows.ctypes.data, found.ctypes.data, 0, *rows.shape, importance.ctypes.data
    )
    return found


def main() -> None:
    source, name, target = sys.argv[1:]
    kind = gguf.GGMLQuantizationType[name]
    ggml = library()
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values.astype(np.float32))
            continue
        chosen = gguf.GGMLQuantizationType.Q8_0
        if "ffn_down" in tensor.name:
            assert values.shape[1] % BLOCK == 0, "its rows are no whole blocks"
            chosen = kind
        writer.add_tensor(tensor.name, packed(ggml, values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
