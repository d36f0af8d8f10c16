"""Builds the kernel library into the package where there is a C++ compiler; all else stands in pyproject.toml.

The library is called by its C functions and links nothing of Python, so one wheel serves every Python of a platform.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

sys.path.insert(0, str(Path(__file__).parent))
from weft.ops.cpp import build as kernels


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "weft" / "ops" / "cpp"
        target = folder / kernels.library_name(kernels.all_sets())
        try:
            kernels.build(target, kernels.all_sets())
        except kernels.CannotBuild as exc:
            print(
                f"weft: the kernel library is not built now, but at first use: {exc}",
                file=sys.stderr,
            )


class WheelForEveryPython(bdist_wheel):
    """py3-none-<platform>."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class BinaryDistribution(Distribution):
    """A wheel with the library is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


COMMANDS = {"build_py": BuildWithKernels, "bdist_wheel": WheelForEveryPython}

if __name__ == "__main__":
    setup(cmdclass=COMMANDS, distclass=BinaryDistribution)
