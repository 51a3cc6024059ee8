"""`peagle hidden-states` sends every row once; training on the written states equals training with the target."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pairs
import pytest
import runs
import torch
from safetensors.torch import save_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, GptOssConfig, GptOssForCausalLM
from typer.testing import CliRunner

from peagle.checkpoints.target import load_decoder, read_target_config
from peagle.cli.app import app
from peagle.config import RopeConfig
from peagle.errors import UserError
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.training.hidden_states import vllm as vllm
from peagle.training.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")
AUX_LAYER_IDS = (1, 2, 4)


class FakeVllmServer(BaseHTTPRequestHandler):
    """Writes a file for each prompt of token ids, with `late` only after the next prompt."""

    protocol_version = "HTTP/1.1"
    target: Decoder
    folder: Path
    late = False
    prompts: list[list[int]] = []
    unwritten: list[list[int]] = []
    lock = threading.Lock()

    def log_message(self, *args: Any) -> None:
        pass

    def reply(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and body["model"] == "tiny" and body["max_tokens"] == 1
        with self.lock:
            self.prompts.append(body["prompt"])
            self.unwritten.append(body["prompt"])
            while len(self.unwritten) > self.late:
                self.write(self.unwritten.pop(0), len(self.prompts))
        self.reply({"choices": [{"text": "?"}]})

    def write(self, ids: list[int], number: int) -> None:
        token_T = torch.tensor(ids)
        layers = (*AUX_LAYER_IDS, self.target.cfg.num_layers)
        with torch.inference_mode():
            aux_hidden_states_TX = self.target(token_T, torch.arange(len(ids)), causal_attention, layers)[1]
        assert aux_hidden_states_TX is not None
        states = {"hidden_states": aux_hidden_states_TX.unflatten(1, (len(layers), -1)).clone(), "token_ids": token_T}
        save_file(states, self.folder / f"cmpl-{id(self.server)}-{number}.safetensors")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[str]]:
    FakeVllmServer.target, FakeVllmServer.folder = load_decoder(pairs.target_folder()), tmp_path / "states"
    FakeVllmServer.prompts, FakeVllmServer.unwritten, FakeVllmServer.late = [], [], False
    started = [ThreadingHTTPServer(("127.0.0.1", 0), FakeVllmServer) for _ in range(2)]
    for server in started:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_port}" for server in started]
    for server in started:
        server.shutdown()
        server.server_close()


def recipe(home: Path, **settings: Any) -> Recipe:
    return runs.recipe(
        home, **{"init": "random", "aux_layer_ids": AUX_LAYER_IDS, "steps": 4, "log_every": 1, **settings}
    )


def states(home: Path, *flags: str) -> Any:
    return CliRunner().invoke(app, ["hidden-states", "--recipe", str(home / "r.toml"), *flags])


def test_training_on_states_written_by_servers(tmp_path: Path, servers: list[str]) -> None:
    made = recipe(tmp_path, vllm_hidden_states=str(tmp_path / "states"))
    (tmp_path / "r.toml").write_text(made.toml())
    assert made.train.target_head_only
    to_both = [word for url in servers for word in ("--endpoint", url)]
    FakeVllmServer.late = True  # so the last file comes only if somebody asks again
    done = states(tmp_path, *to_both, "--concurrency", "2")
    assert done.exit_code == 0 and "0 of 48 rows have a file; sending 48" in done.output, done.exception
    sent = [prompt for prompt in FakeVllmServer.prompts if len(prompt) > 1]
    rows = [json.loads(line)["token_ids"] for line in (tmp_path / "responses.jsonl").read_text().splitlines()]
    assert sorted(sent) == sorted(rows)
    FakeVllmServer.late, FakeVllmServer.prompts = False, []
    lost = next(path for path in (tmp_path / "states").iterdir() if path.stat().st_size > 5000)
    lost.unlink()
    done = states(tmp_path, *to_both)
    assert "47 of 48 rows have a file; sending 1" in done.output and len(FakeVllmServer.prompts) == 1
    done = states(tmp_path, *to_both)
    assert "48 of 48 rows have a file; sending 0" in done.output and len(FakeVllmServer.prompts) == 1

    kept: list[torch.Tensor] = []
    for name, recipe_ in (("read", made), ("online", recipe(tmp_path))):
        process = runs.start(recipe_, tmp_path / name)
        assert process.wait() == 0, process.stderr()
        kept.append(runs.saved(tmp_path / name)["masters"])
    read, online = kept
    largest = float(online.abs().max())
    assert torch.allclose(read, online, rtol=1e-3, atol=1e-5 * largest) and (read - online).norm() < 1e-4 * largest


def test_vllm_serve_command(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(recipe(tmp_path, vllm_hidden_states=str(tmp_path / "states")).toml())
    words = shlex.split(states(tmp_path).output)
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["vllm", "serve", str(tmp_path / "target")] and options["--max-model-len"] == "65"
    config = json.loads(options["--speculative-config"])
    assert config["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5]}
    connector = json.loads(options["--kv-transfer-config"])
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path / "states")}


def test_servers_that_write_to_another_folder(
    tmp_path: Path, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "FILE_TIMEOUT_S", 0.3)
    FakeVllmServer.folder = tmp_path / "elsewhere"
    FakeVllmServer.folder.mkdir()
    (tmp_path / "r.toml").write_text(recipe(tmp_path, vllm_hidden_states=str(tmp_path / "states")).toml())
    done = states(tmp_path, "--endpoint", servers[0])
    assert isinstance(done.exception, UserError) and "48 rows have no file, first 'r0#0'" in str(done.exception)
    (tmp_path / "r.toml").write_text(recipe(tmp_path).toml())
    done = states(tmp_path)
    assert isinstance(done.exception, UserError) and "lacks vllm_hidden_states" in str(done.exception)


def test_head_of_an_unsupported_target(tmp_path: Path) -> None:
    """Gemma 4 with per-layer embeddings: its last hidden state through our norm and LM head gives its logits."""
    torch.manual_seed(0)
    text: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    }
    text |= {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1}
    text |= {"vocab_size": 160, "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 8}
    text |= {"attention_k_eq_v": True, "sliding_window": 8, "final_logit_softcapping": 30.0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 8}
    model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    layer_outputs: list[Any] = []
    model.model.language_model.layers[-1].register_forward_hook(lambda *got: layer_outputs.append(got[2]))
    with torch.inference_mode():
        logits_TV = model(input_ids=torch.randint(160, (1, 12))).logits[0]
        ours = load_decoder(tmp_path, skip_layers=True)
        out = layer_outputs[0][0] if isinstance(layer_outputs[0], tuple) else layer_outputs[0]
        mine_TV = ours.compute_logits(ours.norm(out.reshape(12, 32)))
    torch.testing.assert_close(mine_TV, logits_TV, rtol=1e-4, atol=1e-4)
    assert logits_TV.abs().max() > 3
    cfg = read_target_config(tmp_path, skip_layers=True)
    assert cfg.num_layers == 6 and cfg.default_aux_layer_ids == (2, 3) and cfg.rope.as_llama == RopeConfig(theta=1e6)


def test_head_of_an_mxfp4_target(tmp_path: Path) -> None:
    """GPT-OSS: embeddings, norm and LM head equal those of the whole target, and no layer is built."""
    shape = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    GptOssForCausalLM(GptOssConfig(vocab_size=96, **shape)).save_pretrained(tmp_path)
    whole, tables = load_decoder(tmp_path), load_decoder(tmp_path, skip_layers=True)
    for name in ("embed_tokens.weight", "norm.weight", "lm_head.weight"):
        assert torch.equal(whole.get_parameter(name), tables.get_parameter(name))
    assert {name for name, _ in tables.named_parameters()} == {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
