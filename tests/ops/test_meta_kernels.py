"""The kernels for the device `meta` are registered when foreign code is imported, not before."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from importlib.util import find_spec
from weft.ops import meta_kernels

meta_kernels.defer("a_package_of_weights")
import torch

def shape() -> str:
    try:
        points = torch.empty(2, 3, device="meta")
        return str(tuple(torch.cdist(points, points).shape))
    except NotImplementedError:
        return "none"

find_spec("a_package_of_weights")
import weft.ops.cpp.ops
print(shape(), torch.ones(2).add(1).tolist())
find_spec("somebodys_plugin")
print(shape())
meta_kernels.register()
print(shape(), [one for one in sys.meta_path if isinstance(one, meta_kernels.Deferred)])
"""


def test_kernels_for_meta_are_there_as_soon_as_foreign_code_is_imported() -> None:
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["none [2.0, 2.0]", "(2, 2)", "(2, 2) []"], done.stderr
