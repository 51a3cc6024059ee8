"""Thousands of requests through a tiny target: nothing may leak, get lost or come twice.

    python tests/engine_soak.py [--requests 10000] [--drafts 3] [--lookahead 1]

Requests arrive in waves, have random prompts (many with a common start), lengths and stop tokens, some sample, some
are aborted. Blocks and slots are checked every step, every answer against the target run token by token
without a cache. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from engine_integrity import check_pool, check_scheduler

from peagle.checkpoints.drafter import save_drafter
from peagle.checkpoints.target import Target
from peagle.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig, SamplingParams
from peagle.engine.kv_cache import block_bytes
from peagle.engine.llm import LLM
from peagle.engine.request import Request, RequestGroup
from peagle.kernels.sampling.noise import bits_torch, gumbel_torch
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative import reference

LAYER = LayerConfig(16, 32, num_heads=2, num_kv_heads=1, head_dim=8)
VOCAB, LONGEST, EOS = 10, 96, 7
PROMPTS, SHORT, MOST_TOKENS = 16, 4, 40
CLEAR = 1e-4  # least lead of the best token over the next, against rounding that differs between batches
PARAMS = [
    SamplingParams(ignore_eos=True),
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=9, top_k=8, top_p=0.9),
]


@dataclass
class Report:
    requests: int
    finished: int
    aborted: int
    compared: int
    tokens: int
    steps: int
    preemptions: int
    found_tokens: int  # of prompts, in the cache
    accepted_per_round: float
    seconds: float
    tokens_per_second: float
    grown_mib: float  # memory of the process from the first tenth of the requests to the end


def spread_weights(module: torch.nn.Module, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            wide = 1.0 if name.startswith(("embed_tokens", "mask_hidden")) else 2 * parameter.shape[-1] ** -0.5
            torch.nn.init.normal_(parameter, std=wide, generator=rng)


@cache
def target() -> Target:
    cfg = DecoderConfig("llama", VOCAB, 1, LAYER, RopeConfig(), LONGEST, False, (None,))
    model = Decoder(cfg)
    spread_weights(model, 1)
    return Target(Path("nowhere"), model.eval().requires_grad_(False), frozenset({EOS}))


def make_drafter(folder: Path, parallel: bool) -> DrafterConfig:
    """Untrained, so hardly a draft holds by skill; with few tokens to choose from some hold by luck."""
    mask = VOCAB - 1 if parallel else None
    cfg = DrafterConfig(VOCAB, VOCAB, 1, LAYER, RopeConfig(), LONGEST, 16, (0, 1), mask_token_id=mask)
    drafter = Drafter(cfg).share_weights(target().model)
    spread_weights(drafter, 2)
    save_drafter(drafter, folder)
    return cfg


@cache
def prompts() -> list[list[int]]:
    choose = random.Random(0)
    starts = [[choose.randrange(VOCAB) for _ in range(33)] for _ in range(4)]
    found = []
    for i in range(PROMPTS):
        shared = choose.choice(starts)[: choose.choice([0, 16, 17, 32, 33])] if i >= SHORT else []
        found.append(shared + [choose.randrange(VOCAB) for _ in range(choose.randint(1, 12))])
    return found


@cache
@torch.inference_mode()
def generate_alone(which: int, base: int) -> tuple[list[int], bool]:
    """Generates one token at a time, ignoring stops; returns the tokens and whether each led by a clear margin."""
    params, tokens, clear = PARAMS[base], list(prompts()[which]), True
    for _ in range(MOST_TOKENS):
        logits = reference.run_target(target().model, tokens, 1, ())[0][0]
        if not params.greedy:
            assert params.seed is not None
            allowed = reference.compute_probs(logits[None], params)[0] > 0
            at, ids = torch.tensor(len(tokens)), torch.arange(VOCAB)
            noise = gumbel_torch(bits_torch(torch.tensor(params.seed), at, ids)).double()
            logits = (logits + params.temperature * noise).masked_fill(~allowed, -torch.inf)
        best = logits.topk(2).values
        clear = clear and bool(best[0] - best[1] > CLEAR)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompts()[which]) :], clear


def expected(which: int, base: int, params: SamplingParams) -> list[int] | None:
    output_token_ids, clear = generate_alone(which, base)
    if not clear:
        return None
    for count, token in enumerate(output_token_ids[: params.max_tokens], 1):
        if token in params.stop_token_ids or token == EOS and not params.ignore_eos:
            return output_token_ids[:count]
    return output_token_ids[: params.max_tokens]


def soak(
    requests: int, drafts: int = 3, parallel: bool = True, lookahead: int = 1, blocks: int = 56, seed: int = 0
) -> Report:
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        draft_cfg = make_drafter(Path(folder) / "drafter", parallel) if drafts else None
        llm = LLM(
            target(),
            Path(folder) / "drafter" if drafts else None,
            drafts,
            device="cpu",
            dtype="float32",
            threads=1,
            max_num_seqs=64,
            kv_cache_memory_bytes=(blocks + 1) * block_bytes(target().model.cfg, draft_cfg, 4),
            prefill_chunk_tokens=256,
            tokenizer=False,
        )
    llm.max_in_flight_steps = lookahead
    alive: dict[int, tuple[RequestGroup, int, int]] = {}
    report = Report(requests, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    rounds, accepted, sent, memory = 0, 0, 0, 0
    began = time.perf_counter()

    def close(request: Request) -> None:
        nonlocal rounds, accepted
        _, which, base = alive.pop(request.id)
        want = expected(which, base, request.params)
        got = request.output_token_ids
        if request.finish_reason == "abort":
            report.aborted += 1
            assert want is None or got == want[: len(got)], (which, request.params, got, want)
        else:
            report.finished += 1
            assert want is None or got == want, (which, request.params, got, want)
        report.compared += want is not None
        report.tokens += len(got)
        rounds += request.num_decode_steps
        accepted += sum(request.num_accepted_tokens_per_pos)

    while sent < requests or llm.has_unfinished_requests:
        # in waves, so that the engine is full, draining and empty by turns
        while sent < requests and len(alive) < (150 if sent // 400 % 2 else 20) and choose.random() < 0.9:
            which, base = choose.randrange(PROMPTS), choose.choice([0, 0, 0, 0, 0, 1, 2])
            stops = choose.sample(range(VOCAB), choose.choice([0, 0, 0, 1]))
            length = choose.choice([MOST_TOKENS, choose.randint(1, MOST_TOKENS), choose.randint(1, 6)])
            if sent // 100 % 3 == 2:  # short prompts and long answers: they outgrow what they got at first
                which, base, length = which % SHORT, 0, MOST_TOKENS
            params = replace(PARAMS[base], max_tokens=length, stop_token_ids=stops)
            group = llm.add_request(prompts()[which], params)
            alive[group.requests[0].id] = (group, which, base)
            sent += 1
            if sent == requests // 10:
                gc.collect()
                memory = resident()
        if alive and choose.random() < 0.12:
            request = alive[choose.choice(list(alive))][0].requests[0]
            llm.abort_group(alive[request.id][0])
            close(request)
        for request in llm.step():
            if request.finish_reason is not None:
                close(request)
        check_scheduler(llm.scheduler)
        report.steps += 1
    report.seconds = time.perf_counter() - began
    assert not alive and report.finished + report.aborted == requests
    pool = llm.scheduler.pool
    check_pool(pool, [])
    assert pool.num_free_blocks == pool.num_blocks - 1, "blocks leaked"
    gc.collect()
    report.grown_mib = (resident() - memory) / 2**20
    left = Counter(type(x).__name__ for x in gc.get_objects())
    assert left["Request"] < 200 and left["PendingStep"] < 4, "requests that have ended are still held"
    report.preemptions, report.found_tokens = llm.scheduler.num_preemptions, pool.num_hit_tokens
    report.accepted_per_round = accepted / max(rounds, 1)
    report.tokens_per_second = report.tokens / report.seconds
    return report


def resident() -> int:
    """Bytes of memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--eagle3", action="store_true", help="drafts one by one instead of in parallel")
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report = asdict(soak(args.requests, args.drafts, not args.eagle3, args.lookahead, seed=args.seed))
    report = {name: round(value, 2) if isinstance(value, float) else value for name, value in report.items()}
    for name, value in report.items():
        print(f"{name.replace('_', ' '):20} {value:>12,}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
