"""The true acceptance length of a drafter that is still training: held-out prompts through the embedded engine.

The engine is made once and kept, small: its keys and values take what the prompts need and no more than a fixed share.
It runs a copy of the drafter in the target's dtype, so the one that trains is only read: its gradients, its mode and
everybody's random numbers stay as they are.

A target that is spread over ranks is gathered on the first of them for as long as it is measured with, if it fits
there beside what training keeps.

Knows nothing about optimizers or losses. Greedy, as acceptance is reported.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.checkpoints.target import Target
from peagle.config import CHUNK_HEADROOM, MeasureSettings, SamplingParams, TrainConfig, check_num_speculative_tokens
from peagle.data.loops import is_looping
from peagle.engine.block_pool import BLOCK_SIZE
from peagle.engine.kv_cache_size import block_bytes
from peagle.engine.llm import LLM
from peagle.engine.request import CompletionOutput
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.chunk_size import free_bytes
from peagle.training.distributed import DistributedContext, gathered, spread_bytes
from peagle.training.hidden_states.cache import size_text


@dataclass(frozen=True)
class AcceptanceCounts:
    answers: int
    tokens: int  # of all answers
    rounds: int  # that had drafts to verify
    accepted: tuple[int, ...]  # rounds in which draft 1, 2, .. K was accepted

    @property
    def length(self) -> float:
        """Tokens a round gains, the target's own included."""
        return 1 + sum(self.accepted) / max(self.rounds, 1)

    @property
    def per_position(self) -> tuple[float, ...]:
        return tuple(count / max(self.rounds, 1) for count in self.accepted)


@dataclass(frozen=True)
class ValidationAcceptance(AcceptanceCounts):
    """Of all answers. A drafter foretells loops with ease, so they flatter it: `without_loops` leaves them out."""

    without_loops: AcceptanceCounts

    @property
    def looping(self) -> int:
        """Answers that fell into a loop."""
        return self.answers - self.without_loops.answers


def count(outputs: Iterable[CompletionOutput]) -> ValidationAcceptance:
    """What the engine counted, all together."""
    answers = list(outputs)
    calm = [a for a in answers if not is_looping(a.token_ids, a.finish_reason == "stop")]
    whole = _sums(answers, answers)
    return ValidationAcceptance(whole.answers, whole.tokens, whole.rounds, whole.accepted, _sums(calm, answers))


def _sums(some: Sequence[CompletionOutput], answers: Sequence[CompletionOutput]) -> AcceptanceCounts:
    positions = range(max((len(a.num_accepted_tokens_per_pos) for a in answers), default=0))
    return AcceptanceCounts(
        answers=len(some),
        tokens=sum(len(a.token_ids) for a in some),
        rounds=sum(a.num_drafts for a in some),
        accepted=tuple(sum(a.num_accepted_tokens_per_pos[i] for a in some) for i in positions),
    )


class AcceptanceEvaluator:
    """Asks the same prompts again and again. All its drafters must have one shape."""

    def __init__(
        self,
        target: Decoder,
        eos_ids: frozenset[int],
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        draft_tokens: int,
        settings: MeasureSettings | None = None,
    ) -> None:
        if not prompts:
            raise UserError("--held-out: no prompts to measure acceptance on")
        self.target = Target(Path(), target, eos_ids)  # its folder is asked for nothing: tokens in, tokens out
        self.prompts = [list(prompt) for prompt in prompts]
        self.params = SamplingParams(max_tokens=max_tokens)
        self.draft_tokens = check_num_speculative_tokens(draft_tokens)
        self.settings = settings or MeasureSettings()
        self._engine: LLM | None = None

    def measure(self, drafter: Drafter) -> ValidationAcceptance:
        device = self.target.model.embed_tokens.weight.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if self._engine is None:
                self._engine = self._build(drafter)
            else:
                self._follow(self._engine, drafter)
            outputs = self._engine.generate(self.prompts, self.params)
        return count(output.outputs[0] for output in outputs)

    def close(self) -> None:
        """Gives the engine's memory back; the next measurement makes a new one."""
        self._engine = None
        gc.unfreeze()  # what the engine froze would stay
        gc.collect()  # runner and graphs hold each other
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _build(self, drafter: Drafter) -> LLM:
        gc.collect()  # the engine freezes what is there, and garbage would stay for good
        weight = self.target.model.embed_tokens.weight
        return LLM(
            self.target,
            self._copy(drafter),
            self.draft_tokens,
            device=str(weight.device),
            dtype="float32",  # of nothing: both models are there
            threads=torch.get_num_threads(),
            tokenizer=False,
            enable_prefix_caching=False,  # what an earlier drafter wrote is worth nothing to this one
            cuda_graphs=self.settings.cuda_graphs,
            max_prefill_tokens=self.settings.prefill_tokens,
            max_num_seqs=min(len(self.prompts), self.settings.max_num_seqs),
            max_model_len=max(self._room),
            kv_cache_memory_bytes=self._cache_bytes(drafter),
        )

    @property
    def _room(self) -> list[int]:
        """Tokens each prompt may come to, drafts that lie beyond its last token included: near a full context there
        would be fewer drafts, and other counts. A second round is launched before the first has come back."""
        beyond = 2 * (self.draft_tokens + 1)
        most = self.target.model.cfg.max_positions
        return [min(len(prompt) + self.params.max_tokens + beyond, most) for prompt in self.prompts]

    def _cache_bytes(self, drafter: Drafter) -> int:
        """Enough for all prompts at once, within the limit; never too little for one of them."""
        blocks = [-(-length // BLOCK_SIZE) for length in self._room]
        model = self.target.model
        each = block_bytes(model.cfg, drafter.cfg, model.embed_tokens.weight.element_size())
        return max(min((1 + sum(blocks)) * each, self.settings.cache_bytes), (1 + max(blocks)) * each)

    def _copy(self, drafter: Drafter) -> Drafter:
        weight = self.target.model.embed_tokens.weight
        with torch.device("meta"):  # so that no random numbers are drawn
            copy = Drafter(drafter.cfg)
        copy = copy.to(weight.dtype).to_empty(device=weight.device).share_weights(self.target.model)
        copy.load_state_dict(drafter.state_dict())
        return copy.eval().requires_grad_(False)

    @staticmethod
    def _follow(engine: LLM, drafter: Drafter) -> None:
        """The engine's copy, brought up to date in place."""
        assert engine.drafter is not None and engine.drafter.cfg == drafter.cfg, "made for drafters of another shape"
        engine.drafter.load_state_dict(drafter.state_dict())
        engine.model_runner.refresh_drafter()


@dataclass(frozen=True)
class ValidationRunner:
    """How one rank of a run measures, if it does."""

    measure: Callable[[Drafter], ValidationAcceptance] | None = None
    kept_bytes: int = 0  # on the device, from the first measurement on
    why_not: str | None = None


def prepare_validation(
    cfg: TrainConfig,
    target: Decoder,
    drafter: Drafter,
    eos_ids: frozenset[int],
    prompts: Sequence[Sequence[int]],
    state_bytes: int,
    world: DistributedContext,
) -> ValidationRunner:
    """The first rank measures. `state_bytes` are what the optimizer will take; the target's and drafter's are taken."""
    if not prompts:
        return ValidationRunner(why_not="no held-out prompt is there, or short enough" if cfg.held_out else None)

    def measurer(model: Decoder) -> AcceptanceEvaluator:
        return AcceptanceEvaluator(model, eos_ids, prompts, cfg.measure_tokens, cfg.num_depths)

    engine_bytes = MeasureSettings().cache_bytes + sum(p.nbytes for p in drafter.parameters())
    if not cfg.shard_target:
        return ValidationRunner(measurer(target).measure, engine_bytes) if world.first else ValidationRunner()
    whole, free = spread_bytes(target), room(world.device)
    fits = free is None or whole + engine_bytes + state_bytes <= CHUNK_HEADROOM * free
    if not world.from_first(fits):  # they must agree, since all of them gather
        told = f"that takes the whole target on one GPU, {size_text(whole)}, beside the drafter's training"
        return ValidationRunner(why_not=told)

    def measure(drafter: Drafter) -> ValidationAcceptance:
        """Between steps, when what they keep for their way back is gone."""
        model, measured = gathered(target, world), None
        if model is not None:
            own = measurer(model)
            measured = own.measure(drafter)
            own.close()
        measured = world.from_first(measured)
        assert measured is not None
        return measured

    return ValidationRunner(measure)


def room(device: torch.device) -> int | None:
    """Bytes; nobody counts those of the CPU."""
    return free_bytes(device) if device.type == "cuda" else None
