"""A training step of speculators 0.9.0's P-EAGLE, for `training_step.py`: its model and loss as its trainer calls them.

The trainer keeps weights in fp32, computes under bf16 autocast, and compiles the model's forward pass. A batch has the
form that its collator makes of one document. Knows nothing about clocks or processes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from training_variants import SHAPES, documents, sample_rows, step_flops

Json = dict[str, Any]
Measure = Callable[[Callable[[], None], Json, Callable[[], None]], Json]


def import_speculators(path: str) -> Any:
    """Its models' package imports its data loader, whose own needs a training step has none of."""
    import transformers.models.llama.modeling_llama  # before it could ask for what stands in here
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    def empty_class(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    sys.path.insert(0, path)
    loaders = ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets", "hs_connectors")
    missing = {name for name in loaders if "." not in name and importlib.util.find_spec(name) is None}
    stand_ins = [name for name in loaders if name.split(".")[0] in missing]
    for name in stand_ins:
        sys.modules[name] = module = ModuleType(name)
        module.__path__, module.__spec__ = [], ModuleSpec(name, None)
        module.__getattr__ = empty_class  # type: ignore[method-assign]
    import speculators

    for name in stand_ins:
        del sys.modules[name]
    return speculators


def speculators_steps(job: Json, measure: Measure) -> Callable[[int], Json]:
    """As `speculators.train` builds and calls it, without reading a verifier's folder."""
    speculators = import_speculators(job["speculators_path"])
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    shape, cuda = SHAPES[job["shape"]], job["device"] == "cuda"
    layer, width = shape.layer, shape.layer.hidden_size
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=width,
        intermediate_size=layer.intermediate_size,
        num_hidden_layers=shape.drafter_layers,
        num_attention_heads=layer.num_heads,
        num_key_value_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        rms_norm_eps=layer.norm_eps,
        max_position_embeddings=1 << 17,
    )
    # flex attention has no way back on the CPU, and the fused loss is for a GPU
    config._attn_implementation = "simple_flex_attention" if cuda else "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=shape.depths)
    verifier = speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    with torch.device(job["device"]):
        model = speculators.PEagleDraftModel(
            speculators.PEagleSpeculatorConfig(
                transformer_layer_config=config,
                draft_vocab_size=shape.vocab,
                eagle_aux_hidden_state_layer_ids=list(shape.taps),
                mask_token_id=0,
                embed_requires_grad=False,
                speculators_config=speculators.SpeculatorsConfig(
                    algorithm="peagle",
                    proposal_methods=[proposal],
                    default_proposal_method="greedy",
                    verifier=verifier,
                ),
            )
        )
    for table in (model.lm_head, model.verifier_lm_head, model.embed_tokens):  # which a verifier would fill
        torch.nn.init.normal_(table.weight, std=0.02)
    model.train()
    call, _ = model.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation="fused" if cuda else "eager",
        max_anchors=None,
        num_depths=shape.depths,
        down_sample_ratio=shape.rate,
        down_sample_ratio_min=0.0,
    )

    def at(tokens: int) -> Json:
        def noise(wide: int) -> Any:
            return torch.randn(1, tokens, wide, dtype=torch.bfloat16, device=job["device"])

        batch = {
            "hidden_states": noise(len(shape.taps) * width),
            "verifier_last_hidden_states": noise(width),
            "input_ids": torch.randint(1, shape.vocab, (1, tokens), device=job["device"]),
            "document_ids": torch.zeros(1, tokens, dtype=torch.long, device=job["device"]),
            "position_ids": torch.arange(1, tokens + 1, device=job["device"])[None],
            "loss_mask": torch.ones(1, tokens, dtype=torch.bool, device=job["device"]),
        }
        metrics: Json = {}

        def step() -> None:
            with torch.autocast(job["device"], dtype=torch.bfloat16):
                _, loss, said = model(**batch, **call)
            loss.backward()
            metrics.update(said)

        found = measure(step, job, lambda: model.zero_grad(set_to_none=True))
        ungraded = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not ungraded, f"no gradient for {ungraded}"
        one = documents([tokens], 0.0, shape.vocab)
        flops = step_flops(shape, one, sample_rows(one, shape.depths, shape.rate, torch.Generator()))
        found |= {"rows": int(metrics["full_acc_total"]), "weights_gb": sum(p.nbytes for p in model.parameters()) / 1e9}
        return found | {"flops": flops.total, "attention_flops": flops.attention}

    return at
