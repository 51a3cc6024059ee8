"""The model card of a trained drafter: README.md in its folder."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from peagle.checkpoints.validate import build_speculative_config
from peagle.models.drafter import Drafter
from peagle.training.drafter_init import INIT_MODES
from peagle.training.recipe import TrainingInputs
from peagle.training.resume import TrainingState
from peagle.training.validation import ValidationAcceptance
from peagle.versions import installed_versions

CARD_FILE = "README.md"
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["shell"] = shlex.quote


def format_card(
    inputs: TrainingInputs,
    name: str,
    drafter: Drafter,
    state: TrainingState,
    acceptance: Sequence[ValidationAcceptance],
) -> str:
    """`acceptance` has one entry per number of draft tokens."""
    target, cfg, train_set, shape = inputs.recipe.target, inputs.recipe.train, inputs.train_set, drafter.cfg
    vocabulary = f"the target's {shape.vocab_size:,} tokens"
    return TEMPLATES.get_template("card.md.jinja").render(
        name=name,
        recipe=inputs.recipe,
        cfg=cfg,
        method="P-EAGLE" if shape.parallel else "EAGLE-3",
        passes="all draft tokens in one pass" if shape.parallel else "one draft token per pass",
        is_hub_id=re.fullmatch(r"[\w.-]+/[\w.-]+", target) and not target.startswith("."),
        acceptance=acceptance,
        prompt='"The sky is" --raw' if cfg.raw else '"Why is the sky blue?"',
        speculative_config=json.dumps(build_speculative_config("DIR", cfg.num_depths, shape.parallel)),
        command=shlex.join(["peagle", *sys.argv[1:]]),
        versions=installed_versions(),
        model={
            "layers": shape.num_layers,
            "parameters": f"{sum(p.numel() for p in drafter.parameters()):,}",
            "trained draft tokens (K)": cfg.num_depths,
            "auxiliary hidden state layers": ", ".join(map(str, shape.aux_layer_ids)),
            "embeddings": "own" if shape.own_embeddings else "the target's",
            "LM head": "own" if shape.own_head else "the target's",
            "vocabulary": f"{shape.draft_vocab_size:,} of {vocabulary}" if shape.reduced_vocab else vocabulary,
            "mask token": "none" if shape.mask_token_id is None else f"id {shape.mask_token_id}",
        },
        data={
            "conversations": f"{len(train_set):,}",
            "tokens": f"{train_set.num_tokens:,}, of which {inputs.response_share:.0%} are the target's responses",
            "validation set": f"{len(inputs.validation_set):,} conversations",
            "files": ", ".join(Path(path).name for path in inputs.recipe.data),
        },
        training={
            "steps": f"{state.step:,} of {cfg.batch_tokens * cfg.gradient_accumulation_steps:,} tokens per GPU",
            "tokens seen": f"{state.tokens:,}",
            "minutes": f"{state.seconds / 60:.1f}",
            "loss": f"{cfg.objective}, {cfg.loss_weighting} weighting, depth decay {cfg.depth_decay:g}",
            "COD sampling": f"{cfg.num_depths} depths, down-sample ratio {cfg.down_sample_ratio:g}",
            "learning rate": f"{cfg.lr:g}, {cfg.lr_schedule}",
            "initial weights": cfg.init if cfg.init in INIT_MODES else Path(cfg.init).name,
        },
    )
