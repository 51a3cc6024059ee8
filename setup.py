"""Copies the drafters of `checkpoints/` into a wheel, as peagle/drafters. All other settings are in pyproject.toml.

An editable install copies nothing, since `peagle.hub` finds the drafters in the checkout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDER = ("peagle", "drafters")
FILES = ("config.json", "README.md", "*.safetensors", "*.safetensors.index.json")


class BuildWithDrafters(build_py):
    def drafters(self) -> dict[str, str]:
        """Returns source path -> path in the build folder."""
        found = sorted(path for pattern in FILES for path in Path("checkpoints").glob(f"*/{pattern}"))
        into = Path(self.build_lib, *FOLDER)
        return {str(path): str(into / path.parent.name / path.name) for path in found}

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, *FOLDER), ignore_errors=True)  # removes files of earlier builds
            for source, copy in self.drafters().items():
                self.mkpath(str(Path(copy).parent))
                self.copy_file(source, copy)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *([] if self.editable_mode else self.drafters().values())]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self.drafters()]  # for source archives


setup(cmdclass={"build_py": BuildWithDrafters})
