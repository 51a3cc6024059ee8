"""Loads target and drafter, sizes the KV cache, builds the model runner and captures its CUDA graphs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.checkpoints.drafter import (
    check_drafter_fits,
    find_fit_problems,
    load_drafter,
    read_drafter_config,
    trained_num_speculative_tokens,
)
from peagle.checkpoints.files import parse_device
from peagle.checkpoints.target import Target, eos_ids, load_target, read_target_config
from peagle.config import (
    AUTO_DEEP_SPECULATIVE_TOKENS,
    AUTO_SPECULATIVE_TOKENS,
    CPU_MAX_NUM_SEQS,
    CPU_MAX_PREFILL_TOKENS,
    CPU_TIMED_BATCH_SIZES,
    GPU_MAX_NUM_SEQS,
    GPU_MAX_PREFILL_TOKENS,
    DecoderConfig,
    DrafterConfig,
    EngineSettings,
    default_num_speculative_tokens,
)
from peagle.engine.cpu_defaults import resolve_dtype, usable_cores
from peagle.engine.cuda_graphs import (
    DecodeGraphs,
    PrefillGraphs,
    decode_batch_sizes,
    find_short_seq_lens,
    prefill_graph_sizes,
)
from peagle.engine.dummy_weights import random_weights
from peagle.engine.kv_cache_size import block_bytes, count_blocks, unpacking_bytes
from peagle.engine.model_runner import ModelRunner
from peagle.engine.step_costs import measure_captured_steps, measure_eager_steps
from peagle.errors import UserError
from peagle.hub.resolve import resolve_drafter, resolve_target
from peagle.kernels.gemm.linear_cpu import select_cpu_gemms
from peagle.kernels.sampling.verify import rates_for_acceptance_length, to_conditional_rates
from peagle.kernels.triton_utils import device_context
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative.adaptive_k import StepCostTable

CPU_PREFILL_CHUNK_TOKENS = 64
GPU_PREFILL_CHUNK_FLOPS = 24e12  # of a prefill chunk beside decoding: delays decoding by some tens of ms


@dataclass
class LoadedEngine:
    target: Target
    drafter: Drafter | None
    runner: ModelRunner
    max_model_len: int
    num_blocks: int
    choices: list[int]  # possible numbers of draft tokens of a step, ascending
    cost_table: StepCostTable | None
    max_num_seqs: int
    prefill_chunk_tokens: int  # prefill tokens of a step while requests decode
    max_prefill_tokens: int  # prefill tokens of a step while none decodes
    max_in_flight_steps: int  # steps that may be launched before the tokens of the last one are on the host


def load_engine(
    target: str | Path | Target, drafter: str | Path | Drafter | None, settings: EngineSettings
) -> LoadedEngine:
    """Checks everything that does not need the weights first."""
    device = parse_device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(settings.threads or usable_cores())
    target_folder = target.folder if isinstance(target, Target) else resolve_target(str(target))
    cfg = target.model.cfg if isinstance(target, Target) else read_target_config(target_folder)
    drafter_folder, drafter_cfg = _resolve_drafter(drafter, cfg)
    max_model_len = resolve_max_model_len(settings.max_model_len, cfg)
    choices = resolve_choices(settings, drafter_cfg, drafter_folder, on_gpu)
    synthetic_rates = resolve_synthetic_rates(settings, choices[-1])
    max_num_seqs = settings.max_num_seqs or (GPU_MAX_NUM_SEQS if on_gpu else CPU_MAX_NUM_SEQS)
    max_prefill_tokens = settings.max_prefill_tokens or (GPU_MAX_PREFILL_TOKENS if on_gpu else CPU_MAX_PREFILL_TOKENS)
    cuda_graphs = on_gpu and settings.cuda_graphs and not cfg.uses_transformers  # transformers models may sync
    if cuda_graphs:
        check_capturable(cfg, drafter_cfg)
    cost_table = StepCostTable.load(Path(settings.cost_table)) if settings.cost_table is not None else None

    dtype = resolve_dtype(settings.dtype, device)
    loaded_target = target
    if not isinstance(loaded_target, Target):
        loaded_target = _load_target(target_folder, cfg, dtype, device, max_model_len, settings.load_format == "dummy")
    model, weight = loaded_target.model, loaded_target.model.embed_tokens.weight
    loaded_drafter = drafter if isinstance(drafter, Drafter) else None
    if drafter_folder is not None and drafter_cfg is not None:
        if settings.load_format == "dummy":
            loaded_drafter = random_weights(Drafter, drafter_cfg, dtype, device).share_weights(model)
        else:
            loaded_drafter = load_drafter(drafter_folder, model, weight.dtype, device)

    bytes_per_block = block_bytes(cfg, drafter_cfg, weight.element_size())
    num_blocks = count_blocks(
        settings, device, bytes_per_block, max_model_len, max_num_seqs, unpacking_bytes(model.cfg)
    )
    with torch.inference_mode(), device_context(weight.device):
        runner = ModelRunner(
            model, loaded_drafter, num_blocks, max_num_seqs, max_model_len, choices[-1], synthetic_rates
        )
        if cuda_graphs:
            capture_graphs(runner, decode_batch_sizes(max_num_seqs), choices, max_prefill_tokens)
        if not on_gpu:
            models = [m for m in (model, loaded_drafter) if m is not None]
            select_cpu_gemms([m.weight for owner in models for m in owner.modules() if isinstance(m, torch.nn.Linear)])
        if len(choices) > 1 and cost_table is None:
            if cuda_graphs:
                cost_table = measure_captured_steps(runner)
            else:
                batch_sizes = [size for size in CPU_TIMED_BATCH_SIZES if size <= max_num_seqs]
                cost_table = measure_eager_steps(runner, batch_sizes, choices)
    return LoadedEngine(
        target=loaded_target,
        drafter=loaded_drafter,
        runner=runner,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        choices=choices,
        cost_table=cost_table,
        max_num_seqs=max_num_seqs,
        prefill_chunk_tokens=settings.prefill_chunk_tokens or default_prefill_chunk_tokens(model, on_gpu),
        max_prefill_tokens=max_prefill_tokens,
        max_in_flight_steps=1 if on_gpu else 0,
    )


def _resolve_drafter(
    drafter: str | Path | Drafter | None, cfg: DecoderConfig
) -> tuple[Path | None, DrafterConfig | None]:
    """Folder (None for a loaded drafter) and config, after checking that the drafter fits the target."""
    if drafter is None:
        return None, None
    if isinstance(drafter, Drafter):
        if problems := find_fit_problems(drafter.cfg, cfg):
            raise UserError(f"the drafter does not fit the target: {'; '.join(problems)}")
        return None, drafter.cfg
    folder = resolve_drafter(str(drafter))
    drafter_cfg = read_drafter_config(folder, cfg)
    check_drafter_fits(drafter_cfg, cfg, folder)
    return folder, drafter_cfg


def _load_target(
    folder: Path, cfg: DecoderConfig, dtype: torch.dtype, device: torch.device, max_model_len: int, dummy: bool
) -> Target:
    keep_mxfp4 = device.type == "cuda" and dtype == torch.bfloat16  # only these kernels read MXFP4 weights
    if dummy:
        if cfg.uses_transformers:
            raise UserError(f"--load-format dummy: not supported for targets that run in transformers ({cfg.family})")
        model = random_weights(Decoder, read_target_config(folder, keep_mxfp4=keep_mxfp4), dtype, device)
        return Target(folder, model, eos_ids(folder))
    target = load_target(folder, dtype, device, keep_mxfp4)
    for rope in target.model.ropes:  # not for a target that was passed in: others may use it
        rope.set_max_model_len(max_model_len)
    return target


def capture_graphs(runner: ModelRunner, batch_sizes: list[int], choices: list[int], max_prefill_tokens: int) -> None:
    """Captures decode and prefill graphs of the runner, and compiles the kernels outside of them."""
    runner.decode_graphs = DecodeGraphs(
        runner.decode_step,
        batch_sizes,
        choices,
        runner.max_model_len,
        find_short_seq_lens(runner.target, runner.drafter),
        runner.device,
    )
    runner.prefill.graphs = PrefillGraphs(
        runner.prefill.forward,
        prefill_graph_sizes(count_parameters(runner.target), max_prefill_tokens),
        runner.prefill.num_mask_rows,
        runner.max_model_len,
        runner.device,
    )
    runner.decode_graphs.capture(runner.prefill.graphs)
    runner.device_state.warm_up()


def check_capturable(cfg: DecoderConfig, drafter_cfg: DrafterConfig | None) -> None:
    """Refuses head sizes that the Triton attention kernels do not support: plain torch attention needs host syncs."""
    for layer in [cfg.layer, *cfg.layers, *([drafter_cfg.layer] if drafter_cfg is not None else [])]:
        head_dim = layer.head_dim
        if head_dim < 16 or head_dim & (head_dim - 1):
            raise UserError(f"head_dim {head_dim} does not support CUDA graphs: set cuda_graphs=False (slower)")


def count_parameters(model: Decoder) -> int:
    """Number of parameters; an int16 word holds four MXFP4 numbers."""
    return sum(4 * p.numel() if p.dtype == torch.int16 else p.numel() for p in model.parameters())


def default_prefill_chunk_tokens(model: Decoder, on_gpu: bool) -> int:
    if not on_gpu:
        return CPU_PREFILL_CHUNK_TOKENS
    return max(256, min(8192, int(GPU_PREFILL_CHUNK_FLOPS / 2 / count_parameters(model))))


def resolve_max_model_len(max_model_len: int | None, cfg: DecoderConfig) -> int:
    if max_model_len is not None and max_model_len > cfg.max_positions:
        raise UserError(f"--max-model-len {max_model_len}: the target supports at most {cfg.max_positions} tokens")
    resolved = max_model_len or cfg.max_positions
    if resolved < 2:
        raise UserError(f"--max-model-len {resolved}: must be at least 2, one prompt token and one output token")
    return resolved


def resolve_choices(
    settings: EngineSettings, cfg: DrafterConfig | None, folder: Path | None, on_gpu: bool
) -> list[int]:
    """Possible numbers of draft tokens of a decode step, ascending; more than one for "auto"."""
    k, rates = settings.num_speculative_tokens, settings.synthetic_acceptance_rates
    if cfg is None:
        if k not in ("auto", 0):
            raise UserError(f"--num-speculative-tokens {k}: needs a --drafter")
        return [0]
    trained = trained_num_speculative_tokens(folder) if folder is not None else None
    if k == "auto":
        candidates: tuple[int, ...] = AUTO_SPECULATIVE_TOKENS
        if cfg.parallel and on_gpu:
            candidates = (*candidates, *AUTO_DEEP_SPECULATIVE_TOKENS)
        largest = min(trained or default_num_speculative_tokens(cfg.parallel), candidates[-1])
        if rates is not None:
            largest = min(largest, len(rates))
        choices = [candidate for candidate in candidates if candidate <= largest]
        # A number slightly above the largest candidate is not worth graphs of its own.
        add_largest = largest >= 1.2 * choices[-1] if rates is None else largest > choices[-1]
        return [*choices, largest] if add_largest else choices
    if cfg.parallel and trained is not None and k > trained:
        warnings.warn(
            f"--num-speculative-tokens {k}: {folder} was trained for {trained} draft tokens; the output stays the "
            f"same, but draft tokens past position {trained} are rarely accepted and cost time",
            stacklevel=4,
        )
    return [k]


def resolve_synthetic_rates(settings: EngineSettings, k: int) -> list[float] | None:
    """Conditional acceptance rates of the k positions, or None if acceptance is real."""
    rates, length = settings.synthetic_acceptance_rates, settings.synthetic_acceptance_length
    if rates is None and length is None:
        return None
    if length is not None:
        rates = rates_for_acceptance_length(length, k)
    assert rates is not None
    if len(rates) != k:
        raise UserError(f"--synthetic-acceptance-rates: {len(rates)} rates for {k} draft tokens; give one for each")
    return to_conditional_rates(rates)
