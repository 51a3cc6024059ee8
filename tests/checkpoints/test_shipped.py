"""The drafters that come with the package: a wheel contains them, and their weights are intact.

A drafter with damaged weights still loads, and greedy output does not depend on it. Damage only lowers acceptance, and
damage to P-EAGLE's mask rows only at draft positions 2 to K. So the tests measure the match rate at each position.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from support import edit_config, edit_weights
from torch import Tensor

from peagle.checkpoints.drafter import load_drafter
from peagle.checkpoints.target import encode_prompt, load_decoder, load_tokenizer
from peagle.config import MASK_TOKEN_ID_KEYS
from peagle.hub.resolve import DEFAULT_DRAFTER, EAGLE3_DRAFTER, resolve_drafter
from peagle.kernels.attention.dense import causal_attention, masked_attention

REPO = Path(__file__).resolve().parents[2]
MAX_TOTAL_BYTES = 45_000_000  # of both drafters: every version stays in the git history
K = 6
# Prompts and the target's greedy responses to them.
CONVERSATIONS = {
    "What is the capital of France? Say a little about it.": "The capital of France is Paris. It's a city steeped in "
    "history and culture, known for its iconic landmarks like the Eiffel Tower, Louvre Museum, Notre Dame Cathedral, "
    "and the Palace of",
    "Write a Python function that returns the sum of a list.": "```python\ndef sum_list(lst):\n    return sum(lst)\n"
    "```\n\nThis function uses the built-in `sum` function to calculate the sum of the input list.",
    "Explain in a few sentences why the sky is blue.": "The sky is blue because of a process called Rayleigh "
    "scattering, where light encounters tiny molecules of air, causing them to scatter in different directions. When "
    "sunlight reaches our atmosphere, it encounters molecules of air",
}


class Replay:
    """The conversations with the target's auxiliary hidden states, computed once for all drafters."""

    def __init__(self, folder: Path) -> None:
        self.target = load_decoder(folder)
        self.aux_layer_ids = (2, 15, 27)
        tokenizer = load_tokenizer(folder)
        self.sequences: list[tuple[list[int], int, Tensor]] = []
        for prompt, response in CONVERSATIONS.items():
            prompt_ids = encode_prompt(tokenizer, prompt, raw=False)
            tokens = prompt_ids + list(tokenizer(response)["input_ids"])
            positions_T = torch.arange(len(tokens))
            _, aux = self.target(torch.tensor(tokens), positions_T, causal_attention, self.aux_layer_ids)
            aux_TN = aux if isinstance(aux, Tensor) else torch.cat(list(aux), -1)
            self.sequences.append((tokens, len(prompt_ids), aux_TN))

    @torch.inference_mode()
    def match_rates(self, folder: Path, k: int = K) -> list[float]:
        """At each draft position, the share of draft tokens that equal the target's token.

        One drafter pass drafts from all positions of a sequence: the ordinary rows, and for each anchor k - 1 mask
        rows, which see the ordinary rows up to the anchor and the mask rows before them.
        """
        drafter = load_drafter(folder, self.target)
        matches = torch.zeros(k)
        count = 0
        for tokens, num_prompt_tokens, aux_TN in self.sequences:
            num_rows = len(tokens) - 1
            # The row at position p predicts the token at p + 2; the last draft is k - 1 tokens later.
            anchors = torch.arange(num_prompt_tokens - 1, len(tokens) - 1 - k)
            anchor_M = anchors.repeat_interleave(k - 1)
            depth_M = torch.arange(1, k).repeat(len(anchors))
            token_ids = torch.tensor(tokens[1:])
            hidden_TD = drafter.combine_hidden_states(aux_TN[:-1])
            if k > 1:
                mask_ids = torch.full((len(anchor_M),), drafter.cfg.mask_token_id or 0)
                token_ids = torch.cat([token_ids, mask_ids])
                hidden_TD = torch.cat([hidden_TD, drafter.mask_hidden_states(len(anchor_M))])
            anchor_T = torch.cat([torch.arange(num_rows), anchor_M])
            depth_T = torch.cat([torch.zeros(num_rows, dtype=torch.long), depth_M])
            ordinary = (depth_T == 0) & (anchor_T <= anchor_T[:, None])
            own_chain = (anchor_T == anchor_T[:, None]) & (depth_T <= depth_T[:, None])
            visible = ordinary | own_chain

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, visible=visible) -> Tensor:
                return masked_attention(q, k, v, visible)

            normed_TD, _ = drafter(token_ids, hidden_TD, anchor_T + depth_T, attend)
            first_AK = torch.cat([anchors[:, None], num_rows + torch.arange(len(anchor_M)).view(len(anchors), -1)], 1)
            drafts_AK = drafter.compute_logits(normed_TD[first_AK.flatten()]).argmax(-1).view(first_AK.shape)
            expected_AK = torch.tensor(tokens)[anchors[:, None] + 2 + torch.arange(k)]
            matches += (drafts_AK == expected_AK).sum(0)
            count += len(anchors)
        return (matches / count).tolist()


@pytest.fixture(scope="module")
def replay(smollm2: Path) -> Replay:
    with torch.inference_mode():
        return Replay(smollm2)


# Measured: 0.82 0.64 0.53 0.43 0.39 0.34 and 0.77. The margins are 3 or 4 of 102 drafts, for other rounding.
MIN_MATCH_RATES = (0.79, 0.60, 0.49, 0.40, 0.36, 0.31)
MIN_EAGLE3_MATCH_RATE = 0.73


def passes(match_rates: list[float]) -> bool:
    return all(rate >= minimum for rate, minimum in zip(match_rates, MIN_MATCH_RATES, strict=True))


def test_p_eagle_weights_are_intact(replay: Replay) -> None:
    rates = replay.match_rates(resolve_drafter(DEFAULT_DRAFTER))
    assert passes(rates), rates


def test_eagle3_weights_are_intact(replay: Replay) -> None:
    (rate,) = replay.match_rates(resolve_drafter(EAGLE3_DRAFTER), k=1)
    assert rate >= MIN_EAGLE3_MATCH_RATE


Weights, Config = dict[str, Tensor], dict[str, Any]


def zero_mask_hidden(weights: Weights, config: Config) -> None:
    weights["mask_hidden"].zero_()


def randomize_mask_hidden(weights: Weights, config: Config) -> None:
    mask_hidden = weights["mask_hidden"]
    noise = torch.randn(mask_hidden.shape, generator=torch.Generator().manual_seed(0))
    mask_hidden.copy_(noise * mask_hidden.float().std())


def change_mask_token(mask_token_id: int) -> Callable[[Weights, Config], None]:
    return lambda weights, config: config.update(dict.fromkeys(MASK_TOKEN_ID_KEYS, mask_token_id))


def remove_layer(removed: int) -> Callable[[Weights, Config], None]:
    def change(weights: Weights, config: Config) -> None:
        num_layers = config["num_hidden_layers"]
        for name in [name for name in weights if name.startswith(f"layers.{removed}.")]:
            del weights[name]
        for layer in range(removed + 1, num_layers):
            for name in [name for name in weights if name.startswith(f"layers.{layer}.")]:
                weights[name.replace(f"layers.{layer}.", f"layers.{layer - 1}.")] = weights.pop(name)
        config["num_hidden_layers"] = num_layers - 1

    return change


def swap_aux_layers(first: int, second: int) -> Callable[[Weights, Config], None]:
    def change(weights: Weights, config: Config) -> None:
        blocks = list(weights["fc.weight"].chunk(3, 1))
        blocks[first], blocks[second] = blocks[second], blocks[first]
        weights["fc.weight"] = torch.cat(blocks, 1).contiguous()

    return change


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(zero_mask_hidden, id="mask_hidden zeroed"),
        pytest.param(randomize_mask_hidden, id="mask_hidden random"),
        pytest.param(change_mask_token(17), id="another reserved token as mask"),
        pytest.param(change_mask_token(500), id="an ordinary token as mask"),
        *(pytest.param(remove_layer(i), id=f"layer {i} removed") for i in (1, 2, 3)),
        pytest.param(swap_aux_layers(0, 1), id="auxiliary layers 0 and 1 swapped"),
        pytest.param(swap_aux_layers(1, 2), id="auxiliary layers 1 and 2 swapped"),
    ],
)
def test_damage_is_detected(damage: Callable[[Weights, Config], None], replay: Replay, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_drafter(DEFAULT_DRAFTER), tmp_path / "damaged"))
    edit_weights(folder, lambda weights: edit_config(folder, lambda config: damage(weights, config)))
    rates = replay.match_rates(folder)
    assert not passes(rates), rates


def test_wheel_contains_the_drafters(tmp_path: Path) -> None:
    # By metadata: importing setuptools fails if another test has loaded distutils before.
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("the build needs setuptools 77")
    source, built = tmp_path / "source", tmp_path / "built"
    shutil.copytree(REPO / "peagle", source / "peagle", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(REPO / name, source)
    (source / "checkpoints").symlink_to(REPO / "checkpoints")
    stale = built / "peagle" / "drafters" / DEFAULT_DRAFTER / "model-00001-of-00009.safetensors"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of an earlier build")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not stale.exists()
    package_files = {path.relative_to(source) for path in (source / "peagle").rglob("*") if path.is_file()}
    missing = [path for path in package_files if not (built / path).is_file()]
    assert not missing
    code = "from peagle.hub.resolve import *\nprint(*map(resolve_drafter, shipped_drafters()), sep='\\n')"
    env = {**os.environ, "PYTHONPATH": str(built)}
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    folders = [Path(line) for line in found.stdout.splitlines()]
    assert [folder.name for folder in folders] == [EAGLE3_DRAFTER, DEFAULT_DRAFTER], found.stderr
    total_bytes = 0
    for folder in folders:
        assert folder.is_relative_to(built)
        original = REPO / "checkpoints" / folder.name
        expected = {path.name for path in original.iterdir() if path.suffix in (".safetensors", ".json", ".md")}
        assert {path.name for path in folder.iterdir()} == expected
        assert all(filecmp.cmp(folder / name, original / name, shallow=False) for name in expected)
        total_bytes += sum(path.stat().st_size for path in original.iterdir())
    assert total_bytes < MAX_TOTAL_BYTES
