"""The model card of a trained drafter: README.md in its folder."""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from peagle.checkpoints.validate import build_speculative_config
from peagle.models.drafter import Drafter
from peagle.training.drafter_init import INIT_MODES
from peagle.training.recipe import TrainingInputs
from peagle.training.resume import TrainingState
from peagle.training.validation import ValidationAcceptance
from peagle.versions import installed_versions

CARD_FILE = "README.md"


def format_card(
    inputs: TrainingInputs,
    name: str,
    drafter: Drafter,
    state: TrainingState,
    acceptance: Sequence[ValidationAcceptance],
) -> str:
    """`acceptance` has one entry per number of draft tokens."""
    target, cfg, shape = inputs.recipe.target, inputs.recipe.train, drafter.cfg
    method = "P-EAGLE" if shape.parallel else "EAGLE-3"
    passes = "all draft tokens in one pass" if shape.parallel else "one draft token per pass"
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", target) and not target.startswith(".")
    base_model = f"base_model: {target}\n" if is_hub_id else ""
    vocabulary = f"the target's {shape.vocab_size:,} tokens"
    model = {
        "layers": shape.num_layers,
        "parameters": f"{sum(p.numel() for p in drafter.parameters()):,}",
        "trained draft tokens (K)": cfg.num_depths,
        "auxiliary hidden state layers": ", ".join(map(str, shape.aux_layer_ids)),
        "embeddings": "own" if shape.own_embeddings else "the target's",
        "LM head": "own" if shape.own_head else "the target's",
        "vocabulary": f"{shape.draft_vocab_size:,} of {vocabulary}" if shape.reduced_vocab else vocabulary,
        "mask token": "none" if shape.mask_token_id is None else f"id {shape.mask_token_id}",
    }
    data = {
        "conversations": f"{len(inputs.train_set):,}",
        "tokens": f"{inputs.train_set.num_tokens:,}, of which {inputs.response_share:.0%} are the target's responses",
        "validation set": f"{len(inputs.validation_set):,} conversations",
        "files": ", ".join(Path(path).name for path in inputs.recipe.data),
    }
    training = {
        "steps": f"{state.step:,} of {cfg.batch_tokens * cfg.gradient_accumulation_steps:,} tokens per GPU",
        "tokens seen": f"{state.tokens:,}",
        "minutes": f"{state.seconds / 60:.1f}",
        "loss": f"{cfg.objective}, {cfg.loss_weighting} weighting, depth decay {cfg.depth_decay:g}",
        "COD sampling": f"{cfg.num_depths} depths, down-sample ratio {cfg.down_sample_ratio:g}",
        "learning rate": f"{cfg.lr:g}, {cfg.lr_schedule}",
        "initial weights": cfg.init if cfg.init in INIT_MODES else Path(cfg.init).name,
    }
    config = json.dumps(build_speculative_config("DIR", cfg.num_depths, shape.parallel))
    prompt = '"The sky is" --raw' if cfg.raw else '"Why is the sky blue?"'
    return f"""---
library_name: peagle
tags:
- speculative-decoding
- {method.lower()}
{base_model}---

# {name}

{method} drafter for `{target}`: it drafts the target's next tokens, {passes}, and the target verifies them, so the
output is the target's.

{_format_facts(model)}

## Acceptance

{_format_acceptance(acceptance, cfg.validation_tokens)}

## Use

`DIR` is this folder. With peagle:

    peagle generate {prompt} --target {shlex.quote(target)} --drafter DIR -k {cfg.num_depths}

With vLLM:

    vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}

## Data

{_format_facts(data)}

## Training

{_format_facts(training)}

    {shlex.join(["peagle", *sys.argv[1:]])}

## Versions

{_format_facts(installed_versions())}
"""


def _format_facts(facts: Mapping[str, object]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _format_acceptance(acceptance: Sequence[ValidationAcceptance], max_tokens: int) -> str:
    if not acceptance:
        return "Not measured."
    rows = []
    for measured in acceptance:
        regular = measured.without_loops
        without_loops = f"{regular.acceptance_length:.2f} ({measured.num_looping})" if regular.num_drafts else ""
        rates = " ".join(f"{rate:.2f}" for rate in measured.acceptance_rates)
        numbers = f"{measured.num_responses} | {measured.num_speculative_tokens} | {measured.acceptance_length:.2f}"
        rows.append(f"| {numbers} | {without_loops} | {rates} |")
    table = "\n".join(rows)
    return f"""Greedy, up to {max_tokens} output tokens, on the run's validation set. The acceptance length counts the
bonus token; rates are shares of decode steps in which draft token 1, 2, .. K was accepted.

| responses | K | acceptance length | without loops (number) | accepted, by position |
|---|---|---|---|---|
{table}"""
