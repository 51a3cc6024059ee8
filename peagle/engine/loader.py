"""Settings and folders -> a runner with a cache of the right size, and what the engine has to know about it.

Knows devices, dtypes and memory; nothing about requests.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from peagle.checkpoints.drafter import (
    check_drafter_fits,
    find_fit_problems,
    load_drafter,
    read_drafter_config,
    trained_num_speculative_tokens,
)
from peagle.checkpoints.files import parse_device, parse_dtype
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
from peagle.engine.cuda_graphs import DecodeGraphs, PrefillGraphs, batch_sizes, chunk_sizes
from peagle.engine.kv_cache import BLOCK_SIZE
from peagle.engine.model_runner import ModelRunner
from peagle.errors import UserError
from peagle.hub.resolve import resolve_drafter, resolve_target
from peagle.kernels.gemm.linear_cpu import select_cpu_gemms
from peagle.kernels.gemm.skinny_cpu import cpu_fingerprint
from peagle.kernels.moe.mxfp4 import PackedWeights, zero_padding
from peagle.kernels.sampling.verify import rates_for_acceptance_length, to_conditional_rates
from peagle.kernels.triton_utils import device_context
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.models.moe import ExpertMLP
from peagle.speculative.adaptive_k import StepCostTable

GIB = 1 << 30
BF16 = {"amx_bf16", "avx512_bf16", "bf16"}  # what Linux calls a CPU's instructions for it, x86 or Arm


@dataclass
class Loaded:
    target: Target
    drafter: Drafter | None
    runner: ModelRunner
    longest: int
    num_blocks: int
    choices: list[int]  # numbers of drafts a round may have
    costs: StepCostTable | None
    max_num_seqs: int
    chunk_tokens: int
    idle_chunk_tokens: int
    lookahead: int  # steps launched before the last one's tokens are back


def load(target: str | Path | Target, drafter: str | Path | Drafter | None, settings: EngineSettings) -> Loaded:
    device = parse_device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(settings.threads or usable_cores())
    # everything that can be wrong without the weights is found before they are read
    folder = target.folder if isinstance(target, Target) else resolve_target(str(target))
    cfg = target.model.cfg if isinstance(target, Target) else read_target_config(folder)
    ready = drafter if isinstance(drafter, Drafter) else None
    draft_folder = resolve_drafter(str(drafter)) if drafter is not None and ready is None else None
    draft_cfg = ready.cfg if ready is not None else None
    if draft_folder is not None:
        draft_cfg = read_drafter_config(draft_folder, cfg)
        check_drafter_fits(draft_cfg, cfg, draft_folder)
    if ready is not None and (found := find_fit_problems(ready.cfg, cfg)):
        raise UserError(f"the drafter does not fit the target: {'; '.join(found)}")
    longest = context_length(settings.max_model_len, cfg)
    choices = draft_choices(settings, draft_cfg, draft_folder, on_gpu)
    rates = synthetic_rates(settings, choices[-1])
    seqs = settings.max_num_seqs or (GPU_MAX_NUM_SEQS if on_gpu else CPU_MAX_NUM_SEQS)
    graphs = (
        on_gpu and settings.cuda_graphs and not cfg.uses_transformers
    )  # what is not ours may ask the host for anything
    if graphs:
        check_recordable(cfg, draft_cfg)
    table = StepCostTable.load(Path(settings.cost_table)) if settings.cost_table is not None else None

    dtype = asked_dtype(settings.dtype, device) if settings.dtype is not None else fitting_dtype(device)
    packed = on_gpu and dtype == torch.bfloat16  # no other kernel reads weights of four bits
    if isinstance(target, Target):
        loaded = target
    elif settings.load_format == "dummy":
        if cfg.uses_transformers:
            raise UserError(f"--load-format dummy: not for targets that run through transformers ({cfg.family})")
        cfg = read_target_config(folder, keep_mxfp4=packed)
        loaded = Target(folder, random_weights(Decoder, cfg, dtype, device), eos_ids(folder))
    else:
        loaded = load_target(folder, dtype, device, packed)
        for rope in loaded.model.ropes:  # of a model that nobody else has: others may have read with it already
            rope.set_max_model_len(longest)
    model = ready
    if draft_folder is not None and draft_cfg is not None:
        if settings.load_format == "dummy":
            model = random_weights(Drafter, draft_cfg, dtype, device).share_weights(loaded.model)
        else:
            model = load_drafter(draft_folder, loaded.model, loaded.model.embed_tokens.weight.dtype, device)

    idle_chunk = settings.max_prefill_tokens or (GPU_MAX_PREFILL_TOKENS if on_gpu else CPU_MAX_PREFILL_TOKENS)
    bytes_each = block_bytes(cfg, draft_cfg, loaded.model.embed_tokens.weight.element_size())
    num_blocks = count_blocks(settings, device, bytes_each, longest, seqs, unpacking_bytes(loaded.model.cfg))
    with torch.inference_mode(), device_context(loaded.model.embed_tokens.weight.device):
        runner = ModelRunner(loaded.model, model, num_blocks, seqs, longest, choices[-1], rates)
        if graphs:
            runner.decode_graphs = DecodeGraphs(runner, batch_sizes(seqs), choices)
            runner.prefill_graphs = PrefillGraphs(runner, chunk_sizes(count_weights(loaded.model), idle_chunk))
            runner.decode_graphs.capture()
            runner.rehearse()
        if not on_gpu:
            models = [m for m in (loaded.model, model) if m is not None]
            weights = [m.weight for owner in models for m in owner.modules() if isinstance(m, torch.nn.Linear)]
            select_cpu_gemms(weights)
        if len(choices) > 1 and table is None:
            if runner.decode_graphs is not None:
                table = runner.decode_graphs.measure()
            else:
                table = measure_eagerly(runner, [b for b in CPU_TIMED_BATCH_SIZES if b <= seqs], choices)
    return Loaded(
        loaded,
        model,
        runner,
        longest,
        num_blocks,
        choices,
        table,
        seqs,
        settings.prefill_chunk_tokens or chunk_length(loaded.model, on_gpu),
        idle_chunk,
        1 if on_gpu else 0,
    )


def check_recordable(cfg: DecoderConfig, draft: DrafterConfig | None) -> None:
    """Refuses heads that only the plain torch attention takes: it asks the host for lengths, which no graph can."""
    for layer in [cfg.layer, *cfg.layers, *([draft.layer] if draft is not None else [])]:
        width = layer.head_dim
        if width < 16 or width & (width - 1):
            raise UserError(f"heads of width {width} cannot be recorded as CUDA graphs: set cuda_graphs=False (slower)")


def chunk_length(model: Decoder, on_gpu: bool) -> int:
    """Tokens whose reading holds decoding up by some tens of milliseconds: 24 TFLOP's worth on a GPU."""
    return max(256, min(8192, int(12e12 / count_weights(model)))) if on_gpu else 64


def count_weights(model: Decoder) -> int:
    """Packed ones too: four to a word."""
    return sum(4 * p.numel() if p.dtype == torch.int16 else p.numel() for p in model.parameters())


def context_length(asked: int | None, cfg: DecoderConfig) -> int:
    if asked is not None and asked > cfg.max_positions:
        raise UserError(f"--max-model-len {asked}: this target was made for at most {cfg.max_positions} tokens")
    longest = asked or cfg.max_positions
    if longest < 2:
        raise UserError(f"--max-model-len {longest}: must leave room for a prompt token and an answer")
    return longest


def draft_choices(settings: EngineSettings, cfg: DrafterConfig | None, folder: Path | None, on_gpu: bool) -> list[int]:
    """The numbers of drafts a round may have."""
    asked, rates = settings.num_speculative_tokens, settings.synthetic_acceptance_rates
    if cfg is None:
        if asked not in ("auto", 0):
            raise UserError(f"--num-speculative-tokens {asked}: needs a --drafter")
        return [0]
    trained = trained_num_speculative_tokens(folder) if folder is not None else None
    usual = default_num_speculative_tokens(cfg.parallel)
    if asked == "auto":
        offered = (
            (*AUTO_SPECULATIVE_TOKENS, *AUTO_DEEP_SPECULATIVE_TOKENS)
            if cfg.parallel and on_gpu
            else AUTO_SPECULATIVE_TOKENS
        )
        most = min(trained or usual, offered[-1], offered[-1] if rates is None else len(rates))
        choices = [k for k in offered if k <= most]
        worth = most >= 1.2 * choices[-1] if rates is None else most > choices[-1]  # one more of many is not
        return [*choices, most] if worth else choices
    if cfg.parallel and trained is not None and asked > trained:
        warnings.warn(
            f"{folder} was trained for {trained} draft tokens, {asked} are asked for: the text stays the same, but "
            f"drafts past the first {trained} will hardly ever be accepted and cost time",
            stacklevel=4,
        )
    return [asked]


def synthetic_rates(settings: EngineSettings, k: int) -> list[float] | None:
    rates, length = settings.synthetic_acceptance_rates, settings.synthetic_acceptance_length
    if rates is None and length is None:
        return None
    if length is not None:
        rates = rates_for_acceptance_length(length, k)
    assert rates is not None
    if len(rates) != k:
        raise UserError(f"--synthetic-acceptance-rates: {len(rates)} rates for {k} drafts; give one for each")
    return to_conditional_rates(rates)


def usable_cores() -> int:
    """What this process may use: its affinity, and its container's share."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def emulates_bf16() -> bool:
    """Whether this CPU is known to have no instructions for it."""
    features = [line for line in cpu_fingerprint().splitlines() if line.lower().startswith(("flags", "features"))]
    return bool(features) and BF16.isdisjoint(" ".join(features).split())


def asked_dtype(name: str, device: torch.device) -> torch.dtype:
    dtype = parse_dtype(name)
    if dtype == torch.bfloat16 and device.type == "cpu" and emulates_bf16():
        warnings.warn(
            "--dtype bfloat16: this CPU has no instructions for it and does in many what float32 does in one; "
            "leave --dtype out, or give float32",
            stacklevel=4,
        )
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch's own word for it, with its stack behind
    return dtype


def fitting_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU; on a CPU only where it has instructions for it and products are really faster with them. By
    the clock alone, a machine that is busy with something else would get one or the other by chance."""
    if device.type != "cpu":
        return torch.bfloat16
    if emulates_bf16():
        return torch.float32
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    given = {dtype: (torch.ones(4, 512, dtype=dtype), torch.ones(1024, 512, dtype=dtype)) for dtype in best}
    for turn in range(8):  # the first is the warm-up
        for dtype, (x, w) in given.items():
            started = time.perf_counter()
            F.linear(x, w)
            took = time.perf_counter() - started
            best[dtype] = min(best[dtype], took) if turn else best[dtype]
        if best[torch.bfloat16] > 4 * best[torch.float32]:  # emulated: clear at once, and slow to ask again
            break
    return torch.bfloat16 if best[torch.bfloat16] < best[torch.float32] else torch.float32


def random_weights(kind, cfg, dtype: torch.dtype, device: torch.device):  # type: ignore[no-untyped-def]
    """A module of this shape whose weights are noise."""
    with torch.device("meta"):
        model = kind(cfg)
    model.to(dtype).to_empty(device=device)
    if isinstance(model, Decoder):
        model.tie_weights()
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.int16:
            parameter.random_(-(1 << 15), 1 << 15)
        elif parameter.dtype == torch.uint8:
            parameter.fill_(120)  # numbers of four bits deviate by 2.9, times 2^-7
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            one = name.endswith(("norm.weight", "layer_scalar"))
            torch.nn.init.ones_(parameter) if one else torch.nn.init.zeros_(parameter)
    for module in model.modules():
        if isinstance(module, ExpertMLP):
            for matrix in (module.weights().gate_up_EXD, module.weights().down_EDI):
                if isinstance(matrix, PackedWeights):
                    zero_padding(matrix)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("d2t"):
            buffer.zero_()
    return model.eval().requires_grad_(False)


def block_bytes(cfg: DecoderConfig, draft: DrafterConfig | None, width: int) -> int:
    """Of one block in every layer's cache, keys and values."""
    layers = map(cfg.layer_at, range(cfg.num_layers))
    elements = sum(layer.num_kv_heads * layer.head_dim for layer in layers)
    if draft is not None:
        elements += draft.num_layers * draft.layer.num_kv_heads * draft.layer.head_dim
    return 2 * BLOCK_SIZE * elements * width


def unpacking_bytes(cfg: DecoderConfig) -> int:
    """What passes over many rows take for a layer's packed weights in bf16: the larger matrix at a time, once among
    what graphs hold and once beside them."""
    experts = cfg.layer.experts
    if experts is None or not experts.mxfp4:
        return 0
    return 2 * experts.num_experts * 2 * experts.intermediate_size * cfg.layer.hidden_size * torch.bfloat16.itemsize


def count_blocks(
    settings: EngineSettings, device: torch.device, bytes_each: int, longest: int, seqs: int, unpacking: int = 0
) -> int:
    """As many as the memory holds, no more than can ever be used; refused if one sequence would not fit.
    `unpacking`: bytes that passes need beside what all need."""
    per_sequence = -(-longest // BLOCK_SIZE)
    useful, taken, flag = 1 + per_sequence * seqs, "", "--kv-cache-memory-bytes"
    if settings.kv_cache_memory_bytes is not None:
        memory = settings.kv_cache_memory_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = int(total * settings.gpu_memory_utilization) - (total - free) - unpacking
        memory -= 3 * GIB  # for activations and graphs
        taken = f", {(total - free) / GIB:.1f} of the GPU's {total / GIB:.1f} being taken, by others too"
        flag = "--gpu-memory-utilization"
    else:
        memory = min(free_ram() // 4, 4 * GIB)
    blocks = min(memory // bytes_each, useful)
    if blocks < 1 + per_sequence:
        need = (1 + per_sequence) * bytes_each
        fits = max(memory // bytes_each - 1, 0) * BLOCK_SIZE
        raise UserError(
            f"too little memory for the key/value cache: one sequence of {longest} tokens takes {need / GIB:.2f} GiB, "
            f"{max(memory, 0) / GIB:.2f} GiB are there{taken}; "
            + (f"set --max-model-len to at most {fits}, or " if fits >= 2 else "")
            + f"raise {flag}"
        )
    return int(blocks)


def free_ram() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_eagerly(runner: ModelRunner, batches: list[int], choices: list[int], budget: float = 1.5) -> StepCostTable:
    """Rounds of first tokens, timed for a few of the choices: the fastest of three, taken in turns so that a busy
    moment hits all alike, after one to warm up. Choices between lie on a line. Batch 1 has two turns at least, however
    slow the machine is; past the budget, in seconds, further turns and larger batches are left out."""
    timed = [k for k in choices if k in (choices[0], 1, 2, 3, 5, 7, choices[-1])]
    table = StepCostTable()
    began = time.perf_counter()
    for batch in batches:
        slots = torch.arange(batch, device=runner.device)  # nobody has these yet; their block is nobody's
        runner.decode_step(slots, choices[0])
        seconds: dict[int, float] = {}
        for turn, k in itertools.product(range(3), timed):
            if time.perf_counter() - began > budget and (batch > 1 or turn > 1):
                break
            runner.state.num_computed_tokens_S.zero_(), runner.state.num_draft_tokens_S.zero_()
            started = time.perf_counter()
            runner.decode_step(slots, k)
            took = time.perf_counter() - started
            seconds[k] = min(seconds.get(k, took), took)
        if len(seconds) < len(timed):
            break
        for k in choices:
            low, high = max(t for t in timed if t <= k), min(t for t in timed if t >= k)
            share = (k - low) / (high - low) if high > low else 0.0
            table.seconds[batch, k] = seconds[low] + (seconds[high] - seconds[low]) * share
    runner.state.num_computed_tokens_S.zero_(), runner.state.num_draft_tokens_S.zero_()
    return table
