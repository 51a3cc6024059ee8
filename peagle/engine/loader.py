"""Loads the models, sizes the KV cache, builds runner and scheduler, captures CUDA graphs and times decode steps."""

import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from peagle import config
from peagle.checkpoints.drafter import (
    check_drafter_fits,
    load_drafter,
    read_drafter_config,
    trained_num_speculative_tokens,
)
from peagle.checkpoints.files import parse_device, parse_dtype
from peagle.checkpoints.target import Target, load_target, read_target_config
from peagle.config import DecoderConfig, DrafterConfig, EngineSettings
from peagle.display import ProgressBar
from peagle.engine.cuda_graphs import (
    DecodeGraphs,
    decode_batch_sizes,
    find_short_seq_lens,
    mixed_graph_kinds,
    prefill_graph_sizes,
)
from peagle.engine.kv_cache import BlockPool, block_bytes, count_blocks, resolve_kv_cache_dtype, unpacking_bytes
from peagle.engine.model_runner import ModelRunner
from peagle.engine.quantization import check_quantization, quantize_target
from peagle.engine.scheduler import Scheduler
from peagle.errors import UserError
from peagle.hub.resolve import resolve_drafter, resolve_target
from peagle.kernels.gemm.linear_torch import select_cpu_gemms
from peagle.kernels.gemm.skinny_cpu import cpu_fingerprint
from peagle.kernels.sampling.processors import LogitsProcessors
from peagle.kernels.sampling.verify import to_conditional_rates
from peagle.kernels.triton_utils import device_context
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative.adaptive_k import AdaptiveK, StepCostTable

LOGGER = logging.getLogger(__name__)
BF16_FEATURES = {"amx_bf16", "avx512_bf16", "bf16"}  # in /proc/cpuinfo, x86 and Arm
CPU_PREFILL_CHUNK_TOKENS = 64
GPU_PREFILL_CHUNK_FLOPS = 24e12  # of a prefill chunk beside decoding: delays decoding by some tens of ms
TYPICAL_CONTEXT = 256  # cached tokens of the timed requests: without context, attention would seem free
EAGER_TIMING_SECONDS = 1.5  # most time to spend on timing steps without CUDA graphs


def load_engine(
    target: str | Path | Target, drafter: str | Path | Drafter | None, settings: EngineSettings
) -> tuple[Target, ModelRunner, Scheduler, AdaptiveK]:
    """Checks everything that does not need the weights first."""
    device = parse_device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(settings.threads or default_num_threads())
    target_folder = target.folder if isinstance(target, Target) else resolve_target(str(target))
    cfg = target.model.cfg if isinstance(target, Target) else read_target_config(target_folder)
    drafter_folder, drafter_cfg = None, drafter.cfg if isinstance(drafter, Drafter) else None
    if isinstance(drafter, str | Path):
        drafter_folder = resolve_drafter(str(drafter))
        drafter_cfg = read_drafter_config(drafter_folder, cfg)
    if drafter_cfg is not None:
        check_drafter_fits(drafter_cfg, cfg, drafter_folder)
    max_model_len = settings.max_model_len or cfg.max_positions
    if max_model_len > cfg.max_positions:
        raise UserError(f"--max-model-len {max_model_len}: the target supports at most {cfg.max_positions} tokens")
    choices = resolve_choices(settings, drafter_cfg, drafter_folder, on_gpu)
    rates = settings.synthetic_acceptance_rates
    if rates is not None and len(rates) != choices[-1]:
        problem = f"{len(rates)} rates for {choices[-1]} draft tokens; give one for each"
        raise UserError(f"--synthetic-acceptance-rates: {problem}")
    synthetic_rates = to_conditional_rates(rates) if rates is not None else None
    max_num_seqs = settings.max_num_seqs or (config.GPU_MAX_NUM_SEQS if on_gpu else config.CPU_MAX_NUM_SEQS)
    default_prefill_tokens = config.GPU_MAX_PREFILL_TOKENS if on_gpu else config.CPU_MAX_PREFILL_TOKENS
    max_prefill_tokens = settings.max_prefill_tokens or default_prefill_tokens
    cuda_graphs = on_gpu and settings.cuda_graphs and not cfg.uses_transformers  # transformers models may sync
    if cuda_graphs:
        check_capturable(cfg, drafter_cfg)
    kv_cache_dtype = resolve_kv_cache_dtype(settings.kv_cache_dtype, device)
    cost_table = StepCostTable.load(Path(settings.cost_table)) if settings.cost_table is not None else None

    dtype = resolve_dtype(settings.dtype, device)
    if settings.quantization is not None:
        check_quantization(settings.quantization, cfg, dtype, device, isinstance(target, Target))
    if isinstance(target, Target):
        loaded_target = target
    else:
        keep_mxfp4 = on_gpu and dtype == torch.bfloat16  # only these kernels read MXFP4 weights
        with log_duration("loaded the target"):
            loaded_target = load_target(target_folder, dtype, device, keep_mxfp4)
        for rope in loaded_target.model.ropes:  # not for a target that was passed in: others may use it
            rope.set_max_model_len(max_model_len)
        if settings.quantization is not None:
            quantize_target(loaded_target.model)
    model, weight = loaded_target.model, loaded_target.model.embed_tokens.weight
    loaded_drafter = drafter if isinstance(drafter, Drafter) else None
    if drafter_folder is not None:
        loaded_drafter = load_drafter(drafter_folder, model, weight.dtype, device)

    bytes_per_block = block_bytes(cfg, drafter_cfg, (kv_cache_dtype or weight.dtype).itemsize)
    reserved_bytes = unpacking_bytes(model.cfg)
    reserved_bytes += LogitsProcessors.num_bytes(max_num_seqs, model.cfg.vocab_size, choices[-1])
    num_blocks = count_blocks(settings, device, bytes_per_block, max_model_len, max_num_seqs, reserved_bytes)
    with torch.inference_mode(), device_context(weight.device):
        runner = ModelRunner(
            *(model, loaded_drafter, num_blocks, max_num_seqs, max_model_len, choices[-1]),
            *(synthetic_rates, kv_cache_dtype),
        )
        if cuda_graphs:
            with log_duration("captured CUDA graphs"):
                capture_graphs(runner, decode_batch_sizes(max_num_seqs), choices, max_prefill_tokens)
        if not on_gpu:
            models = [m for m in (model, loaded_drafter) if m is not None]
            select_cpu_gemms([m.weight for owner in models for m in owner.modules() if isinstance(m, torch.nn.Linear)])
        if len(choices) > 1 and cost_table is None:
            with log_duration("timed decode steps"):
                if runner.decode_graphs is not None:
                    kinds = {(batch_size, k) for batch_size, k, _ in runner.decode_graphs.captured}
                    cost_table = measure_step_costs(runner, kinds, min(TYPICAL_CONTEXT, max_model_len // 2), math.inf)
                else:
                    sizes = [size for size in config.CPU_TIMED_BATCH_SIZES if size <= max_num_seqs]
                    kinds = {(size, k) for size in sizes for k in choices}
                    cost_table = measure_step_costs(runner, kinds, 0, EAGER_TIMING_SECONDS)
    chunk_tokens = CPU_PREFILL_CHUNK_TOKENS
    if on_gpu:
        chunk_tokens = max(256, min(8192, int(GPU_PREFILL_CHUNK_FLOPS / 2 / count_parameters(model))))
    adaptive_k = AdaptiveK(choices, cost_table)
    scheduler = Scheduler(
        BlockPool(num_blocks, prefix_caching=settings.enable_prefix_caching, lookahead=int(drafter is not None)),
        max_num_seqs,
        choices[-1],
        adaptive_k.choose_k,
        runner.choose_mixed_k,
        settings.prefill_chunk_tokens or chunk_tokens,
        max_prefill_tokens,
        choices if cuda_graphs else None,
    )
    return loaded_target, runner, scheduler, adaptive_k


@contextmanager
def log_duration(event: str) -> Iterator[None]:
    """Logs a part of the start and how long it took."""
    started = time.perf_counter()
    yield
    LOGGER.info(event, extra={"fields": {"seconds": round(time.perf_counter() - started, 1)}})


def capture_graphs(runner: ModelRunner, batch_sizes: list[int], choices: list[int], max_prefill_tokens: int) -> None:
    """Captures decode and prefill graphs of the runner, and compiles the kernels outside of them."""
    short_seq_lens = find_short_seq_lens(runner.target, runner.drafter, runner.max_model_len)
    runner.decode_graphs = DecodeGraphs(runner.decode_step, batch_sizes, choices, short_seq_lens)
    runner.sampler.awaits_masks = True
    num_parameters = count_parameters(runner.target)
    prefill_sizes = prefill_graph_sizes(num_parameters, max_prefill_tokens)
    mixed_kinds = mixed_graph_kinds(num_parameters, batch_sizes[-1], choices, max_prefill_tokens)

    def capture_prefill(pool: object) -> None:
        runner.prefill.capture(prefill_sizes, pool)
        runner.prefill.capture_mixed(mixed_kinds, pool)

    with ProgressBar() as bar:
        runner.decode_graphs.capture(capture_prefill, partial(bar.update, "capturing CUDA graphs"))


def check_capturable(cfg: DecoderConfig, drafter_cfg: DrafterConfig | None) -> None:
    """Refuses head sizes that the Triton attention kernels do not support: plain torch attention needs host syncs."""
    for layer in [cfg.layer, *cfg.layers, *([drafter_cfg.layer] if drafter_cfg is not None else [])]:
        head_dim = layer.head_dim
        if head_dim < 16 or head_dim & (head_dim - 1):
            raise UserError(f"head_dim {head_dim} does not support CUDA graphs: set cuda_graphs=False (slower)")


def count_parameters(model: Decoder) -> int:
    """Number of parameters; an int16 word holds four MXFP4 numbers."""
    return sum(4 * p.numel() if p.dtype == torch.int16 else p.numel() for p in model.parameters())


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
        candidates: tuple[int, ...] = config.AUTO_SPECULATIVE_TOKENS
        if cfg.parallel and on_gpu:
            candidates = (*candidates, *config.AUTO_DEEP_SPECULATIVE_TOKENS)
        largest = min(trained or config.default_num_speculative_tokens(cfg.parallel), candidates[-1])
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


def default_num_threads() -> int:
    """`$OMP_NUM_THREADS` as in torch, else the cores this process may use: its affinity, limited by its cgroup's CPU
    quota."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list if parallel regions nest
    if wanted.isdigit() and int(wanted):
        return int(wanted)
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The named dtype, or the default: bfloat16 on a GPU and on a CPU with bfloat16 instructions, else float32."""
    if name is not None:
        return parse_dtype(name)
    lines = cpu_fingerprint().lower().splitlines()
    features = " ".join(line for line in lines if line.startswith(("flags", "features"))).split()
    return torch.float32 if device.type == "cpu" and BF16_FEATURES.isdisjoint(features) else torch.bfloat16


def measure_step_costs(
    runner: ModelRunner, step_kinds: Iterable[tuple[int, int]], context_len: int, budget_seconds: float
) -> StepCostTable:
    """Times decode steps by batch size and number of draft tokens, smallest batch first, on an unused engine.

    Each is the fastest of three runs, interleaved so that a busy moment hits all choices alike, after one warm-up. Past
    the budget, remaining runs and larger batch sizes are skipped; batch size 1 gets at least two runs.
    """
    table, state, began = StepCostTable(), runner.state, time.perf_counter()
    tables_SM = state.block_tables_SM[:-1]  # without the padding slot
    if context_len:
        block_ids = torch.arange(tables_SM.numel(), device=tables_SM.device) % runner.kv_cache.num_blocks
        tables_SM.copy_(block_ids.view(tables_SM.shape))
    for batch_size, kinds in itertools.groupby(sorted(step_kinds), key=lambda kind: kind[0]):
        choices, seconds = [k for _, k in kinds], dict[int, float]()
        time_decode_step(runner, batch_size, choices[0], context_len)
        for run, k in itertools.product(range(3), choices):
            if time.perf_counter() - began > budget_seconds and (batch_size > 1 or run > 1):
                break
            elapsed = time_decode_step(runner, batch_size, k, context_len)
            seconds[k] = min(seconds.get(k, elapsed), elapsed)
        if len(seconds) < len(choices):
            break
        table.seconds |= {(batch_size, k): seconds[k] for k in choices}
    for used in (tables_SM, state.num_computed_tokens_S, state.num_draft_tokens_S, state.token_ids_SN):
        used[: len(tables_SM)].zero_()
    return table


@torch.inference_mode()
def time_decode_step(runner: ModelRunner, batch_size: int, k: int, context_len: int) -> float:
    """Seconds of one decode step of the first slots, each with `context_len` cached tokens in its block table."""
    slots_B = torch.arange(batch_size, device=runner.device)
    graph = runner.decode_graphs.find(batch_size, k, context_len) if runner.decode_graphs is not None else None
    if graph is not None:
        graph.load_slots(list(range(batch_size)))
    runner.state.num_computed_tokens_S[:-1] = context_len  # the previous step advanced it
    runner.state.num_draft_tokens_S[:-1] = 0
    synchronize = torch.cuda.synchronize if runner.device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    if graph is not None:
        graph.replay()
    else:
        runner.decode_step(slots_B, k)
    synchronize()
    return time.perf_counter() - started
