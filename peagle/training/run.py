"""`peagle train` from a recipe to the run's folder. Finds user errors before any model is loaded."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from peagle.checkpoints.drafter import build_drafter_config, drafter_tensors, load_drafter
from peagle.checkpoints.files import parse_device, read_json, write_json, write_weights
from peagle.checkpoints.target import eos_ids, has_tokenizer, load_decoder, read_target_config
from peagle.config import CacheSettings, DecoderConfig, DrafterConfig, TrainConfig
from peagle.data.batches import BatchCursor, PackedBatch, ResponseDataset, batches, load_responses
from peagle.data.chat_format import ChatFormat, load_chat_format
from peagle.errors import UserError
from peagle.hub.resolve import resolve_target
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.card import CardAcceptance, Facts, ModelCard, write_card
from peagle.training.chunk_size import auto_chunk_size
from peagle.training.cuda_graphs import BatchPadder, GraphedStep
from peagle.training.distributed import DistributedContext, init_distributed, shard_target
from peagle.training.drafter_init import INIT_MODES, TokenCounts, create_drafter
from peagle.training.hidden_states.cache import HiddenStatesCache, prepare_cache
from peagle.training.hidden_states.online import HiddenStatesSource, OnlineHiddenStates
from peagle.training.hidden_states.vllm_files import VllmHiddenStates
from peagle.training.optimizer import optimizer_bytes
from peagle.training.recipe import Recipe, make_recipe, recipe_differences
from peagle.training.resume import RunFolder, TrainingState
from peagle.training.schedule import Schedule
from peagle.training.trainer import Trainer, TrainerParts
from peagle.training.validation import (
    AcceptanceEvaluator,
    ValidationAcceptance,
    ValidationRunner,
    prepare_validation,
)
from peagle.versions import installed_versions

Resume = Literal["auto", "must", "never"]
EVALUATED_K = (1, 3, 5, 7)  # besides the trained number of draft tokens


@dataclass(frozen=True)
class TrainingInputs:
    """Everything a run reads before it loads a model."""

    recipe: Recipe
    target_folder: Path
    target: DecoderConfig
    chat: ChatFormat | None
    train_set: ResponseDataset
    validation_set: ResponseDataset
    token_counts: TokenCounts
    eos_ids: frozenset[int]

    @property
    def response_share(self) -> float:
        """Of the tokens of the files."""
        spans = self.train_set.span_S2
        return float((spans[:, 1] - spans[:, 0]).sum() / max(len(self.train_set.token_T), 1))

    def schedule(self, num_gpus: int) -> Schedule:
        cfg = self.recipe.train
        step_tokens = cfg.batch_tokens * cfg.gradient_accumulation_steps * num_gpus
        return Schedule.from_config(cfg, self.train_set.num_tokens / step_tokens)

    def validation_prompts(self) -> list[list[int]]:
        """The distinct first prompts of the validation conversations."""
        cfg = self.recipe.train
        max_prompt_tokens = min(self.target.max_positions - cfg.validation_tokens, cfg.max_seq_len)
        prompts = {e.token_ids[: e.spans[0][0]] for e in self.validation_set}
        return [list(p) for p in sorted(prompts) if 0 < len(p) <= max_prompt_tokens]


@dataclass(frozen=True)
class TrainingResult:
    state: TrainingState
    finished: bool
    out: Path
    is_main: bool = True


def load_training_inputs(recipe: Recipe) -> TrainingInputs:
    cfg = recipe.train
    if not recipe.data:
        raise UserError("data: name files of responses, as `peagle data` writes them")
    if cfg.hidden_states_cache is not None and cfg.shard_target:
        raise UserError(
            f"--hidden-states-cache {cfg.hidden_states_cache}: one process fills the cache and cannot run a target "
            "sharded with --shard-target; remove one of them, or use --vllm-hidden-states"
        )
    folder = resolve_target(recipe.target)
    target = read_target_config(folder, cfg.target_head_only)
    template = Path(cfg.chat_template) if cfg.chat_template is not None else None
    chat = load_chat_format(folder, template, cfg.raw) if has_tokenizer(folder) else None
    dataset = load_responses(recipe.data, chat, target.vocab_size)
    train_set, validation_set = dataset.split_validation(min(cfg.validation_size, len(dataset) // 5), cfg.seed)
    counts = TokenCounts.from_dataset(dataset, target.vocab_size)
    return TrainingInputs(recipe, folder, target, chat, train_set, validation_set, counts, eos_ids(folder))


def open_run_folder(recipe: Recipe, out: Path, resume: Resume) -> RunFolder:
    """Opens or creates the run's folder; refuses to resume a run with another recipe."""
    folder = RunFolder(out)
    if not folder.has_run:
        if resume == "must":
            raise UserError(f"--resume must: {out} holds no run")
    elif resume == "never":
        raise UserError(f"--resume never: {out} holds a run; name a new --out, or remove --resume to resume it")
    elif changed := recipe_differences(make_recipe(folder.recipe, {}), recipe):
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(f"--out {out}: holds a run with another recipe: {changed[0]}{more}; name a new --out")
    folder.create()
    return folder


def train(
    recipe: Recipe, out: Path, device: str, resume: Resume = "auto", stop_after: float | None = None
) -> TrainingResult:
    """Trains until the schedule ends, a signal arrives or `stop_after` seconds have passed. The next call resumes."""
    stop_at = None if stop_after is None else time.perf_counter() + stop_after
    inputs, world = load_training_inputs(recipe), init_distributed(parse_device(device))
    try:
        if not world.is_main:
            world.barrier()  # until the main rank has prepared the folder
            return _train(inputs, RunFolder(out), world, stop_at)
        folder = open_run_folder(recipe, out, resume)
        with folder.lock():
            _check_same_data(inputs, folder)
            folder.recover()
            folder.write_recipe(recipe.toml())
            world.barrier()
            return _train(inputs, folder, world, stop_at)
    finally:
        world.shutdown()


def _train(
    inputs: TrainingInputs, folder: RunFolder, world: DistributedContext, stop_at: float | None
) -> TrainingResult:
    cfg = inputs.recipe.train
    schedule, state = inputs.schedule(world.size), folder.read_state()
    if state.step and schedule.progress(state.step, state.seconds) >= 1.0:
        return TrainingResult(state, True, folder.out, world.is_main)
    dtype = training_dtype(cfg.dtype, world.device)
    shard = cfg.shard_target and not cfg.target_head_only
    # a target that is sharded may not fit one GPU, so it is loaded on the CPU
    target = load_decoder(inputs.target_folder, dtype, "cpu" if shard else world.device, cfg.target_head_only)
    tokenizer = inputs.chat.tokenizer if inputs.chat is not None else None
    drafter = create_drafter(cfg, target, tokenizer, inputs.eos_ids, inputs.token_counts).to(world.device)
    drafter.recompute = cfg.activation_checkpointing
    if shard:
        shard_target(target, world)

    def stream(start: BatchCursor) -> Iterator[tuple[PackedBatch, BatchCursor]]:
        sizes = {"max_seq_len": cfg.max_seq_len, "rank": world.rank, "world_size": world.size}
        return batches(inputs.train_set, cfg.batch_tokens, cfg.seed, start, **sizes)

    state_bytes = optimizer_bytes(drafter, cfg)
    prompts = inputs.validation_prompts()
    validation = prepare_validation(cfg, target, drafter, inputs.eos_ids, prompts, state_bytes, world)

    def write_checkpoint(into: Path, state: TrainingState, measured: ValidationAcceptance | None) -> None:
        write_drafter(into, drafter, cfg.num_depths)
        rows = (acceptance_row(measured, cfg.num_depths),) if measured is not None else ()
        write_card(build_card(inputs, folder.out.name, drafter, state, rows), into)

    hidden_states = _open_hidden_states(inputs, target, drafter.cfg, world)
    reserved = state_bytes + validation.reserved_bytes
    chunk_size = cfg.chunk_size
    if chunk_size == "auto":
        chunk_size = auto_chunk_size(drafter, cfg.batch_tokens, cfg.num_depths, reserved)
    parts = TrainerParts(
        drafter=drafter,
        target=target,
        hidden_states=hidden_states,
        stream=stream,
        schedule=schedule,
        folder=folder,
        world=world,
        validate=validation.measure,
        write_checkpoint=write_checkpoint,
        chunk_size=chunk_size,
        stop_at=stop_at,
        graphs=_create_graphs(cfg, target, drafter, hidden_states, chunk_size),
    )
    trainer = Trainer(parts, cfg)
    if world.is_main:
        _print_summary(trainer, inputs, drafter, validation)
    state = trainer.run()
    return TrainingResult(state, schedule.progress(state.step, state.seconds) >= 1.0, folder.out, world.is_main)


def _print_summary(trainer: Trainer, inputs: TrainingInputs, drafter: Drafter, validation: ValidationRunner) -> None:
    num_parameters = sum(p.numel() for p in drafter.parameters())
    method = "P-EAGLE" if drafter.cfg.parallel else "EAGLE-3"
    mask = f", mask token {drafter.cfg.mask_token_id}" if drafter.cfg.parallel else ""
    trainer.log.print(
        f"{method} for {inputs.recipe.target}: {drafter.cfg.num_layers} layer{'s' * (drafter.cfg.num_layers > 1)}, "
        f"{num_parameters / 1e6:.1f}M parameters{mask}; "
        f"{len(inputs.train_set):,} conversations, {inputs.train_set.num_tokens / 1e6:.1f}M tokens; "
        f"{trainer.schedule.describe_length()}"
    )
    if trainer.resumed:
        trainer.log.print(f"resuming from step {trainer.state.step:,}")
    if validation.skip_reason is not None:
        trainer.log.print(f"no validation, the newest drafter is published: {validation.skip_reason}")


def _check_same_data(inputs: TrainingInputs, folder: RunFolder) -> None:
    """Refuses changed data: the cursor of a run is valid only for its own data."""
    path = folder.inner / "data.json"
    now = {
        "conversations": len(inputs.train_set),
        "tokens": inputs.train_set.num_tokens,
        "validation": len(inputs.validation_set),
    }
    if path.exists() and folder.newest_state() is not None:
        before = read_json(path)
        for name, count in now.items():
            if before.get(name) != count:
                raise UserError(
                    f"--out {folder.out}: its data had {before.get(name)} {name}, now {count}; name a new --out, "
                    f"and start from this drafter with --init {folder.out}"
                )
    write_json(now, path)


def training_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[name]


def _open_hidden_states(
    inputs: TrainingInputs, target: Decoder, drafter: DrafterConfig, world: DistributedContext
) -> HiddenStatesSource:
    cfg = inputs.recipe.train
    if cfg.vllm_hidden_states is not None:
        source = VllmHiddenStates(Path(cfg.vllm_hidden_states), target, drafter.aux_layer_ids, cfg.max_seq_len)
        source.check(inputs.train_set)
        return source
    online = OnlineHiddenStates(target, drafter.aux_layer_ids)
    if cfg.hidden_states_cache is None:
        return online
    folder = Path(cfg.hidden_states_cache)
    if not world.is_main:
        world.barrier()  # until the main rank has filled the cache
        return HiddenStatesCache(folder, target)
    settings = CacheSettings(cfg.hidden_states_dtype)
    cache = prepare_cache(folder, inputs.train_set, online, cfg.max_seq_len, settings)
    world.barrier()
    return cache


def _create_graphs(
    cfg: TrainConfig, target: Decoder, drafter: Drafter, hidden_states: HiddenStatesSource, chunk_size: int
) -> tuple[BatchPadder, GraphedStep] | None:
    """CUDA graphs need a GPU, the whole target in the process, and attention without windows."""
    on_gpu = target.embed_tokens.weight.is_cuda
    if not cfg.cuda_graphs or not on_gpu or cfg.shard_target or any(drafter.cfg.windows):
        return None
    if not isinstance(hidden_states, OnlineHiddenStates):
        return None
    vocab_size = max(drafter.cfg.vocab_size, drafter.cfg.draft_vocab_size)
    padder = BatchPadder(cfg, vocab_size, drafter.cfg.parallel, chunk_size, pin_memory=True)
    return padder, GraphedStep(drafter, target, hidden_states, cfg)


# The checkpoint and its card


def write_drafter(into: Path, drafter: Drafter, num_depths: int) -> None:
    """Writes the plain format, with the number of draft tokens the drafter was trained for."""
    write_weights({name: tensor.detach().clone() for name, tensor in drafter_tensors(drafter).items()}, into)
    values = {**build_drafter_config(drafter.cfg, drafter.fc.weight.dtype), "trained_draft_tokens": num_depths}
    write_json(values, into / "config.json")


def acceptance_row(measured: ValidationAcceptance, num_speculative_tokens: int) -> CardAcceptance:
    regular = measured.without_loops
    return CardAcceptance(
        "validation set",
        measured.num_responses,
        num_speculative_tokens,
        measured.acceptance_length,
        measured.acceptance_rates,
        regular.acceptance_length if regular.num_drafts else None,
        measured.num_looping,
    )


def build_card(
    inputs: TrainingInputs, name: str, drafter: Drafter, state: TrainingState, rows: tuple[CardAcceptance, ...]
) -> ModelCard:
    cfg = inputs.recipe.train
    data: Facts = (
        ("conversations", f"{len(inputs.train_set):,}"),
        ("tokens", f"{inputs.train_set.num_tokens:,}, of which {inputs.response_share:.0%} are the target's responses"),
        ("validation set", f"{len(inputs.validation_set):,} conversations"),
        ("files", ", ".join(Path(path).name for path in inputs.recipe.data)),
    )
    training: Facts = (
        ("steps", f"{state.step:,} of {cfg.batch_tokens * cfg.gradient_accumulation_steps:,} tokens per GPU"),
        ("tokens seen", f"{state.tokens:,}"),
        ("minutes", f"{state.seconds / 60:.1f}"),
        ("loss", f"{cfg.objective}, {cfg.loss_weighting} weighting, depth decay {cfg.depth_decay:g}"),
        ("COD sampling", f"{cfg.num_depths} depths, down-sample ratio {cfg.down_sample_ratio:g}"),
        ("learning rate", f"{cfg.lr:g}, {cfg.lr_schedule}"),
        ("initial weights", cfg.init if cfg.init in INIT_MODES else Path(cfg.init).name),
    )
    return ModelCard(
        name,
        inputs.recipe.target,
        drafter.cfg,
        sum(p.numel() for p in drafter.parameters()),
        cfg.num_depths,
        data,
        training,
        shlex.join(["peagle", *sys.argv[1:]]),
        tuple(installed_versions().items()),
        rows,
        f"Greedy, up to {cfg.validation_tokens} output tokens, on the run's validation set.",
        cfg.raw,
    )


def evaluate_checkpoint(recipe: Recipe, out: Path, device: str) -> list[CardAcceptance]:
    """Measures the published checkpoint at several K and adds the table to its card. Keeps an earlier result."""
    folder = RunFolder(out)
    kept, state = folder.inner / "measured.json", folder.read_state()
    if kept.exists():
        values = read_json(kept)
        if values["best_step"] == state.best_step and values["step"] == state.step:
            return [CardAcceptance(**{**r, "acceptance_rates": tuple(r["acceptance_rates"])}) for r in values["table"]]
    inputs, where = load_training_inputs(recipe), parse_device(device)
    target = load_decoder(inputs.target_folder, training_dtype(recipe.train.dtype, where), where)
    weight = target.embed_tokens.weight
    drafter = load_drafter(folder.out, target, weight.dtype, weight.device)
    prompts, num_depths = inputs.validation_prompts(), recipe.train.num_depths
    rows = []
    for k in sorted({num_depths, *(k for k in EVALUATED_K if k < num_depths)} if prompts else ()):
        evaluator = AcceptanceEvaluator(target, inputs.eos_ids, prompts, recipe.train.validation_tokens, k)
        rows.append(acceptance_row(evaluator.measure(drafter), k))
        evaluator.close()
    card = build_card(inputs, folder.out.name, drafter, state, tuple(rows))
    folder.amend(lambda into: write_card(card, into))
    write_json({"step": state.step, "best_step": state.best_step, "table": [asdict(row) for row in rows]}, kept)
    return rows
