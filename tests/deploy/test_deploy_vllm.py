"""`peagle deploy vllm`: generated files and checks.

Oracles: a real shell with a fake `vllm`, systemd's verifier, Kubernetes' published schemas, and for the checks the
configs of published models.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pairs import drafter_folder, target_folder
from published_heads import HEADS, write_head
from support import edit_config, set_config
from transformers import CONFIG_MAPPING

from peagle.checkpoints.target import read_target_sizes
from peagle.cli import main
from peagle.config import DrafterConfig, LayerConfig, RopeConfig
from peagle.deploy.checks import splits_drafter_cache

KEY = "sk-secret"
DRAFTER = str(drafter_folder("p-eagle-4"))
TARGET = str(target_folder())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the verb; returns exit status, stdout and stderr."""

    def one(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["peagle", "deploy", "vllm", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return one


def fake_vllm(folder: Path) -> dict[str, str]:
    """Creates a `vllm` that prints its arguments and environment; returns a PATH that finds it."""
    program = folder / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}


def speculative_of(words: list[str]) -> dict[str, Any]:
    return json.loads(words[words.index("--speculative-config") + 1])


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.fixture
def odd_names(tmp_path: Path) -> tuple[str, str]:
    """Folders whose names need quoting in every format."""
    folders = tmp_path / 'it\'s a "dir"', tmp_path / "50% $HOME $(HOME) \\n {x}: #y"
    shutil.copytree(target_folder(), folders[0])
    shutil.copytree(drafter_folder("p-eagle-4"), folders[1])
    return str(folders[0]), str(folders[1])


def test_shell_script(run: Any, odd_names: tuple[str, str], tmp_path: Path) -> None:
    target, drafter = odd_names
    out = tmp_path / "out"
    status, output, _ = run(
        target, "-d", drafter, "-k", "5", "--tensor-parallel", "2", "--out", str(out), "--", "--kv-cache-dtype", "fp8"
    )
    assert status == 0 and f"{out}/serve.sh" in output
    environment = fake_vllm(tmp_path)
    missing = subprocess.run(["sh", out / "serve.sh"], env=environment, capture_output=True, text=True)
    assert missing.returncode != 0 and "VLLM_API_KEY" in missing.stderr, "no key, no server"
    done = subprocess.run([out / "serve.sh"], env={**environment, "VLLM_API_KEY": KEY}, capture_output=True, text=True)
    words, seen = json.loads(done.stdout)
    assert words[:2] == ["serve", target] and words[-2:] == ["--kv-cache-dtype", "fp8"]
    wanted = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 5, "parallel_drafting": True}
    assert speculative_of(words) == wanted and value(words, "--tensor-parallel-size") == "2"
    assert seen["VLLM_API_KEY"] == KEY and seen["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    # the line that is printed without --out says the same
    _, line, _ = run(target, "-d", drafter, "-k", "5", "--tensor-parallel", "2", "--", "--kv-cache-dtype", "fp8")
    done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True)
    assert json.loads(done.stdout)[0] == words


def test_files_contain_no_secrets(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", KEY)
    out = tmp_path / "out"
    status, output, complaints = run("org/target", "-d", "org/drafter", "--unchecked", "--out", str(out))
    assert status == 0 and KEY not in output + complaints
    texts = {path.name: path.read_text() for path in out.iterdir()}
    assert sorted(texts) == ["compose.yaml", "kubernetes.yaml", "peagle.service", "serve.sh"]
    assert not any(KEY in text for text in texts.values())
    for arguments in (("--env", "HF_TOKEN=hf_x"), ("--", "--api-key", "x"), ("--", "--api-key=x")):
        status, _, complaints = run(TARGET, "-d", DRAFTER, *arguments)
        assert status == 2 and "error: " in complaints.splitlines()[0]


def test_systemd_units(run: Any, odd_names: tuple[str, str], tmp_path: Path) -> None:
    target, drafter = odd_names
    out = tmp_path / "out"
    arguments = ("--format", "systemd", "--replicas", "2", "--tensor-parallel", "2", "--program", "/bin/true")
    status, _, complaints = run(target, "-d", drafter, *arguments, "--user", "root", "--out", str(out), "--name", "llm")
    assert status == 0 and "systemd-analyze" not in complaints
    units = sorted(out.iterdir())
    assert [unit.name for unit in units] == ["llm-0.service", "llm-1.service"]
    for i, unit in enumerate(units):
        lines = unit.read_text().splitlines()
        start = next(line for line in lines if line.startswith("ExecStart=")).removeprefix("ExecStart=")
        # systemd: %% is %, $$ is $, double quotes and backslashes as in C
        words = shlex.split(start.replace("%%", "%").replace("$$", "$"))
        assert words[:3] == ["/bin/true", "serve", target] and speculative_of(words)["model"] == drafter
        assert value(words, "--port") == str(8000 + i)
        assert f"Environment=CUDA_VISIBLE_DEVICES={2 * i},{2 * i + 1}" in lines
        assert "EnvironmentFile=/etc/llm.env" in lines
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
        assert not [line for line in done.stderr.splitlines() if "llm-" in line]


def test_compose_with_replicas(run: Any, odd_names: tuple[str, str]) -> None:
    target, drafter = odd_names
    status, text, _ = run(
        *(target, "-d", drafter, "--format", "compose", "--replicas", "3", "--tensor-parallel", "2", "--port", "9000")
    )
    assert status == 0
    whole = yaml.safe_load(text)
    services = whole["services"]
    assert sorted(services) == ["proxy", "vllm-0", "vllm-1", "vllm-2"]
    gpus = []
    for name in ("vllm-0", "vllm-1", "vllm-2"):
        one = services[name]
        words = [word.replace("$$", "$") for word in one["command"]]  # as Compose reads them
        assert words[0] == "/models/target" and speculative_of(words)["model"] == "/models/drafter"
        assert value(words, "--served-model-name") == Path(target).name
        sources = [v["source"].replace("$$", "$") for v in one["volumes"] if isinstance(v, dict)]
        assert sources == [target, drafter]
        assert one["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?") and "ports" not in one
        (device,) = one["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
        assert one["image"] == "vllm/vllm-openai:v0.32.0"
    assert gpus == ["0", "1", "2", "3", "4", "5"]
    proxy = whole["configs"]["proxy"]["content"].replace("$$", "$")
    assert all(f"server {name}:8000;" in proxy for name in services if name != "proxy")
    assert services["proxy"]["ports"] == ["9000:8000"] and "proxy_buffering off" in proxy


def test_kubernetes_manifest(run: Any, odd_names: tuple[str, str]) -> None:
    target, drafter = odd_names
    status, text, _ = run(
        *(target, "-d", drafter, "--format", "kubernetes", "--replicas", "4", "--tensor-parallel", "2"),
        *("--name", "my-llm", "--service-monitor", "--vllm-version", "0.30", "--env", "A=$(B)"),
    )
    assert status == 0
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    assert list(documents) == ["Deployment", "Service", "PodDisruptionBudget", "ServiceMonitor"]
    for kind, document in documents.items():
        if kind != "ServiceMonitor":  # of an operator's own making
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    spec = documents["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["replicas"] == 4 and container["image"] == "vllm/vllm-openai:v0.30.0"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2} == container["resources"]["requests"]
    words = [word.replace("$$(", "$(") for word in container["args"]]
    assert speculative_of(words)["model"] == "/models/drafter" and speculative_of(words)["parallel_drafting"] is True
    environment = {one["name"]: one for one in container["env"]}
    assert environment["A"]["value"] == "$$(B)", "left alone, it is another variable's value"
    assert environment["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "my-llm", "key": "api-key"}
    assert {volume["name"]: volume for volume in pod["volumes"]}["shm"]["emptyDir"]["medium"] == "Memory"
    paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    assert paths == [target, drafter]
    probe = container["startupProbe"]
    assert probe["httpGet"]["path"] == "/health" and probe["failureThreshold"] * probe["periodSeconds"] == 1800
    assert {"readinessProbe", "livenessProbe"} <= container.keys()
    annotations = spec["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true" and annotations["prometheus.io/path"] == "/metrics"
    labels = spec["template"]["metadata"]["labels"]
    service, monitor = documents["Service"]["spec"], documents["ServiceMonitor"]["spec"]
    assert service["selector"] == labels == spec["selector"]["matchLabels"] == monitor["selector"]["matchLabels"]
    assert service["ports"][0]["targetPort"] == container["ports"][0]["name"] == monitor["endpoints"][0]["port"]


def test_eagle3_drafter_has_no_parallel_drafting(run: Any) -> None:
    status, line, _ = run(TARGET, "-d", str(drafter_folder("eagle3-1")))
    assert status == 0 and "VLLM_USE_V2_MODEL_RUNNER" not in line
    words = shlex.split(line)
    assert speculative_of(words) == {
        "method": "eagle3",
        "model": str(drafter_folder("eagle3-1")),
        "num_speculative_tokens": 3,
    }


def test_drafter_without_aux_layer_ids(run: Any, tmp_path: Path) -> None:
    """The tensors tell EAGLE-3 from P-EAGLE, even if the target with its default layers is not read."""
    for name, parallel in (("eagle3-1", False), ("p-eagle-1", True)):
        folder = tmp_path / name
        shutil.copytree(drafter_folder(name), folder)
        edit_config(folder, lambda values: values.pop("eagle_aux_hidden_state_layer_ids"))
        status, line, complaints = run("org/target", "-d", str(folder), "--unchecked")
        assert status == 0 and "no eagle_aux_hidden_state_layer_ids" in complaints
        assert ("parallel_drafting" in speculative_of(shlex.split(line))) == parallel


# Checks


def model_config(kind: str, folder: Path, architecture: str, **fields: Any) -> Path:
    """Writes the config.json of a published model."""
    folder.mkdir()
    config = CONFIG_MAPPING[kind](**fields)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def head_of(layers: int, kv_heads: int, head_dim: int) -> DrafterConfig:
    layer = LayerConfig(2880, 2880, num_heads=64, num_kv_heads=kv_heads, head_dim=head_dim)
    return DrafterConfig(201088, 201088, layers, layer, RopeConfig(), 4096, 2880, (2, 12, 21), mask_token_id=201020)


def test_gpt_oss_cache_groups(tmp_path: Path) -> None:
    """Only the 20b's model card warns: 12 + 4 > 12 * 1.25, but 18 + 4 < 18 * 1.25."""
    small = read_target_sizes(model_config("gpt_oss", tmp_path / "20b", "GptOssForCausalLM", num_hidden_layers=24))
    large = read_target_sizes(model_config("gpt_oss", tmp_path / "120b", "GptOssForCausalLM", num_hidden_layers=36))
    assert (small.num_layers, small.windows.count(None), small.layer.num_kv_heads, small.layer.head_dim) == (
        24,
        12,
        8,
        64,
    )
    assert (large.num_layers, large.windows.count(None)) == (36, 18)
    head = head_of(4, 8, 64)
    assert splits_drafter_cache(small, head, (0, 17)) and not splits_drafter_cache(small, head, (0, 18))
    assert not splits_drafter_cache(large, head, (0, 17)) and not splits_drafter_cache(large, head, (0, 32))
    assert not splits_drafter_cache(small, head_of(1, 8, 64), (0, 17)), "one layer is in one group"
    dense = read_target_sizes(model_config("llama", tmp_path / "llama", "LlamaForCausalLM"))
    assert not splits_drafter_cache(dense, head, (0, 17))


def test_gpt_oss_target_is_checked_by_its_config(run: Any, tmp_path: Path) -> None:
    """The checks need neither the target's weights nor a quantization that peagle supports."""
    head = HEADS["gpt-oss-20b"]
    drafter = write_head(head, tmp_path / "head")
    values = json.loads((drafter / "config.json").read_text())
    shape = {"hidden_size": values["hidden_size"], "vocab_size": values["vocab_size"], "head_dim": values["head_dim"]}
    heads = {name: values[name] for name in ("num_attention_heads", "num_key_value_heads")}
    target = model_config(
        *("gpt_oss", tmp_path / "target", "GptOssForCausalLM"), num_hidden_layers=24, **shape, **heads
    )
    set_config(target, quantization_config={"quant_method": "awq", "bits": 4})
    arguments = (str(target), "-d", str(drafter), "--max-model-len", "512")
    status, _, complaints = run(*arguments, "--vllm-version", "0.17")
    assert status == 2 and "validate_same_kv_cache_group; use vLLM 0.18 or newer" in complaints
    assert run(*arguments, "--vllm-version", "0.17", "--", "--disable-hybrid-kv-cache-manager")[0] == 0
    status, line, complaints = run(*arguments, "--vllm-version", "0.18")
    assert (status, complaints) == (0, "") and "parallel_drafting" in line
    set_config(target, vocab_size=321)
    status, _, complaints = run(*arguments)
    assert status == 2 and "vocab_size is 320, but the target's is 321" in complaints


def test_unknown_architecture_is_a_warning(run: Any, tmp_path: Path) -> None:
    target = model_config("llama", tmp_path / "target", "NovelForCausalLM")
    status, line, complaints = run(str(target), "-d", DRAFTER)
    assert status == 0 and "parallel_drafting" in line
    assert complaints.startswith("warning: ") and "does not know this architecture" in complaints


def test_unreachable_hub_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, output, complaints = run("no-such-owner/no-such-model", "-d", DRAFTER)
    assert (status, output) == (2, "") and len(complaints.splitlines()) == 1
    assert "could not be fetched" in complaints and "--unchecked" in complaints
    status, line, complaints = run("no-such-owner/no-such-model", "-d", DRAFTER, "--unchecked")
    assert status == 0 and "not checked" in complaints and shlex.split(line)[3] == "no-such-owner/no-such-model"


def changed(folder: Path, name: str, **fields: Any) -> str:
    shutil.copytree(drafter_folder(name), folder)
    set_config(folder, **fields)
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "level", "told"),
    [
        (("--vllm-version", "0.15"), "error", "parallel drafting needs vLLM 0.16"),
        (("--env", "VLLM_USE_V2_MODEL_RUNNER=1"), "error", "Model Runner V2"),
        (("--env", "VLLM_USE_V2_MODEL_RUNNER=0"), "", ""),
        (("--tensor-parallel", "3"), "error", "the target's 4 heads and 2 KV heads"),
        (("--tensor-parallel", "4"), "", ""),  # two of each key/value head
        (("--vllm-version", "0.40"), "warning", "newer than 0.32"),
        (("--max-model-len", "300"), "warning", "the drafter supports 256"),
        (("--max-num-seqs", "64"), "warning", "-k 7 with 64"),
        (("--max-num-seqs", "64", "-k", "3"), "", ""),
        (("--", "--speculative-config", "{}"), "error", "--speculative-config after --"),
        (("--", "-tp", "2"), "error", "use --tensor-parallel"),
    ],
)  # fmt: skip
def test_checks_by_flags(run: Any, arguments: tuple[str, ...], level: str, told: str) -> None:
    status, line, complaints = run(TARGET, "-d", DRAFTER, *arguments)
    assert status == (2 if level == "error" else 0)
    assert bool(line) == (level != "error"), "no output after an error"
    first = complaints.splitlines()[0] if complaints else ""
    assert first.startswith(level) and told in first


@pytest.mark.parametrize(
    ("name", "fields", "version", "told"),
    [
        ("p-eagle-1-wide", {}, "0.21", "a hidden size other than the target's needs vLLM 0.22"),
        ("p-eagle-4-reduced", {}, "0.21", "fc_norm needs vLLM 0.22"),
        ("p-eagle-4", {"ptd_token_id": None, "pard_token": None}, "0.27", "mask token id only as mask_token_id"),
        ("p-eagle-4", {"vocab_size": 161, "draft_vocab_size": 161}, "0.32", "has shape"),
        ("p-eagle-4", {"target_hidden_size": None}, "0.32", "target_hidden_size is null"),
    ],
)  # fmt: skip
def test_drafter_that_vllm_misreads_is_an_error(
    run: Any, tmp_path: Path, name: str, fields: dict[str, Any], version: str, told: str
) -> None:
    folder = changed(tmp_path / "drafter", name, **fields)
    out = tmp_path / "out"
    status, _, complaints = run(TARGET, "-d", folder, "--vllm-version", version, "--out", str(out))
    assert status == 2 and told in complaints and not out.exists()
    status, output, _ = run(TARGET, "-d", folder, "--vllm-version", version, "--out", str(out), "--force")
    assert status == 0 and output.startswith("wrote") and out.exists()


def test_more_draft_tokens_than_trained(run: Any, tmp_path: Path) -> None:
    folder = changed(tmp_path / "drafter", "p-eagle-4", trained_draft_tokens=6)
    assert "-k 7: trained for 6" in run(TARGET, "-d", folder)[2]
    assert run(TARGET, "-d", folder, "-k", "6")[2] == ""


def test_different_files_are_kept(run: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert run(TARGET, "-d", DRAFTER, "--out", out)[0] == 0
    before = {path: path.read_text() for path in Path(out).iterdir()}
    assert run(TARGET, "-d", DRAFTER, "--out", out)[0] == 0, "equal files are no conflict"
    status, _, complaints = run(TARGET, "-d", DRAFTER, "-k", "3", "--out", out)
    assert status == 2 and "--overwrite" in complaints
    assert before == {path: path.read_text() for path in Path(out).iterdir()}
    assert run(TARGET, "-d", DRAFTER, "-k", "3", "--out", out, "--overwrite")[0] == 0
    assert '"num_speculative_tokens":3' in (Path(out) / "compose.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((TARGET, "-d", "nowhere/at/all"), "--drafter 'nowhere/at/all'"),
        ((TARGET, "-d", DRAFTER, "--format", "helm"), "--format helm"),
        ((TARGET, "-d", DRAFTER, "--format", "all"), "--out"),
        ((TARGET, "-d", DRAFTER, "--name", "My_LLM"), "--name My_LLM"),
        ((TARGET, "-d", DRAFTER, "--replicas", "0"), "--replicas 0"),
        ((TARGET, "-d", DRAFTER, "--env", "novalue"), "--env novalue"),
        ((TARGET, "-d", DRAFTER, "-k", "99"), "-k 99"),
        ((TARGET, "-d", DRAFTER, "--vllm-version", "new"), "new"),
        ((TARGET,), "--drafter"),
    ],
)  # fmt: skip
def test_wrong_command_line_is_one_line(run: Any, arguments: tuple[str, ...], named: str) -> None:
    status, output, complaints = run(*arguments)
    assert status == 2 and not output
    assert complaints.startswith("peagle: error:") and len(complaints.splitlines()) == 1 and named in complaints
