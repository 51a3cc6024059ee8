"""Provenance of a measurement: command, commit, versions, machine, time."""

import dataclasses
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from peagle.versions import installed_versions


@dataclass(frozen=True)
class Provenance:
    """The run that produced a result file."""

    command: str
    commit: str | None
    versions: dict[str, str]
    machine: dict[str, str | int | float]
    started_at: str  # UTC, ISO 8601
    duration: float  # seconds

    @classmethod
    def collect(cls, command: str | None = None, packages: tuple[str, ...] = ()) -> Self:
        """Describe the current process at the start of a run; `packages` adds versions if they are installed."""
        command = shlex.join(["peagle", *sys.argv[1:]]) if command is None else command
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(command, _source_commit(), installed_versions(*packages), _describe_machine(), started_at, 0.0)

    def with_duration(self, earlier: float = 0.0) -> Self:
        """Copy with the seconds since the start added to those of `earlier` parts of a resumed run."""
        elapsed = (datetime.now(UTC) - datetime.fromisoformat(self.started_at)).total_seconds()
        return dataclasses.replace(self, duration=round(earlier + max(elapsed, 0.0), 1))


def _source_commit() -> str | None:
    """Commit of the running source, with a trailing + if its files were edited; None outside a repository."""
    if commit := os.environ.get("PEAGLE_COMMIT"):
        return commit
    package = Path(__file__).parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed inside an unrelated repository
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}+" if commit and git("status", "--porcelain", "-uno", "--", ".") else commit


def _describe_machine() -> dict[str, str | int | float]:
    import torch

    cpuinfo = Path("/proc/cpuinfo")  # on Linux
    names = re.findall(r"^model name\s*:\s*(.*)$", cpuinfo.read_text(), flags=re.M) if cpuinfo.exists() else []
    cpu = names[0].strip() if names else platform.processor() or platform.machine()
    machine: dict[str, str | int | float] = {"system": platform.platform(), "cpu": cpu}
    machine["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        machine["gpus"] = torch.cuda.device_count()
        machine["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return machine
