"""CPU kernels in C++ behind a plain C interface: no header of Python or torch, so one build
serves every version.

`program.h` is the contract; `build.py` makes the library, `library.py` loads it, `abi.py` mirrors
its structures.
"""
