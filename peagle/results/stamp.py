"""Where a measurement comes from: command, commit, versions, machine, time.

Knows nothing about what was measured.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from peagle.versions import installed_versions


@dataclass(frozen=True)
class Stamp:
    """Where a document comes from."""

    command: str
    commit: str | None
    versions: dict[str, str]
    machine: dict[str, str | int | float]
    started: str
    seconds: float

    @staticmethod
    def now(command: str | None = None, packages: tuple[str, ...] = ()) -> Stamp:
        """Taken at the start; `packages` are named beside the usual ones, where they are installed."""
        told = shlex.join(["peagle", *sys.argv[1:]]) if command is None else command
        started = datetime.now(UTC).isoformat(timespec="seconds")
        return Stamp(told, _commit(), installed_versions(*packages), _machine(), started, 0.0)

    def done(self, before: float = 0.0) -> Stamp:
        """The same with the seconds since it was taken; `before` is what earlier runs of a resumed document took."""
        taken = (datetime.now(UTC) - datetime.fromisoformat(self.started)).total_seconds()
        return dataclasses.replace(self, seconds=round(before + max(taken, 0.0), 1))


def _commit() -> str | None:
    """Of the source that runs, with a + if files of it were changed since; None outside a repository."""
    given = os.environ.get("PEAGLE_COMMIT")
    if given:
        return given
    here = Path(__file__).parent.parent

    def git(*words: str) -> str | None:
        try:
            asked = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return asked.stdout.strip() if asked.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed into somebody else's repository
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}+" if commit and git("status", "--porcelain", "-uno", "--", ".") else commit


def _machine() -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {"system": platform.platform(), "cpu": _cpu_name()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found["cores"] = cores
    try:
        found["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        pass  # a system that does not tell
    import torch

    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpus"] = torch.cuda.device_count()
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine()
