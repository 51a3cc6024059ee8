"""`peagle train` from a recipe to the run's folder. Finds user errors before any model is loaded."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from peagle.checkpoints.drafter import build_drafter_config, drafter_tensors, load_drafter
from peagle.checkpoints.files import parse_device, read_json, write_json, write_weights
from peagle.checkpoints.target import load_decoder
from peagle.config import DrafterConfig, TrainConfig
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.card import CARD_FILE, format_card
from peagle.training.cuda_graphs import BatchPadder, GraphedStep
from peagle.training.distributed import DistributedContext, init_distributed, shard_target
from peagle.training.drafter_init import create_drafter
from peagle.training.hidden_states.cache import HiddenStatesCache
from peagle.training.hidden_states.online import HiddenStatesSource, OnlineHiddenStates
from peagle.training.hidden_states.vllm import VllmHiddenStates
from peagle.training.memory import auto_chunk_size
from peagle.training.optimizer import optimizer_bytes
from peagle.training.recipe import Recipe, TrainingInputs, load_training_inputs, make_recipe, training_dtype
from peagle.training.resume import RunFolder, TrainingState
from peagle.training.trainer import Trainer
from peagle.training.validation import AcceptanceCounts, AcceptanceEvaluator, ValidationAcceptance, prepare_validation

Resume = Literal["auto", "must", "never"]
EVALUATED_K = (1, 3, 5, 7)  # besides the trained number of draft tokens


@dataclass(frozen=True)
class TrainingResult:
    state: TrainingState
    finished: bool
    out: Path
    is_main: bool = True


def open_run_folder(recipe: Recipe, out: Path, resume: Resume) -> RunFolder:
    """Opens or creates the run's folder; refuses to resume a run with another recipe."""
    folder = RunFolder(out)
    if not folder.recipe.is_file():
        if resume == "must":
            raise UserError(f"--resume must: {out} holds no run")
    elif resume == "never":
        raise UserError(f"--resume never: {out} holds a run; name a new --out, or remove --resume to resume it")
    elif changed := make_recipe(folder.recipe, {}).changes(recipe):
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
            folder.replace_text(folder.recipe, recipe.toml())
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
    drafter = create_drafter(cfg, target, tokenizer, inputs.eos_ids, inputs.token_counts_V).to(world.device)
    drafter.recompute = cfg.activation_checkpointing
    if shard:
        shard_target(target, world)

    state_bytes = optimizer_bytes(drafter, cfg)
    validation = prepare_validation(inputs, target, drafter, state_bytes, world)

    def write_checkpoint(into: Path, state: TrainingState, measured: ValidationAcceptance | None) -> None:
        write_drafter(into, drafter, cfg.num_depths)
        acceptance = [measured] if measured is not None else []
        card = format_card(inputs, folder.out.name, drafter, state, acceptance)
        (into / CARD_FILE).write_text(card, encoding="utf-8")

    hidden_states = _open_hidden_states(inputs, target, drafter.cfg, world)
    chunk_size = cfg.chunk_size
    if chunk_size == "auto":
        reserved = state_bytes + validation.reserved_bytes
        chunk_size = auto_chunk_size(drafter, cfg.batch_tokens, cfg.num_depths, reserved)
    trainer = Trainer(
        cfg=cfg,
        drafter=drafter,
        target=target,
        hidden_states=hidden_states,
        data=inputs.train_set,
        schedule=schedule,
        folder=folder,
        world=world,
        validate=validation.measure,
        write_checkpoint=write_checkpoint,
        chunk_size=chunk_size,
        stop_at=stop_at,
        graphs=_create_graphs(cfg, target, drafter, hidden_states, chunk_size),
    )
    num_parameters, num_tokens = sum(p.numel() for p in drafter.parameters()), inputs.train_set.num_tokens
    trainer.log.print(
        f"{cfg.method} for {inputs.recipe.target}: {drafter.cfg.num_layers} layers, {num_parameters / 1e6:.1f}M "
        f"parameters; {len(inputs.train_set):,} conversations, {num_tokens / 1e6:.1f}M tokens"
    )
    if trainer.state.step:
        trainer.log.print(f"resuming from step {trainer.state.step:,}")
    if validation.skip_reason is not None:
        trainer.log.print(f"no validation, the newest drafter is published: {validation.skip_reason}")
    state = trainer.run()
    return TrainingResult(state, schedule.progress(state.step, state.seconds) >= 1.0, folder.out, world.is_main)


def _check_same_data(inputs: TrainingInputs, folder: RunFolder) -> None:
    """Refuses changed data: the cursor of a run is valid only for its own data."""
    path = folder.inner / "data.json"
    now = {
        "conversations": len(inputs.train_set),
        "tokens": inputs.train_set.num_tokens,
        "validation": len(inputs.validation_set),
    }
    before = read_json(path) if path.exists() and folder.newest_state() is not None else now
    if before != now:
        raise UserError(
            f"--out {folder.out}: its data had {before}, now {now}; name a new --out, and start from this drafter with "
            f"--init {folder.out}"
        )
    write_json(now, path)


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
    folder, dtype = Path(cfg.hidden_states_cache), cfg.hidden_states_dtype
    cache = HiddenStatesCache(folder, inputs.train_set, online, cfg.max_seq_len, dtype)
    if world.is_main:
        cache.fill()
    world.barrier()
    return cache


def _create_graphs(
    cfg: TrainConfig, target: Decoder, drafter: Drafter, hidden_states: HiddenStatesSource, chunk_size: int
) -> GraphedStep | None:
    """CUDA graphs need a GPU, the whole target in the process, and attention without windows."""
    has_graphs = cfg.cuda_graphs and target.embed_tokens.weight.is_cuda and not cfg.shard_target
    if not has_graphs or any(drafter.cfg.windows) or not isinstance(hidden_states, OnlineHiddenStates):
        return None
    vocab_size = max(drafter.cfg.vocab_size, drafter.cfg.draft_vocab_size)
    padder = BatchPadder(cfg, vocab_size, drafter.cfg.parallel, chunk_size, pin_memory=True)
    return GraphedStep(drafter, target, hidden_states, padder)


def write_drafter(into: Path, drafter: Drafter, num_depths: int) -> None:
    """Writes the plain format, with the number of draft tokens the drafter was trained for."""
    write_weights({name: tensor.detach().clone() for name, tensor in drafter_tensors(drafter).items()}, into)
    values = {**build_drafter_config(drafter.cfg, drafter.fc.weight.dtype), "trained_draft_tokens": num_depths}
    write_json(values, into / "config.json")


def evaluate_checkpoint(recipe: Recipe, out: Path, device: str) -> list[ValidationAcceptance]:
    """Measures the published checkpoint at several K and adds the table to its card. Reads an earlier result."""
    folder = RunFolder(out)
    file, state = folder.inner / "acceptance.json", folder.read_state()
    steps = {"step": state.step, "best_step": state.best_step}
    if file.exists() and steps.items() <= (found := read_json(file)).items():
        return [
            ValidationAcceptance(**{**row, "without_loops": AcceptanceCounts(**row["without_loops"])})
            for row in found["acceptance"]
        ]
    inputs, where = load_training_inputs(recipe), parse_device(device)
    target = load_decoder(inputs.target_folder, training_dtype(recipe.train.dtype, where), where)
    weight = target.embed_tokens.weight
    drafter = load_drafter(folder.out, target, weight.dtype, weight.device)
    prompts, num_depths = inputs.validation_prompts(), recipe.train.num_depths
    acceptance = []
    for k in sorted({num_depths, *(k for k in EVALUATED_K if k < num_depths)} if prompts else ()):
        evaluator = AcceptanceEvaluator(target, inputs.eos_ids, prompts, recipe.train.validation_tokens, k)
        acceptance.append(evaluator.measure(drafter))
        evaluator.close()
    folder.replace_file(CARD_FILE, format_card(inputs, folder.out.name, drafter, state, acceptance))
    write_json({**steps, "acceptance": [asdict(row) for row in acceptance]}, file)
    return acceptance
