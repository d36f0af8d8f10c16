"""Builds the kernel library into the package where there is a C++ compiler; all else stands in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

sys.path.insert(0, str(Path(__file__).parent))
from weft.ops.cpp import build as kernels


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = (
            Path(self.build_lib) / "weft" / "ops" / "cpp" / kernels.library_name(kernels.all_sets())
        )
        try:
            kernels.build(target, kernels.all_sets())
        except kernels.CannotBuild as exc:
            print(
                f"weft: the kernel library is not built now, but at first use: {exc}",
                file=sys.stderr,
            )


class BinaryDistribution(Distribution):
    """A wheel with the library is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=BinaryDistribution)
