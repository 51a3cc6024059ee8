"""What a round does between the two models, on a GPU: microseconds per call inside a CUDA graph, and in plain torch.

    python benchmarks/kernel_round.py --out round_kernels.json

Tokens are chosen for R rows of V bf16 logits (a few tokens stand out of a wide crowd, as a language model has it), in
Triton and the usual way of torch: softmax, sort for top-p, exponential noise. Prints a table as it goes, then one JSON
line. "same" says whether tokens are those of the torch version on the CPU, where that is quick enough to be asked.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.kernels.sampling import sample as sampling
from peagle.kernels.sampling import verify
from peagle.kernels.step import draft_inputs as drafting

DEVICE = "cuda"
CALLS = 10  # in one graph, so that its own launch hardly counts
KINDS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "min_p": (1.0, 0, 1.0, 0.05),
    "top_k": (1.0, 50, 1.0, 0.0),
    "top_p": (1.0, 0, 0.9, 0.0),
}


def microseconds(run: Callable[[], Any], calls: int = CALLS) -> float:
    """The best of three timings of a call, each over replays of a graph that fill about 20 ms."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / (replays * calls)

    once = timed(1) * calls
    replays = max(2, min(200, int(20_000 / max(once, 1.0))))
    return min(timed(replays) for _ in range(3))


def make_logits(rows: int, vocab: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(rows + vocab)
    logits = torch.randn(rows, vocab, generator=generator, device=DEVICE) * 2.5
    likely = torch.randint(0, vocab, (rows, 20), generator=generator, device=DEVICE)
    return logits.scatter_(1, likely, torch.linspace(18, 8, 20, device=DEVICE).expand(rows, -1)).bfloat16()


def plain_choose(logits: Tensor, temperature: Tensor, kind: str) -> Tensor:
    """As it is usually done: the same distribution from other noise."""
    if kind == "greedy":
        return logits.argmax(-1)
    scaled = logits.float() / temperature[:, None]
    if kind == "min_p":
        scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) - 3.0, -torch.inf)
    if kind == "top_k":
        scaled = scaled.masked_fill(scaled < scaled.topk(50, -1).values[:, -1:], -torch.inf)
    if kind == "top_p":
        ordered, order = scaled.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        scaled = torch.empty_like(scaled).scatter_(
            1, order, ordered.masked_fill(probs.cumsum(-1) - probs >= 0.9, -torch.inf)
        )
    probs = scaled.softmax(-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def settings_of(kind: str, rows: int) -> list[Tensor]:
    """Temperature, top_k, top_p, min_p, seed and position of each row."""
    temperature, top_k, top_p, min_p = KINDS[kind]
    return [
        torch.full((rows,), temperature, device=DEVICE),
        torch.full((rows,), top_k, device=DEVICE),
        torch.full((rows,), top_p, device=DEVICE),
        torch.full((rows,), min_p, device=DEVICE),
        torch.arange(rows, device=DEVICE) * 7919,
        torch.arange(rows, device=DEVICE) + 1000,
    ]


def time_choose(rows: int, vocab: int, kind: str) -> dict[str, Any]:
    logits, settings = make_logits(rows, vocab), settings_of(kind, rows)
    calls = CALLS if rows * vocab < 2**24 else 2  # large ones do not notice the launch, and take time
    found: dict[str, Any] = {"what": f"choose, {kind}", "rows": rows, "vocab": vocab}
    found["triton_us"] = microseconds(lambda: sampling.choose_triton(logits, *settings), calls)
    found["torch_us"] = microseconds(lambda: plain_choose(logits, settings[0], kind), calls)
    if rows <= 8:
        here = [x.cpu() for x in (logits, *settings)]
        chosen = sampling.choose_triton(logits, *settings).cpu()
        found["same"] = bool(torch.equal(chosen, sampling.choose_torch(here[0], *here[1:])))
    return found


def time_argmax(rows: int, vocab: int) -> dict[str, Any]:
    logits = make_logits(rows, vocab)
    found: dict[str, Any] = {"what": "argmax", "rows": rows, "vocab": vocab}
    found["triton_us"] = microseconds(lambda: sampling.argmax_triton(logits))
    found["torch_us"] = microseconds(lambda: logits.argmax(-1))
    found["same"] = bool(torch.equal(sampling.argmax_triton(logits).cpu(), sampling.argmax_torch(logits.cpu())))
    return found


def sweep_cuts(rows: int, vocab: int) -> list[dict[str, Any]]:
    """The search for the top-p cut by how its program is shaped."""
    logits, settings = make_logits(rows, vocab), settings_of("top_p", rows)
    cuts = torch.empty(rows, dtype=torch.float32, device=DEVICE)
    found = []
    for width, warps in ((4096, 16), (8192, 16), (8192, 32)):
        args = (logits, logits.stride(0), *settings[:4], cuts)
        run = partial(sampling._cuts_kernel[(rows,)], *args, VOCAB=vocab, WIDTH=width, num_warps=warps)
        what = f"top_p cut, {width} wide, {warps} warps"
        found.append({"what": what, "rows": rows, "vocab": vocab, "triton_us": microseconds(run)})
    return found


def time_rest(batch: int, k: int, width: int) -> list[dict[str, Any]]:
    """accept, draft_inputs and commit_state of one round."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    tokens = torch.randint(0, 1000, (batch, k + 1), generator=generator, device=DEVICE)
    held = torch.randint(0, k + 1, (batch, 1), generator=generator, device=DEVICE)
    at = torch.arange(k + 1, device=DEVICE)
    chosen = torch.where(at < held, tokens.roll(-1, 1), 2000)
    each = torch.arange(batch, device=DEVICE)
    available, starts, limit = each * 0 + k, each * 3 + 100, each * 0 + 4096
    rates = torch.full((k,), 0.8, device=DEVICE)
    hidden = torch.randn(batch * (k + 1), width, generator=generator, device=DEVICE).bfloat16()
    mask_hidden = torch.randn(width, generator=generator, device=DEVICE).bfloat16()
    accepted, emitted = verify.accept_triton(tokens, chosen, available, None, each, starts)
    round_of = (emitted, accepted, starts, hidden, mask_hidden, 999, k, limit)
    drafts = tokens[:, 1:].contiguous()
    state = (torch.zeros_like(tokens), torch.zeros_like(each), torch.zeros_like(each))

    def plain_commit() -> None:
        state[0][each, 0] = emitted.gather(1, accepted[:, None])[:, 0]
        state[0][each, 1:] = drafts
        start = state[1][each] + accepted + 1
        state[1][each] = start
        state[2][each] = (4096 - start - 2).clamp(0, k)

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "accept": (
            lambda: verify.accept_triton(tokens, chosen, available, None, each, starts),
            lambda: verify.accept_torch(tokens, chosen, available, None, each, starts),
        ),
        "accept, synthetic": (
            lambda: verify.accept_triton(tokens, chosen, available, rates, each, starts),
            lambda: verify.accept_torch(tokens, chosen, available, rates, each, starts),
        ),
        f"draft_inputs, {width} wide": (
            lambda: drafting.draft_inputs_triton(*round_of),
            lambda: drafting.draft_inputs_torch(*round_of),
        ),
        "commit_state": (
            lambda: drafting.commit_state_triton(*state, each, emitted, accepted, drafts, 4096),
            plain_commit,
        ),
    }
    return [
        {"what": name, "rows": batch, "k": k, "triton_us": microseconds(ours), "torch_us": microseconds(theirs)}
        for name, (ours, theirs) in pairs.items()
    ]


def show(found: dict[str, Any]) -> None:
    cells = [f"{found['what']:<34}", f"{found['rows']:>5}", f"{found.get('vocab', ''):>7}"]
    cells.append(f"{found['triton_us']:>10.1f}")
    cells.append(f"{found['torch_us']:>10.1f}" if "torch_us" in found else " " * 10)
    cells.append({True: "  yes", False: "   NO"}.get(found.get("same"), ""))  # type: ignore[arg-type]
    print(" ".join(cells).rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 128_256])
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    if DEVICE == "cuda" and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")

    started = time.time()
    results: list[dict[str, Any]] = []

    def add(found: dict[str, Any]) -> None:
        results.append(found)
        show(found)

    print(f"{'':<34} {'rows':>5} {'V':>7} {'triton us':>10} {'torch us':>10}  same")
    for found in time_rest(8, args.k, 4096) + time_rest(64, args.k, 4096):
        add(found)
    for vocab in args.vocab:
        for rows in args.rows:
            add(time_argmax(rows, vocab))
            for kind in KINDS:
                add(time_choose(rows, vocab, kind))
    for found in sweep_cuts(min(64, max(args.rows)), max(args.vocab)):
        add(found)

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "results": results,
        "seconds": round(time.time() - started, 1),
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "torch": torch.__version__,
        "triton": sampling.triton.__version__,
        "machine": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.machine(),
    }
    line = json.dumps(record)
    print(line)
    if args.out:
        args.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
