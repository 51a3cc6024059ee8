"""Time of one decode step on the GPU, and its share of the memory limit.

    python benchmarks/decode_step.py --shape 8b --batch 1 8 64 -k 7 --context 512 --out results.json

A step is verification, sampling, acceptance and drafting, captured as one CUDA graph; draft tokens are never accepted,
so that every replay advances each request by one token. Weights are random. The limit is the time to read every weight
of target and drafter and the KV cache once, at the bandwidth of a large copy measured in the same run. --profile lists
the slowest kernels. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from random_weights import random_weights

from peagle.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
from peagle.engine.cuda_graphs import DecodeGraph, DecodeGraphs, find_short_seq_lens
from peagle.engine.model_runner import ModelRunner
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.results.provenance import Provenance

# Layer, number of layers, vocabulary size, tied embeddings
SHAPES = {
    "8b": (LayerConfig(4096, 14336, 32, 8, 128, 1e-5), 32, 128256, False),
    "smollm2": (LayerConfig(576, 1536, 9, 3, 64, 1e-5), 30, 49152, True),
}
BLOCK_SIZE = 16
REPLAYS = 20


def build_models(shape: str, drafter_layers: int, method: str) -> tuple[Decoder, Drafter | None]:
    layer, num_layers, vocab_size, tied = SHAPES[shape]
    device = torch.device("cuda")
    cfg = DecoderConfig("llama", vocab_size, num_layers, layer, RopeConfig(), 32768, tied, (None,) * num_layers)
    target = random_weights(Decoder, cfg, torch.bfloat16, device)
    if method == "none":
        return target, None
    draft_cfg = DrafterConfig(
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        num_layers=drafter_layers if method == "p-eagle" else 1,
        layer=layer,
        rope=RopeConfig(),
        max_positions=32768,
        target_hidden_size=layer.hidden_size,
        aux_layer_ids=cfg.default_aux_layer_ids,
        mask_token_id=0 if method == "p-eagle" else None,
    )
    return target, random_weights(Drafter, draft_cfg, torch.bfloat16, device).share_weights(target)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a 4 GiB device-to-device copy."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
    sink = torch.empty_like(source)
    sink.copy_(source)
    return 2 * source.nbytes / (milliseconds(lambda: sink.copy_(source), 4) / 1e3)


def milliseconds(run: Any, repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def bytes_read(target: Decoder, drafter: Drafter | None, batch: int, context: int) -> int:
    """Weights of both models and the keys and values of `batch` sequences."""
    cfg = target.cfg
    weights = sum(p.nbytes for name, p in target.named_parameters() if cfg.tie_word_embeddings or "embed" not in name)
    values_per_token = cfg.num_layers * cfg.layer.num_kv_heads * cfg.layer.head_dim
    if drafter is not None:
        layer = drafter.cfg.layer
        weights += sum(p.nbytes for p in drafter.parameters()) + drafter.lm_head_weight.nbytes
        values_per_token += drafter.cfg.num_layers * layer.num_kv_heads * layer.head_dim
    return weights + batch * context * values_per_token * 4  # keys and values in bf16


def print_kernels(graph: DecodeGraph, replays: int = 5) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_time:
            times.setdefault(event.name, []).append(event.device_time)
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:20]:
        count = len(each) / replays
        print(f"    {sum(each) / replays / 1e3:8.4f} ms  {count:5.0f} x {sum(each) / len(each):7.2f} us  {name[:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--method", choices=("p-eagle", "eagle3", "none"), default="p-eagle")
    parser.add_argument("--layers", type=int, default=4, help="layers of the P-EAGLE drafter")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="concurrent requests")
    parser.add_argument("-k", type=int, default=7, help="draft tokens per step; 0 with --method none")
    parser.add_argument("--context", type=int, default=512, help="tokens of each request in the KV cache")
    parser.add_argument("--profile", action="store_true", help="list the slowest kernels")
    parser.add_argument("--out", type=Path, help="results as JSON")
    args = parser.parse_args()
    k = 0 if args.method == "none" else args.k
    bandwidth = copy_bandwidth()
    target, drafter = build_models(args.shape, args.layers, args.method)
    max_batch, max_model_len = max(args.batch), args.context + 64
    blocks_per_request = -(-max_model_len // BLOCK_SIZE)
    rows = []
    with torch.inference_mode():
        runner = ModelRunner(
            target, drafter, 1 + max_batch * blocks_per_request, max_batch, max_model_len, k, [0.0] * k
        )
        for layer in (*runner.kv_cache.keys, *runner.kv_cache.values):
            layer.normal_()
        block_ids = 1 + torch.randperm(max_batch * blocks_per_request, device="cuda").int()
        runner.state.block_tables_SM[:max_batch] = block_ids.view(max_batch, blocks_per_request)
        short = find_short_seq_lens(target, drafter, max_model_len)
        graphs = DecodeGraphs(runner.decode_step, args.batch, [k], short)
        graphs.capture()
        print(f"copies at {bandwidth / 1e12:.2f} TB/s")
        print(f"{'requests':>9}{'ms':>9}{'limit ms':>10}{'share':>7}", flush=True)
        for batch in args.batch:
            graph = graphs.find(batch, k, args.context + REPLAYS + 1)
            assert graph is not None
            graph.slots_B.copy_(torch.arange(batch, device="cuda"))
            times = []
            for _ in range(3):
                runner.state.num_computed_tokens_S[:max_batch] = args.context
                graph.replay()
                times.append(milliseconds(graph.replay, REPLAYS))
            limit = bytes_read(target, drafter, batch, args.context) / bandwidth * 1e3
            rows.append({"batch": batch, "k": k, "context": args.context, "ms": min(times), "limit_ms": limit})
            print(f"{batch:9}{min(times):9.3f}{limit:10.3f}{limit / min(times):7.0%}", flush=True)
            if args.profile:
                runner.state.num_computed_tokens_S[:max_batch] = args.context
                print_kernels(graph)
    settings = {"shape": args.shape, "method": args.method, "layers": args.layers}
    line = settings | {"copy_tb_s": bandwidth / 1e12, "rows": rows}
    line |= asdict(Provenance.collect(" ".join(["python", *sys.argv])))
    print(json.dumps(line))
    if args.out:
        args.out.write_text(json.dumps(line, indent=1) + "\n")


if __name__ == "__main__":
    main()
