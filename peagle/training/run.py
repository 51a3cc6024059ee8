"""A training run from a recipe to its folder: what belongs to what, and what the checkpoint says about itself.

Knows how the parts fit together and does none of their work. What can be wrong is found before a model is loaded.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from peagle.checkpoints.drafter import build_drafter_config, drafter_tensors, load_drafter
from peagle.checkpoints.files import parse_device, read_json, write_json, write_weights
from peagle.checkpoints.target import eos_ids, has_tokenizer, load_decoder, read_target_config
from peagle.config import CPU_CHUNK_ROWS, CacheSettings, DecoderConfig, DrafterConfig, TrainConfig
from peagle.data.batches import BatchCursor, PackedBatch, batches
from peagle.data.chat_format import ChatFormat
from peagle.data.dataset import ResponseDataset, load_responses
from peagle.data.run import load_chat_format
from peagle.errors import UserError
from peagle.hub.resolve import resolve_target
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training import resource_plan as plan
from peagle.training.card import AcceptanceRow, Facts, ModelCard, write_card
from peagle.training.chunk_size import auto_chunk_rows, chunk_rows_for, free_bytes
from peagle.training.cuda_graphs import BatchPadder, GraphedStep
from peagle.training.distributed import DistributedContext, join, shard
from peagle.training.drafter_init import FRESH, TokenCounts, config_from_folder, create_drafter, drafter_config
from peagle.training.hidden_states.cache import HiddenStatesCache, prepare_cache
from peagle.training.hidden_states.online import HiddenStatesSource, OnlineHiddenStates
from peagle.training.hidden_states.vllm_files import VllmHiddenStates
from peagle.training.loss import LossSettings
from peagle.training.recipe import Recipe, differences, make_recipe
from peagle.training.resume import RunFolder, TrainingState, log_lines
from peagle.training.schedule import Schedule
from peagle.training.trainer import Trainer, TrainerParts
from peagle.training.validation import (
    AcceptanceCounts,
    AcceptanceEvaluator,
    ValidationAcceptance,
    ValidationRunner,
    prepare_validation,
)
from peagle.versions import installed_versions

Resume = Literal["auto", "must", "never"]
MEASURED_DRAFTS = (1, 3, 5, 7)  # a round, beside as many as were trained


@dataclass(frozen=True)
class TrainingInputs:
    """What a run is made from, as far as it costs little to know."""

    recipe: Recipe
    target_folder: Path
    target: DecoderConfig
    chat: ChatFormat | None
    rows: ResponseDataset
    held_out: ResponseDataset
    counts: TokenCounts
    eos_ids: frozenset[int]

    @property
    def asked_share(self) -> float:
        return self.data().asked_share

    def data(self) -> plan.DatasetStats:
        return planned_data(self.rows)

    def schedule(self, world: int) -> Schedule:
        cfg = self.recipe.train
        return Schedule.of(cfg, self.rows.num_tokens / (cfg.batch_tokens * cfg.accumulate * world))


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    standing: TrainingState
    finished: bool
    out: Path
    first: bool = True  # of all ranks: the one that tells


def load_training_inputs(recipe: Recipe) -> TrainingInputs:
    cfg = recipe.train
    if not recipe.data:
        raise UserError("no data: name files of responses (`peagle data` writes them)")
    if cfg.cache is not None and cfg.shard_target:
        raise UserError(
            f"--cache {cfg.cache}: one process fills it, which cannot run a target that --shard-target spreads; leave "
            "one of them out, or let vLLM write what the target says (--vllm-states)"
        )
    folder = resolve_target(recipe.target)
    target = read_target_config(folder, cfg.tables_only)
    template = Path(cfg.chat_template) if cfg.chat_template is not None else None
    chat = load_chat_format(folder, template, cfg.raw) if has_tokenizer(folder) else None
    everything = load_responses(recipe.data, chat, target.vocab_size)
    rows, held_out = everything.split_validation(min(cfg.held_out, len(everything) // 5), cfg.seed)
    counts = TokenCounts.of(everything, target.vocab_size)
    return TrainingInputs(recipe, folder, target, chat, rows, held_out, counts, eos_ids(folder))


def open_folder(recipe: Recipe, out: Path, resume: Resume) -> RunFolder:
    """The run's folder, refused where going on there would be another run."""
    folder = RunFolder(out)
    if not folder.started:
        if resume == "must":
            raise UserError(f"--resume must: {out} holds no run to go on with")
        folder.create()
        return folder
    if resume == "never":
        raise UserError(f"--resume never: {out} holds a run already; name a new --out, or leave --resume out to go on")
    changed = differences(make_recipe(folder.recipe, {}), recipe)
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(f"--out {out}: holds a run with another recipe: {changed[0]}{more}; name a new --out")
    folder.create()
    return folder


def train(
    recipe: Recipe, out: Path, device: str, resume: Resume = "auto", stop_after: float | None = None
) -> TrainingResult:
    """Trains to the end of the schedule, or until it is stopped, for `stop_after` seconds at most; started again it
    goes on."""
    stop_at = None if stop_after is None else time.perf_counter() + stop_after
    material, world = load_training_inputs(recipe), join(parse_device(device))
    try:
        if not world.first:
            world.wait()
            return _train(material, RunFolder(out), world, stop_at)
        folder = open_folder(recipe, out, resume)
        with folder.locked():
            _check_data(material, folder)
            folder.tidy()
            folder.start(recipe.toml())
            world.wait()
            return _train(material, folder, world, stop_at)
    finally:
        world.leave()


def _train(
    material: TrainingInputs, folder: RunFolder, world: DistributedContext, stop_at: float | None
) -> TrainingResult:
    cfg = material.recipe.train
    schedule, standing = material.schedule(world.size), folder.standing()
    if standing.step and schedule.done(standing.step, standing.seconds) >= 1.0:
        return TrainingResult(standing, True, folder.out, world.first)
    dtype = training_dtype(cfg.dtype, world.device)
    # a target that is spread over ranks must not lie on one of them first
    spread = cfg.shard_target and not cfg.tables_only
    target = load_decoder(material.target_folder, dtype, "cpu" if spread else world.device, cfg.tables_only)
    tokenizer = material.chat.tokenizer if material.chat is not None else None
    drafter = create_drafter(cfg, target, tokenizer, material.eos_ids, material.counts).to(world.device)
    drafter.recompute = cfg.checkpoint_layers
    if spread:
        shard(target, world)

    def stream(start: BatchCursor) -> Iterator[tuple[PackedBatch, BatchCursor]]:
        sizes = {"max_length": cfg.max_length, "rank": world.rank, "world_size": world.size}
        return batches(material.rows, cfg.batch_tokens, cfg.seed, start, **sizes)

    state_bytes = plan.state_bytes(cfg, drafter.cfg, drafter.fc.weight.element_size())
    prompts = validation_prompts(material)
    measuring = prepare_validation(cfg, target, drafter, material.eos_ids, prompts, state_bytes, world)

    def write_checkpoint(into: Path, standing: TrainingState, measured: ValidationAcceptance | None) -> None:
        write_drafter(into, drafter, cfg.num_depths)
        table = (table_line("held-out prompts", measured, cfg.num_depths),) if measured is not None else ()
        write_card(card_of(material, folder.out.name, drafter, standing, table), into)

    hidden_states, chunk_rows = (
        _hidden_states_source(material, target, drafter.cfg, world),
        _chunk_rows(cfg, drafter, state_bytes + measuring.kept_bytes),
    )
    parts = TrainerParts(
        drafter=drafter,
        target=target,
        hidden_states=hidden_states,
        stream=stream,
        schedule=schedule,
        folder=folder,
        world=world,
        measure=measuring.measure,
        write_checkpoint=write_checkpoint,
        chunk_rows=chunk_rows,
        stop_at=stop_at,
        framed=_framed(cfg, target, drafter, hidden_states, chunk_rows),
    )
    trainer = Trainer(parts, cfg)
    if world.first:
        _greet(trainer, material, drafter, measuring)
    standing = trainer.run()
    return TrainingResult(standing, schedule.done(standing.step, standing.seconds) >= 1.0, folder.out, world.first)


def _greet(trainer: Trainer, material: TrainingInputs, drafter: Drafter, measuring: ValidationRunner) -> None:
    parameters = sum(p.numel() for p in drafter.parameters())
    kind = "P-EAGLE" if drafter.cfg.parallel else "EAGLE-3"
    mask = f", mask token {drafter.cfg.mask_token_id}" if drafter.cfg.parallel else ""
    trainer.journal.say(
        f"{kind} for {material.recipe.target}: {drafter.cfg.num_layers} layer{'s' * (drafter.cfg.num_layers > 1)}, "
        f"{parameters / 1e6:.1f}M parameters{mask}; "
        f"{len(material.rows):,} conversations, {material.rows.num_tokens / 1e6:.1f}M tokens; "
        f"{trainer.schedule.length()}"
    )
    if trainer.resumed:
        trainer.journal.say(f"going on from step {trainer.standing.step:,}")
    if measuring.why_not is not None:
        trainer.journal.say(f"acceptance is not measured, and the newest drafter is kept: {measuring.why_not}")


def _check_data(material: TrainingInputs, folder: RunFolder) -> None:
    """The cursor of a run means something only in the data it was made for."""
    place = folder.inner / "data.json"
    now = {"conversations": len(material.rows), "tokens": material.rows.num_tokens, "held_out": len(material.held_out)}
    if place.exists() and folder.newest() is not None:
        was = read_json(place)
        for name, count in now.items():
            if was.get(name) != count:
                raise UserError(
                    f"--out {folder.out}: its data had {was.get(name)} {name}, now {count}; name a new --out, "
                    f"or start from its drafter there with --init {folder.out}"
                )
    write_json(now, place)


def training_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[name]


def _hidden_states_source(
    material: TrainingInputs, target: Decoder, cfg: DrafterConfig, world: DistributedContext
) -> HiddenStatesSource:
    settings = material.recipe.train
    if settings.cache is None and settings.vllm_states is None:
        return OnlineHiddenStates(target, cfg.aux_layer_ids)
    rows = material.rows
    if settings.vllm_states is not None:
        source = VllmHiddenStates(Path(settings.vllm_states), target, cfg.aux_layer_ids, settings.max_length)
        source.check(rows)
        return source
    assert settings.cache is not None
    folder = Path(settings.cache)
    if not world.first:
        world.wait()  # until the first has filled it
        return HiddenStatesCache(folder, target)
    online = OnlineHiddenStates(target, cfg.aux_layer_ids)
    cached = prepare_cache(folder, rows, online, settings.max_length, CacheSettings(settings.cache_dtype))
    world.wait()
    return cached


def _framed(
    cfg: TrainConfig, target: Decoder, drafter: Drafter, hidden_states: HiddenStatesSource, chunk_rows: int
) -> tuple[BatchPadder, GraphedStep] | None:
    """For steps that can be captured: on a GPU, beside the whole target, attention without windows."""
    on_gpu = target.embed_tokens.weight.is_cuda
    if (
        not cfg.graphs
        or not on_gpu
        or cfg.shard_target
        or not isinstance(hidden_states, OnlineHiddenStates)
        or any(drafter.cfg.windows)
    ):
        return None
    shape = drafter.cfg
    vocab = max(shape.vocab_size, shape.draft_vocab_size)
    return BatchPadder(cfg, vocab, shape.parallel, chunk_rows, pinned=True), GraphedStep(
        drafter, target, hidden_states, cfg
    )


def validation_prompts(material: TrainingInputs) -> list[list[int]]:
    """What was asked first in each conversation that is kept aside, once."""
    cfg = material.recipe.train
    longest = min(material.target.max_positions - cfg.measure_tokens, cfg.max_length)
    prompts = {e.token_ids[: e.spans[0][0]] for e in material.held_out}
    return [list(p) for p in sorted(prompts) if 0 < len(p) <= longest]


def _chunk_rows(cfg: TrainConfig, drafter: Drafter, reserved: int) -> int:
    if cfg.chunk_rows != "auto":
        return cfg.chunk_rows
    return auto_chunk_rows(drafter, cfg.batch_tokens, cfg.num_depths, reserved)


# What a checkpoint says about itself


def write_drafter(into: Path, drafter: Drafter, depths: int) -> None:
    """The plain format's files, and how many drafts a round it was trained for."""
    write_weights({name: tensor.detach().clone() for name, tensor in drafter_tensors(drafter).items()}, into)
    values = {**build_drafter_config(drafter.cfg, drafter.fc.weight.dtype), "trained_draft_tokens": depths}
    write_json(values, into / "config.json")


def table_line(prompts: str, measured: ValidationAcceptance, draft_tokens: int) -> AcceptanceRow:
    calm: AcceptanceCounts | None = measured.without_loops if measured.without_loops.rounds else None
    return AcceptanceRow(
        prompts,
        measured.answers,
        draft_tokens,
        measured.length,
        measured.per_position,
        calm.length if calm is not None else None,
        measured.looping,
    )


def card_of(
    material: TrainingInputs, name: str, drafter: Drafter, standing: TrainingState, table: tuple[AcceptanceRow, ...]
) -> ModelCard:
    command = shlex.join(["peagle", *sys.argv[1:]])
    cfg = material.recipe.train
    data: Facts = (
        ("conversations", f"{len(material.rows):,}"),
        ("tokens", f"{material.rows.num_tokens:,}, of which {material.asked_share:.0%} are the target's responses"),
        ("kept aside", f"{len(material.held_out):,} conversations"),
        ("files", ", ".join(Path(path).name for path in material.recipe.data)),
    )
    training: Facts = (
        ("steps", f"{standing.step:,} of {cfg.batch_tokens * cfg.accumulate:,} tokens a GPU"),
        ("tokens seen", f"{standing.tokens:,}"),
        ("minutes", f"{standing.seconds / 60:.1f}"),
        ("objective", f"{LossSettings.of(cfg)}, {cfg.num_depths} depths, rate {cfg.rate:g}"),
        ("learning rate", f"{cfg.lr:g}, {cfg.decay}"),
        ("started from", cfg.init if cfg.init in FRESH else Path(cfg.init).name),
    )
    parameters = sum(p.numel() for p in drafter.parameters())
    how = f"Greedy, up to {cfg.measure_tokens} new tokens, prompts that were kept aside."
    target = material.recipe.target
    return ModelCard(
        name,
        target,
        drafter.cfg,
        parameters,
        cfg.num_depths,
        data,
        training,
        command,
        tuple(installed_versions().items()),
        table,
        how,
        cfg.raw,
    )


# The plan


def dry_run(recipe: Recipe, out: Path, device: str, known_rate: float | None) -> plan.TrainingPlan:
    """On this machine. Nothing is loaded, nothing is written."""
    material = load_training_inputs(recipe)
    cfg, where, target = recipe.train, parse_device(device), material.target
    shape = plan_drafter_config(cfg, target)
    world = max(1, torch.cuda.device_count()) if where.type == "cuda" and cfg.shard_target else 1
    steps = [line for line in log_lines(out / "log.jsonl") if line.get("kind") == "step"]
    if known_rate is None and steps:
        known_rate = float(steps[-1]["tokens_per_second"])
    dtype = training_dtype(cfg.dtype, where)
    element = torch.empty(0, dtype=dtype).element_size()
    free = free_bytes(where) if where.type == "cuda" else None
    chunk = planned_chunk(cfg, target, shape, material.data(), world, element, free)
    rate = plan.REACHED * plan.matrix_rate(where, dtype)
    told = f"{plan.REACHED:.0%} of the measured matrix rate"
    machine = plan.TrainingHardware(world, rate, rate, rate, told, per_node=world, memory=free)
    total = material.schedule(world).steps
    return plan.make_plan(cfg, target, shape, material.data(), machine, total, element, chunk, known_rate)


def planned_data(rows: ResponseDataset) -> plan.DatasetStats:
    spans, tokens = rows.span_S2, rows.num_tokens
    share = float((spans[:, 1] - spans[:, 0]).sum() / max(len(rows.token_T), 1))
    return plan.DatasetStats(tokens, share, tokens / max(len(rows), 1))


def plan_drafter_config(cfg: TrainConfig, target: DecoderConfig) -> DrafterConfig:
    """As it will be, but for its mask token."""
    mask_id = 0 if cfg.method == "p-eagle" else None
    if cfg.init in FRESH:
        return drafter_config(cfg, target, mask_id)
    return replace(config_from_folder(cfg, target), mask_token_id=mask_id)


def planned_chunk(
    cfg: TrainConfig,
    target: DecoderConfig,
    shape: DrafterConfig,
    data: plan.DatasetStats,
    world: int,
    element: int,
    free: float | None,
) -> int:
    """Chain rows that would be computed together; `free` bytes of a GPU, None for a CPU."""
    if cfg.chunk_rows != "auto":
        return cfg.chunk_rows
    if free is None:
        return CPU_CHUNK_ROWS
    sizes = plan.memory(cfg, target, shape, data, world, element, 0)
    held = ("target", "drafter", "masters, gradients, moments", "hidden_states", "measuring")
    left = int(free - sum(sizes[name] for name in held) - 2 * sizes["drafter"])  # as `auto_chunk_rows` leaves
    return chunk_rows_for(shape, cfg.batch_tokens, cfg.num_depths, left, element, cfg.checkpoint_layers)


# After training


def evaluate_checkpoint(recipe: Recipe, out: Path, device: str) -> list[AcceptanceRow]:
    """Acceptance of a run's checkpoint at several draft lengths, into its card. What was measured already is kept."""
    folder = RunFolder(out)
    kept, standing = folder.inner / "measured.json", folder.standing()
    if kept.exists():
        values = read_json(kept)
        if values["best_step"] == standing.best_step and values["step"] == standing.step:
            return [AcceptanceRow(**{**line, "per_position": tuple(line["per_position"])}) for line in values["table"]]
    material, where = load_training_inputs(recipe), parse_device(device)
    target = load_decoder(material.target_folder, training_dtype(recipe.train.dtype, where), where)
    weight = target.embed_tokens.weight
    drafter = load_drafter(folder.out, target, weight.dtype, weight.device)
    prompts = validation_prompts(material)
    depths = recipe.train.num_depths
    table = []
    for k in sorted({depths, *(k for k in MEASURED_DRAFTS if k < depths)} if prompts else ()):
        measurer = AcceptanceEvaluator(target, material.eos_ids, prompts, recipe.train.measure_tokens, k)
        table.append(table_line("held-out prompts", measurer.measure(drafter), k))
        measurer.close()
    card = card_of(material, folder.out.name, drafter, standing, tuple(table))
    folder.amend(lambda into: write_card(card, into))
    lines = [asdict(line) for line in table]
    write_json({"step": standing.step, "best_step": standing.best_step, "table": lines}, kept)
    return table
