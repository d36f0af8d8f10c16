"""CPU kernels in C++ behind a plain C interface: no header of Python or torch, so one build
serves every version.

`program.h` is the contract, from which `generate_abi.py` makes `abi.py`; `build.py` makes the
library, `library.py` loads it.
"""
