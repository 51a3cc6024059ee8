"""Where a round's time goes on the GPU: products, attention, the rest, gaps; and its share of the memory limit.

    python benchmarks/decode_step.py --shape 8b --batch 1 --drafts 7 --context 512

A shape is a known one or a folder with a target's config.json. Weights are random. The limit is every weight of target
and drafter read once, experts that no row goes to included, and the keys and values that a row behind the context sees,
at the rate of a large copy measured in the same run. `--profile` records the rounds once more without dependent
launches, since kernels that overlap have no times of their own. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peagle.checkpoints.target import read_target_config
from peagle.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
from peagle.engine.cuda_graphs import DecodeGraph, DecodeGraphs, find_short_seq_lens
from peagle.engine.dummy_weights import random_weights
from peagle.engine.kv_cache import KVCache
from peagle.engine.model_runner import ModelRunner
from peagle.errors import UserError
from peagle.kernels import triton_utils as launching
from peagle.kernels.attention.dense import first_visible_position
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter

SHAPES = {
    "8b": (LayerConfig(4096, 14336, 32, 8, 128, 1e-5), 32, 128256, False),
    "smollm2": (LayerConfig(576, 1536, 9, 3, 64, 1e-5), 30, 49152, True),
}
TURNS = 20  # replays that are timed together; drafts never hold, so each moves requests on by a token
KINDS = {
    "products": ("_linear_kernel", "gemm", "nvjet", "cutlass", "splitK", "xmma"),
    "attention": ("attention", "_combine", "_paged", "_attend", "rotate"),
    "norms": ("norm",),
    "choice": ("choose", "argmax", "accept", "threshold", "draft_inputs", "commit"),
}


def shape_config(shape: str) -> DecoderConfig:
    if shape in SHAPES:
        layer, depth, vocab, tied = SHAPES[shape]
        return DecoderConfig("llama", vocab, depth, layer, RopeConfig(), 32768, tied, (None,) * depth)
    try:
        cfg = read_target_config(Path(shape))
    except UserError as error:
        sys.exit(f"shape {shape}: {error}; known: {', '.join(SHAPES)}")
    if cfg.uses_transformers:
        sys.exit(f"shape {shape}: runs through transformers, whose rounds are not recorded")
    return cfg


def build(
    shape: str,
    layers: int,
    parallel: bool,
    device: torch.device,
    mlp_width: int | None = None,
    fc_norm: bool = False,
) -> tuple[Decoder, Drafter | None]:
    cfg = shape_config(shape)
    target = random_weights(Decoder, cfg, torch.bfloat16, device)
    if not layers:
        return target, None
    layer = cfg.layer.as_llama
    draft = DrafterConfig(
        vocab_size=cfg.vocab_size,
        draft_vocab_size=cfg.vocab_size,
        num_layers=layers,
        layer=replace(layer, intermediate_size=mlp_width or layer.intermediate_size),
        rope=RopeConfig(),
        max_positions=32768,
        target_hidden_size=cfg.layer.hidden_size,
        aux_layer_ids=cfg.default_aux_layer_ids,
        mask_token_id=0 if parallel else None,
        fc_norm=fc_norm,
    )
    return target, random_weights(Drafter, draft, torch.bfloat16, device).share_weights(target)


def fill(cache: KVCache) -> None:
    """With noise, whether its layers lie in one piece or not."""
    for layer in (*cache.keys, *cache.values):
        layer.normal_()


def copy_rate() -> float:
    """Bytes a second, read and written."""
    a = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    b.copy_(a)
    begin.record()
    for _ in range(4):
        b.copy_(a)
    end.record()
    end.synchronize()
    return 4 * 2 * a.nbytes / (begin.elapsed_time(end) / 1e3)


def bytes_read(target: Decoder, drafter: Drafter | None, batch: int, context: int, drafts: int) -> int:
    cfg = target.cfg
    weights = sum(p.nbytes for name, p in target.named_parameters() if cfg.tie_word_embeddings or "embed" not in name)
    cached = 0
    for layer, window in zip(map(cfg.layer_at, range(cfg.num_layers)), cfg.windows, strict=True):
        seen = context - max(first_visible_position(context, window), 0)
        cached += 4 * layer.num_kv_heads * layer.head_dim * seen
    if drafter is not None:
        own = drafter.cfg
        weights += sum(p.nbytes for p in drafter.parameters())
        weights += drafter.lm_head_weight.nbytes if drafts else 0
        cached += 4 * own.num_layers * own.layer.num_kv_heads * own.layer.head_dim * context
    return weights + batch * cached


@contextmanager
def one_after_another() -> Iterator[None]:
    """What is recorded within has no dependent launches: slower, but its kernels' times add up to the whole."""
    modules = [m for name, m in sys.modules.items() if name.startswith("peagle.") and hasattr(m, "supports_pdl")]
    usual = launching.supports_pdl
    for module in modules:
        module.supports_pdl = lambda device: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.supports_pdl = usual  # type: ignore[attr-defined]


def by_kernel(replay: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of one replay by name, from the profiler; prints the longest."""
    turns = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(turns):
            replay()
        torch.cuda.synchronize()
    names: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_time:
            names.setdefault(event.name, []).append(event.device_time)
    for name, each in sorted(names.items(), key=lambda x: -sum(x[1]))[:24]:
        us, count = sum(each) / turns, len(each) / turns
        print(f"    {us / 1e3:8.4f} ms  {count:6.0f} x {us / count:7.2f} us  {name[:60]}")
    return {name: sum(each) / turns / 1e3 for name, each in names.items()}


def make_graphs(runner: ModelRunner, batch_sizes: list[int], choices: list[int]) -> DecodeGraphs:
    short_seq_lens = find_short_seq_lens(runner.target, runner.drafter)
    return DecodeGraphs(runner.decode_step, batch_sizes, choices, runner.max_model_len, short_seq_lens, runner.device)


def recorded_for(graphs: DecodeGraphs, batch: int, drafts: int, context: int) -> DecodeGraph:
    """The round that an engine would replay, also after `timed` has moved all requests on."""
    found = graphs.find(batch, drafts, context + TURNS + 1)
    assert found is not None
    return found


def breakdown(graphs: DecodeGraphs, batch: int, drafts: int, context: int) -> dict[str, float]:
    """Milliseconds of one replay by kind of kernel."""
    recorded = recorded_for(graphs, batch, drafts, context)
    recorded.slots_B.copy_(torch.arange(batch, device=recorded.slots_B.device))
    sums: dict[str, float] = {}
    for name, took in by_kernel(recorded.replay).items():
        kind = next((k for k, marks in KINDS.items() if any(m in name for m in marks)), "rest")
        sums[kind] = sums.get(kind, 0.0) + took
    return sums


def timed(recorded: DecodeGraph | torch.cuda.CUDAGraph) -> float:
    """Milliseconds of a replay."""
    recorded.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(TURNS):
        recorded.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / TURNS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help=f"{', '.join(SHAPES)}, or a folder with a config.json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[7])
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument(
        "--longest", type=int, help="tokens of a request that rounds are recorded for; else contexts and 64 more"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the drafter; 0 is none")
    parser.add_argument("--mlp-width", type=int, help="of the drafter's layers, where it is not the target's")
    parser.add_argument("--fc-norm", action="store_true", help="a norm for each tap, as drafters have that train here")
    parser.add_argument("--eagle3", action="store_true")
    parser.add_argument("--profile", action="store_true", help="the kernels, by name")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    rate = copy_rate()
    target, drafter = build(args.shape, args.layers, not args.eagle3, device, args.mlp_width, args.fc_norm)
    longest = max(args.longest or 0, max(args.context) + 64)
    most = max(args.batch)
    blocks = 1 + most * (-(-longest // 16))
    rows = []
    with torch.inference_mode():
        runner = ModelRunner(target, drafter, blocks, most, longest, max(args.drafts), [0.0] * max(max(args.drafts), 1))
        fill(runner.kv_cache)
        state = runner.state
        per = -(-longest // 16)
        state.block_tables_SM[:most] = 1 + torch.randperm(most * per, device=device).view(most, per).int()
        graphs = make_graphs(runner, args.batch, args.drafts)
        graphs.capture()
        apart = make_graphs(runner, args.batch, args.drafts)
        if args.profile:
            with one_after_another():
                apart.capture()
        print(f"{len(graphs.captured)} graphs in {graphs.capture_seconds:.1f} s, {graphs.memory_bytes / 2**20:.0f} MiB")
        print(f"copies at {rate / 1e12:.2f} TB/s")
        print(
            f"{'batch':>6}{'drafts':>7}{'context':>8}{'ms':>9}{'limit ms':>9}{'share':>7}  by kind (ms)",
            flush=True,
        )
        for batch, drafts in sorted(graphs.captured):
            for context in args.context:
                recorded = recorded_for(graphs, batch, drafts, context)
                recorded.slots_B.copy_(torch.arange(batch, device=device))
                times = []
                for _ in range(3):
                    state.num_computed_tokens_S[:most] = context
                    times.append(timed(recorded))
                limit = bytes_read(target, drafter, batch, context, drafts) / rate * 1e3
                row = {"batch": batch, "drafts": drafts, "context": context, "ms": min(times), "limit_ms": limit}
                kinds = ""
                if args.profile:
                    state.num_computed_tokens_S[:most] = context
                    row["kinds"] = breakdown(apart, batch, drafts, context)
                    state.num_computed_tokens_S[:most] = context
                    row["apart_ms"] = timed(recorded_for(apart, batch, drafts, context))
                    row["kinds"]["gaps"] = row["apart_ms"] - sum(row["kinds"].values())
                    kinds = f"{row['apart_ms']:.2f} = " + "  ".join(f"{k} {v:.2f}" for k, v in row["kinds"].items())
                rows.append(row)
                print(
                    f"{batch:6}{drafts:7}{context:8}{row['ms']:9.3f}{limit:9.3f}{limit / row['ms']:7.0%}  {kinds}",
                    flush=True,
                )
    line = {"bench": "round", **{k: str(v) for k, v in vars(args).items()}, "copy_tb_s": rate / 1e12, "rows": rows}
    line |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "capture_s": graphs.capture_seconds}
    line["capture_mib"] = graphs.memory_bytes / 2**20
    print(json.dumps(line))
    if args.out:
        args.out.write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
