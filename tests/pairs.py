"""A small trained target and small trained drafters, so that acceptance rates are neither 0 nor 1.

The target is a byte-level Llama that is trained on a text (this project's licence) until it can continue any part of
it. The drafters are trained on its outputs. They are in `fixtures/pairs`, 0.1 to 0.6 MB each. To train them again:

    python tests/pairs.py --device cuda [NAME ...]      # `target` first, then the drafters
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import dense_reference as dense
import torch

from peagle.checkpoints.drafter import load_drafter, save_drafter
from peagle.checkpoints.files import save_checkpoint
from peagle.checkpoints.target import load_decoder
from peagle.checkpoints.tensors import build_layout, split_parameters
from peagle.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter

ROOT = Path(__file__).parent.parent
FIXTURES = Path(__file__).parent / "fixtures" / "pairs"
TEXT = (ROOT / "LICENSE").read_bytes()
VOCAB = 160  # bytes of the text are all below 128; the rest is never emitted
MASK_ID = 150
EOS_ID = 140
TARGET = DecoderConfig(
    family="llama",
    vocab_size=VOCAB,
    num_layers=5,
    layer=LayerConfig(64, 160, num_heads=4, num_kv_heads=2, head_dim=32),
    rope=RopeConfig(),
    max_positions=256,
    tie_word_embeddings=False,
    windows=(None,) * 5,
)
BASE = DrafterConfig(
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    num_layers=1,
    layer=LayerConfig(64, 160, num_heads=4, num_kv_heads=2, head_dim=32),
    rope=RopeConfig(),
    max_positions=256,
    target_hidden_size=64,
    aux_layer_ids=(1, 2, 4),
)
REDUCED = 28  # of about 80 different bytes in the text


@dataclass(frozen=True)
class Recipe:
    cfg: DrafterConfig
    steps: int
    depths: int


def _recipes() -> dict[str, Recipe]:
    wide = LayerConfig(96, 192, num_heads=3, num_kv_heads=1, head_dim=32)
    parallel = replace(BASE, mask_token_id=MASK_ID)
    own = {"own_embeddings": True, "own_head": True}
    reduced = {"draft_vocab_size": REDUCED, "own_head": True}
    kinds = {
        "p-eagle-1": parallel,
        "p-eagle-4": replace(parallel, num_layers=4, own_embeddings=True),
        "p-eagle-1-reduced": replace(parallel, **reduced, norm_before_residual=True),
        "p-eagle-4-reduced": replace(parallel, num_layers=4, **reduced, fc_norm=True),
        "p-eagle-1-wide": replace(parallel, layer=wide, norm_before_fc=True, aux_layer_ids=(1, 2, 4, 5), **own),
        "eagle3-1": BASE,
        "eagle3-4": replace(BASE, num_layers=4, **own),
        "eagle3-1-reduced": replace(BASE, **reduced, norm_before_residual=True),
        "eagle3-4-reduced": replace(BASE, num_layers=4, **reduced, norm_output=True, fc_norm=True),
    }
    return {name: Recipe(cfg, 700 if cfg.parallel else 400, 6 if cfg.parallel else 3) for name, cfg in kinds.items()}


RECIPES = _recipes()


def target_folder() -> Path:
    return FIXTURES / "target"


def drafter_folder(name: str) -> Path:
    assert name in RECIPES, name
    return FIXTURES / name


def load_pair(name: str) -> tuple[Decoder, Drafter]:
    target = load_decoder(target_folder())
    return target, load_drafter(drafter_folder(name), target)


def prompts(count: int, length: int = 24) -> list[list[int]]:
    """Prompts: pieces of the text at evenly spaced positions."""
    step = (len(TEXT) - 200) // count
    return [list(TEXT[i * step : i * step + length + i % 5]) for i in range(count)]


def initialise(module: torch.nn.Module, seed: int, scale: float = 0.05) -> None:
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if name == "mask_hidden" else scale, generator=rng)


def text_batch(batch: int, length: int, rng: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(TEXT) - length, (batch,), generator=rng)
    return torch.stack([torch.tensor(list(TEXT[s : s + length])) for s in starts.tolist()])


def train_target(device: str, steps: int = 1500) -> Decoder:
    model = Decoder(TARGET)
    initialise(model, seed=0)
    model.to(device)
    rng = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    attend = dense.masked_attention(32, None)
    positions = torch.arange(95, device=device).repeat(32)
    for _ in range(steps):
        tokens = text_batch(32, 96, rng).to(device)
        hidden, _ = model(tokens[:, :-1].flatten(), positions, attend)
        loss = torch.nn.functional.cross_entropy(model.compute_logits(hidden), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"target: loss {loss.item():.3f}", flush=True)
    return model


def train_drafter(target: Decoder, recipe: Recipe, device: str) -> Drafter:
    drafter = Drafter(recipe.cfg).share_weights(target)
    initialise(drafter, seed=1)
    if drafter.d2t is not None:
        common = torch.bincount(torch.tensor(list(TEXT)), minlength=VOCAB).topk(len(drafter.d2t)).indices
        drafter.d2t.copy_(common.sort().values - torch.arange(len(drafter.d2t)))
    drafter.to(device)
    rng = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, recipe.steps)
    for _ in range(recipe.steps):
        tokens = text_batch(16, 80, rng).to(device)
        rows = dense.sample_nested_positions(80, recipe.depths, 0.8, rng)
        rows = dense.DensePositions(rows.anchor_R.to(device), rows.depth_R.to(device))
        loss = dense.loss(drafter, target, tokens, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"drafter: loss {loss.item():.3f}", flush=True)
    return drafter


def save_target(model: Decoder, folder: Path) -> None:
    cfg = model.cfg
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.layer.hidden_size,
        "intermediate_size": cfg.layer.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.layer.num_heads,
        "num_key_value_heads": cfg.layer.num_kv_heads,
        "head_dim": cfg.layer.head_dim,
        "rms_norm_eps": cfg.layer.norm_eps,
        "max_position_embeddings": cfg.max_positions,
        "rope_theta": cfg.rope.theta,
        "tie_word_embeddings": False,
        "bos_token_id": EOS_ID - 1,
        "eos_token_id": EOS_ID,
        "dtype": "bfloat16",
    }
    tensors = split_parameters(model, build_layout(model, cfg.layer))
    named = {n if n.startswith("lm_head") else f"model.{n}": t for n, t in tensors.items()}
    save_checkpoint(named, values, folder)


def main() -> None:
    from peagle.config import SamplingParams
    from peagle.speculative.reference import generate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["target", *RECIPES])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--show", action="store_true", help="train nothing, show what the drafters accept")
    args = parser.parse_args()
    for name in args.names:
        if name == "target":
            if not args.show:
                save_target(train_target(args.device).to(torch.bfloat16), target_folder())
            continue
        if not args.show:
            target = load_decoder(target_folder(), device=args.device)
            save_drafter(train_drafter(target, RECIPES[name], args.device).to(torch.bfloat16), drafter_folder(name))
        target, drafter = load_pair(name)
        params = SamplingParams(max_tokens=40)
        runs = [generate(target, p, params, drafter=drafter, num_speculative_tokens=5) for p in prompts(8)]
        counts = [sum(c) for c in zip(*(r.num_accepted_tokens_per_pos for r in runs), strict=True)]
        print(json.dumps({"pair": name, "drafts": sum(r.num_drafts for r in runs), "accepted": counts}), flush=True)


if __name__ == "__main__":
    main()
