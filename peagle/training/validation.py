"""Measures the acceptance length of a drafter during training: the validation prompts through the embedded engine.

The engine is built once. Its KV cache has the size the prompts need, up to a limit. It runs a copy of the drafter in
the target's dtype, so gradients, training mode and random state of the trained drafter stay untouched. Decoding is
greedy.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peagle import config
from peagle.checkpoints.target import Target
from peagle.config import SamplingParams, check_num_speculative_tokens
from peagle.data.generators import is_looping, release_engine_memory
from peagle.engine.kv_cache import BLOCK_SIZE, block_bytes
from peagle.engine.llm import LLM
from peagle.engine.request import CompletionOutput
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.distributed import DistributedContext, gather_target, sharded_bytes
from peagle.training.memory import free_gpu_bytes
from peagle.training.recipe import TrainingInputs


@dataclass(frozen=True)
class AcceptanceCounts:
    num_responses: int
    num_drafts: int  # decode steps with draft tokens
    num_accepted_tokens_per_pos: tuple[int, ...]

    @property
    def num_speculative_tokens(self) -> int:
        return len(self.num_accepted_tokens_per_pos)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per decode step, the bonus token included."""
        return 1 + sum(self.num_accepted_tokens_per_pos) / max(self.num_drafts, 1)

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Share of the drafts in which the token at each position was accepted."""
        return tuple(count / max(self.num_drafts, 1) for count in self.num_accepted_tokens_per_pos)


@dataclass(frozen=True)
class ValidationAcceptance(AcceptanceCounts):
    """Counts of all responses, and without looping ones, which are easy to draft."""

    without_loops: AcceptanceCounts

    @property
    def num_looping(self) -> int:
        return self.num_responses - self.without_loops.num_responses


def _sum_counts(responses: Sequence[CompletionOutput], num_positions: int) -> AcceptanceCounts:
    accepted = tuple(sum(r.num_accepted_tokens_per_pos[i] for r in responses) for i in range(num_positions))
    return AcceptanceCounts(len(responses), sum(r.num_drafts for r in responses), accepted)


class AcceptanceEvaluator:
    """Runs the same prompts with each drafter it is given. All drafters must have one config."""

    def __init__(
        self,
        target: Decoder,
        eos_ids: frozenset[int],
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        num_speculative_tokens: int,
    ) -> None:
        self.target = Target(Path(), target, eos_ids)  # the folder is not read: token ids in, token ids out
        self.prompts = [list(prompt) for prompt in prompts]
        self.params = SamplingParams(max_tokens=max_tokens)
        self.num_speculative_tokens = check_num_speculative_tokens(num_speculative_tokens)
        self._engine: LLM | None = None

    def measure(self, drafter: Drafter) -> ValidationAcceptance:
        device = self.target.model.embed_tokens.weight.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if self._engine is None:
                self._engine = self._build_engine(drafter)
            else:
                proposer = self._engine.model_runner.proposer
                assert proposer is not None and proposer.drafter.cfg == drafter.cfg
                proposer.drafter.load_state_dict(drafter.state_dict())
                proposer.refresh_mask_hidden()
            outputs = self._engine.generate(self.prompts, self.params)
        responses = [output.outputs[0] for output in outputs]
        regular = [r for r in responses if not is_looping(r.token_ids, r.finish_reason == "stop")]
        total, without_loops = (_sum_counts(each, self.num_speculative_tokens) for each in (responses, regular))
        return ValidationAcceptance(**vars(total), without_loops=without_loops)

    def close(self) -> None:
        """Frees the engine; the next measurement builds a new one."""
        self._engine = None
        release_engine_memory()

    def _build_engine(self, drafter: Drafter) -> LLM:
        gc.collect()  # the engine freezes all objects, garbage included
        model, weight = self.target.model, self.target.model.embed_tokens.weight
        # Tokens each request may reach, draft tokens beyond its last token included: near a full context the engine
        # would draft less and change the counts. The engine launches a second step before the first returns.
        beyond = 2 * (self.num_speculative_tokens + 1)
        most = [len(prompt) + self.params.max_tokens + beyond for prompt in self.prompts]
        lengths = [min(length, model.cfg.max_positions) for length in most]
        num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        each = block_bytes(model.cfg, drafter.cfg, weight.element_size())
        wanted = min((1 + sum(num_blocks)) * each, config.VALIDATION_KV_CACHE_BYTES)
        return LLM(
            self.target,
            self._copy_drafter(drafter),
            self.num_speculative_tokens,
            device=str(weight.device),
            dtype="float32",  # ignored: both models are loaded
            threads=torch.get_num_threads(),
            tokenizer=False,
            enable_prefix_caching=False,  # cached keys and values belong to an earlier drafter
            cuda_graphs=False,  # capturing takes longer than a validation run saves
            max_prefill_tokens=config.VALIDATION_PREFILL_TOKENS,
            max_num_seqs=min(len(self.prompts), config.VALIDATION_NUM_SEQS),
            max_model_len=max(lengths),
            # enough for all prompts at once, within the limit, but at least for the longest one
            kv_cache_memory_bytes=max(wanted, (1 + max(num_blocks)) * each),
        )

    def _copy_drafter(self, drafter: Drafter) -> Drafter:
        weight = self.target.model.embed_tokens.weight
        with torch.device("meta"):  # draws no random numbers
            copy = Drafter(drafter.cfg)
        copy = copy.to(weight.dtype).to_empty(device=weight.device).share_weights(self.target.model)
        copy.load_state_dict(drafter.state_dict())
        return copy.eval().requires_grad_(False)


@dataclass(frozen=True)
class ValidationRunner:
    """How one rank measures acceptance, if it does."""

    measure: Callable[[Drafter], ValidationAcceptance] | None = None
    reserved_bytes: int = 0  # GPU memory held from the first measurement on
    skip_reason: str | None = None


def prepare_validation(
    inputs: TrainingInputs, target: Decoder, drafter: Drafter, optimizer_bytes: int, world: DistributedContext
) -> ValidationRunner:
    """Prepares validation on the main rank. The optimizer is not allocated yet."""
    cfg, prompts = inputs.recipe.train, inputs.validation_prompts()
    if not prompts:
        return ValidationRunner(skip_reason="no validation prompt is short enough" if cfg.validation_size else None)

    def create_evaluator(model: Decoder) -> AcceptanceEvaluator:
        return AcceptanceEvaluator(model, inputs.eos_ids, prompts, cfg.validation_tokens, cfg.num_depths)

    engine_bytes = config.VALIDATION_KV_CACHE_BYTES + sum(p.nbytes for p in drafter.parameters())
    if not cfg.shard_target:
        return ValidationRunner(create_evaluator(target).measure, engine_bytes) if world.is_main else ValidationRunner()
    gathered_bytes, free = sharded_bytes(target), free_gpu_bytes(world.device)
    fits = free is None or gathered_bytes + engine_bytes + optimizer_bytes <= config.CHUNK_MEMORY_FRACTION * free
    if not world.broadcast_from_main(fits):  # all ranks must agree, since all take part in gathering
        return ValidationRunner(
            skip_reason=f"the whole target ({gathered_bytes / 1e9:,.2f} GB) does not fit one GPU beside the training"
        )

    def measure(drafter: Drafter) -> ValidationAcceptance:
        """Runs between steps, when activations are freed."""
        model, measured = gather_target(target, world), None
        if model is not None:
            evaluator = create_evaluator(model)
            measured = evaluator.measure(drafter)
            evaluator.close()
        measured = world.broadcast_from_main(measured)
        assert measured is not None
        return measured

    return ValidationRunner(measure)
