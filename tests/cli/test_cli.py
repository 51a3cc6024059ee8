"""The command line in real processes: exit status, and one line for every error."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from pairs import TEXT, drafter_folder, load_pair, target_folder
from support import set_config
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from peagle.checkpoints.drafter import save_drafter
from peagle.cli import main
from peagle.config import SamplingParams
from peagle.speculative.reference import generate


def peagle(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    run = forks.Process("-m", "peagle", *args, stdin=stdin.encode(), env=env)
    return subprocess.CompletedProcess(args, run.wait(), run.stdout(), run.stderr())


def from_scratch(*args: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Runs in a new interpreter."""
    run = subprocess.run([sys.executable, "-m", "peagle", *args], input=stdin, capture_output=True, timeout=300)
    return subprocess.CompletedProcess(args, run.returncode, run.stdout.decode(), run.stderr.decode())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small target with a tokenizer of one token per character."""
    folder = tmp_path_factory.mktemp("target") / "t"
    shutil.copytree(target_folder(), folder)
    letters = {chr(i): i for i in range(128)}
    model = Tokenizer(WordLevel(letters, unk_token="?"))
    model.pre_tokenizer = Split("", "isolated")
    model.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def test_json_equals_the_reference(target: Path) -> None:
    prompt = TEXT[600:630].decode()
    drafter = drafter_folder("p-eagle-4")
    run = peagle("generate", prompt, "-t", str(target), "-d", str(drafter), "-k", "5", "--max-tokens", "50", "--json")
    assert run.returncode == 0, run.stderr
    output = json.loads(run.stdout)
    expected = generate(*_pair("p-eagle-4", prompt), SamplingParams(max_tokens=50), **_drafting("p-eagle-4", 5))
    assert output["token_ids"] == expected.token_ids
    assert output["text"] == "".join(map(chr, expected.token_ids))
    assert output["num_decode_steps"] == len(expected.steps) and output["num_drafts"] == expected.num_drafts
    assert output["num_accepted_tokens_per_pos"] == expected.num_accepted_tokens_per_pos
    assert output["is_draft_token"] == expected.is_draft_token and any(output["is_draft_token"])
    alone = peagle("generate", prompt, "-t", str(target), "--max-tokens", "50", "--json")
    assert json.loads(alone.stdout)["token_ids"] == output["token_ids"]


def _pair(name: str, prompt: str) -> tuple:
    return load_pair(name)[0], list(prompt.encode())


def _drafting(name: str, k: int) -> dict:
    return {"drafter": load_pair(name)[1], "num_speculative_tokens": k}


def test_text_is_plain_when_piped_and_coloured_when_forced(target: Path) -> None:
    ask = ("generate", "-", "-t", str(target), "-d", str(drafter_folder("p-eagle-4")), "--max-tokens", "40", "--raw")
    prompt = TEXT[900:930].decode()
    plain = peagle(*ask, stdin=prompt)
    assert plain.returncode == 0 and "\x1b" not in plain.stdout
    coloured = peagle(*ask, stdin=prompt, FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="200")
    assert "\x1b[" in coloured.stdout
    wanted = generate(*_pair("p-eagle-4", prompt), SamplingParams(max_tokens=40))
    assert plain.stdout.rstrip("\n") == "".join(map(chr, wanted.token_ids)).rstrip("\n")


def test_sampling_is_repeatable_by_seed(target: Path) -> None:
    ask = ("generate", TEXT[0:40].decode(), "-t", str(target), "--temperature", "1.5", "--max-tokens", "30", "--json")
    first, again, other = (json.loads(peagle(*ask, "--seed", seed).stdout)["token_ids"] for seed in ("1", "1", "0"))
    assert first == again != other


def truncated(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return out


def not_a_config(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    (out / "config.json").write_text("[1, 2, 3]")
    return out


def test_bad_input_gets_one_line_and_status_2(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Runs `main` in this process: importing torch for every case would take minutes."""
    t, d = str(target), str(drafter_folder("p-eagle-1"))
    stranger = tmp_path / "stranger"
    shutil.copytree(drafter_folder("p-eagle-1"), stranger)
    set_config(stranger, target_hidden_size=96, vocab_size=320)
    unknown = tmp_path / "unknown"
    shutil.copytree(target, unknown)
    set_config(unknown, architectures=["NobodysForCausalLM"], model_type="nobodys")
    cases: list[tuple[tuple[str, ...], str]] = [
        (("generate", "hi", "-t", str(tmp_path / "nowhere")), "no such folder"),
        (("generate", "hi", "-t", t, "-d", str(tmp_path / "nowhere")), "no such folder"),
        (("generate", "hi", "-t", str(truncated(target, tmp_path / "cut"))), "truncated"),
        (("generate", "hi", "-t", t, "-d", str(truncated(Path(d), tmp_path / "cut2"))), "truncated"),
        (("generate", "hi", "-t", str(not_a_config(target, tmp_path / "list"))), "JSON object"),
        (("generate", "hi", "-t", t, "-d", str(not_a_config(Path(d), tmp_path / "list2"))), "JSON object"),
        (("generate", "hi", "-t", str(unknown)), "LlamaForCausalLM"),
        (("generate", "hi", "-t", t, "-d", str(stranger)), "does not fit the target"),
        (("generate", "hi", "-t", t, "-d", d, "-k", "0"), "-k 0"),
        (("generate", "hi", "-t", t, "-d", d, "-k", "500"), "-k 500"),
        (("generate", "", "-t", t), "prompt is empty"),
        (("generate", " \n ", "-t", t), "prompt is empty"),
        (("generate", "x" * 300, "-t", t), "300 tokens"),
        (("generate", "hi", "-t", t, "--max-tokens", "0"), "--max-tokens 0"),
        (("generate", "hi", "-t", t, "--temperature", "-1"), "--temperature -1"),
        (("generate", "hi", "-t", t, "--temperature", "nan"), "--temperature nan"),
        (("generate", "hi", "-t", t, "--top-p", "0"), "--top-p 0"),
        (("generate", "hi", "-t", t, "--seed", "-3"), "--seed -3"),
        (("generate", "hi", "-t", t, "--dtype", "int3"), "--dtype int3"),
        (("generate", "hi", "-t", t, "--kv-cache-dtype", "int4"), "--kv-cache-dtype int4"),
        (("generate", "hi", "-t", t, "--quantization", "int4"), "--quantization int4"),
        (("generate", "hi", "-t", t, "--device", "abacus"), "--device abacus"),
        (("generate", "hi", "-t", str(target_folder())), "tokenizer"),
        (("generate", "hi", "--frobnicate"), "--frobnicate"),
        (("frobnicate",), "frobnicate"),
        (("inspect", str(tmp_path / "nowhere")), "no such folder"),
        (("inspect", d, "--vllm-version", "new"), "--vllm-version new"),
        (("inspect", d, "-k", "0"), "-k 0"),
        (("convert", d, str(tmp_path / "o"), "--to", "gguf", "-t", t), "--to gguf"),
        (("convert", d, str(tmp_path / "o"), "--to", "plain", "-t", t), "already"),
        (("convert", d, t, "--to", "speculators", "-t", t), "exists already"),
        (("average", d, "--out", str(tmp_path / "o")), "give two or more"),
        (("average", d, d, "--out", t), "exists already"),
        (("average", d, d, "--out", str(tmp_path / "o"), "--weights", "1,x"), "--weights 1,x"),
        (("average", d, d, "--out", str(tmp_path / "o"), "--weights", "1,-1"), "2 numbers above 0"),
    ]
    for args, wanted in cases:
        monkeypatch.setattr(sys, "argv", ["peagle", *args])
        with pytest.raises(SystemExit) as exit:
            main()
        out, err = capfd.readouterr()
        assert exit.value.code == 2, (args, err)
        assert out == "" and err.count("\n") == 1 and err.startswith("peagle: error: "), (args, out, err)
        assert wanted in err, (args, err)


def test_an_error_in_a_real_process(target: Path) -> None:
    run = from_scratch("generate", "hi", "-t", str(target), "-d", "nowhere/at/all")
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("\n") == 1 and "--drafter" in run.stderr


def test_stdin_that_is_not_utf8(target: Path) -> None:
    run = from_scratch("generate", "-", "-t", str(target), stdin=b"\xff\xfe\x00")
    assert run.returncode == 2 and "UTF-8" in run.stderr and run.stderr.count("\n") == 1


def test_inspect_exits_1_for_findings(target: Path, tmp_path: Path) -> None:
    good = from_scratch("inspect", str(drafter_folder("p-eagle-1-wide")), "-t", str(target))
    assert good.returncode == 0, good
    assert '"num_speculative_tokens":7,"parallel_drafting":true' in good.stdout and "vllm serve" in good.stdout
    _, drafter = load_pair("p-eagle-1")
    drafter.fc.weight.data[0, 0] = float("nan")
    save_drafter(drafter, tmp_path / "nan")
    bad = peagle("inspect", str(tmp_path / "nan"), "-t", str(target))
    assert bad.returncode == 1
    assert [line for line in bad.stdout.splitlines() if line.startswith("PROBLEM")] == [
        "PROBLEM  tensor 'fc.weight' holds 1 NaN or infinite values"
    ]
    listed = peagle("inspect", str(tmp_path / "nan"), "--json")
    assert listed.returncode == 1 and len(json.loads(listed.stdout)["findings"]) == 1


def test_convert_there_and_back(target: Path, tmp_path: Path) -> None:
    source, there, back = drafter_folder("p-eagle-1"), tmp_path / "there", tmp_path / "back"
    assert from_scratch("convert", str(source), str(there), "--to", "speculators", "-t", str(target)).returncode == 0
    assert json.loads((there / "config.json").read_text())["speculators_model_type"] == "peagle"
    assert peagle("convert", str(there), str(back), "--to", "plain", "-t", str(target)).returncode == 0
    for file in ("config.json", "model.safetensors"):
        assert (back / file).read_bytes() == (source / file).read_bytes(), file


def test_the_average_of_a_drafter_and_itself_is_that_drafter(target: Path, tmp_path: Path) -> None:
    source, mean = drafter_folder("p-eagle-1"), tmp_path / "mean"
    output = peagle("average", str(source), str(source), "--out", str(mean), "--weights", "3,1")
    assert output.returncode == 0 and "the average of 2 drafters" in output.stdout
    assert (mean / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert peagle("inspect", str(mean), "-t", str(target)).returncode == 0


@pytest.mark.usefixtures("smollm2")
def test_ctrl_c_keeps_the_output_and_shows_no_traceback() -> None:
    run = forks.Process("-m", "peagle", "generate", "Tell me a long story.", "--max-tokens", "500")
    run.wait_until(lambda: len(run.stdout()) >= 20)
    first = run.stdout()
    run.kill(signal.SIGINT)
    assert run.wait() == 130 and "Traceback" not in run.stderr()
    assert len(first) >= 20 and run.stdout().startswith(first)


def test_tune_writes_a_cost_table(target: Path, tmp_path: Path) -> None:
    ask = ("tune", "-t", str(target), "-d", str(drafter_folder("p-eagle-1")), "--device", "cpu")
    ask += ("--max-model-len", "64", "--max-num-seqs", "2", "--acceptance-rates", "0.8,0.6,0.5")
    table = tmp_path / "costs.json"
    shown = from_scratch(*ask, "--cost-table", str(table))
    assert shown.returncode == 0 and "best K" in shown.stdout and str(table) in shown.stdout
    steps = json.loads(table.read_text())["steps"]
    assert {row["num_draft_tokens"] for row in steps} == {0, 1, 2, 3, 5, 7} and all(row["ms"] > 0 for row in steps)
    wrong = peagle(*ask[:-1], "0.5,0.6")
    assert wrong.returncode == 2 and "--acceptance-rates 0.5,0.6" in wrong.stderr
