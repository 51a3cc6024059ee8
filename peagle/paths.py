"""Paths given by the user, and the cache folder. Imports nothing of peagle."""

import os
from pathlib import Path


def expand_user_path(text: str) -> Path:
    """Expands `~`. An empty string must not mean the current folder, so it becomes a path that holds nothing."""
    return Path(os.path.expanduser(text) or os.devnull)


def cache_folder() -> Path:
    """The folder for converted models and compiled kernels.

    `$PEAGLE_CACHE` if set, else `$XDG_CACHE_HOME/peagle`, else `~/.cache/peagle`.
    """
    if chosen := os.environ.get("PEAGLE_CACHE"):
        return expand_user_path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return expand_user_path(shared) / "peagle"
    return expand_user_path("~/.cache/peagle")
