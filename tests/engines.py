"""Shared by the engine's tests: a target with a tokenizer, engines of any size, and the expected output of a request.

Greedy outputs and their counts are those of the reference. Sampled outputs with a seed are computed here by a plain
loop: the reference's distribution gives the possible tokens, and Gumbel noise of (seed, position, token) selects one.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pairs
import reference_extras
import torch
from engine_integrity import check_pool, check_scheduler
from torch import Tensor

from peagle.checkpoints.drafter import load_drafter
from peagle.checkpoints.target import Target, load_decoder, load_tokenizer
from peagle.config import SamplingParams
from peagle.engine.cuda_graphs import DecodeGraph
from peagle.engine.kv_cache import block_bytes
from peagle.engine.llm import LLM
from peagle.engine.prefill import MixedGraph, PrefillGraph, PrefillShape
from peagle.engine.request import CompletionOutput, RequestGroup
from peagle.kernels.attention import paged
from peagle.kernels.attention.types import PagedAttentionMetadata
from peagle.kernels.sampling.noise import bits_torch, gumbel_torch
from peagle.models.drafter import Drafter
from peagle.speculative import reference
from peagle.speculative.adaptive_k import StepCostTable

MAX_MODEL_LEN = 64  # four blocks
EOS = frozenset({ord(","), 500})  # one that the target emits now and then, one beyond its vocabulary
MIN_LEAD = 1e-4  # least lead of the best token; rounding that differs between batches could reverse a smaller one
CHAT = "{% for m in messages %}{{ m['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"


@cache
def home() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def byte_names() -> list[str]:
    """The characters of byte-level tokenizers: printable bytes unchanged, the rest from U+0100 up."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]


def write_tokenizer(folder: Path, vocab: int, chat_template: str | None = CHAT) -> None:
    """Token b is byte b."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={name: b for b, name in enumerate(byte_names()[:vocab])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(folder)


@cache
def target() -> Target:
    folder = home() / "target"
    shutil.copytree(pairs.target_folder(), folder)
    write_tokenizer(folder, pairs.VOCAB)
    return Target(folder, load_decoder(folder), EOS)


@cache
def drafter(name: str) -> Drafter:
    return load_drafter(pairs.drafter_folder(name), target().model)


@cache
def tokenizer() -> Any:
    return load_tokenizer(target().folder)


def decode(tokens: list[int]) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=True)


@cache
def flat_cost_table() -> Path:
    path = home() / "costs.json"
    StepCostTable({(1, k): 1.0 for k in range(8)}).save(path)
    return path


def engine(name: str | None, k: int | str, blocks: int | None = None, **options: Any) -> LLM:
    """`blocks`: KV cache blocks besides the padding block."""
    own = target()
    if blocks is not None:
        cfg = drafter(name).cfg if name is not None else None
        options["kv_cache_memory_bytes"] = (blocks + 1) * block_bytes(own.model.cfg, cfg, 4)
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4}
    if k == "auto":
        settings["cost_table"] = flat_cost_table()
    return LLM(own, pairs.drafter_folder(name) if name is not None else None, k, **{**settings, **options})  # type: ignore[arg-type]


def emulate_prefill_graphs(llm: LLM, sizes: Sequence[int]) -> list[PrefillShape]:
    """Runs prefill, alone and beside decode requests, in the fixed shapes of captured graphs, without a GPU: a replay
    runs the pass on the graph's buffers. Returns a list that collects the shape of each replay."""
    prefill, replays, no_result = llm.model_runner.prefill, list[PrefillShape](), (torch.empty(0), torch.empty(0))

    def build_graph(num_rows: int, k: int) -> PrefillGraph:
        def replay() -> None:
            replays.append(shape)
            graph.result = prefill.forward(graph.packed, shape)

        shape = prefill.graph_shape(num_rows, prefill.count_mask_rows(k))
        packed = torch.zeros(shape.field_starts[-1], dtype=torch.long)
        graph = PrefillGraph(shape, packed, no_result, SimpleNamespace(replay=replay))  # type: ignore[arg-type]
        return graph

    def build_mixed_graph(batch_size: int, num_rows: int, k: int) -> MixedGraph:
        def replay() -> None:
            replays.append(graph.shape)
            decode.result, graph.result = prefill.forward_mixed(decode.slots_B, graph.packed, graph.shape, k)

        graph, slots_B = build_graph(num_rows, k), torch.full((batch_size,), -1)
        decode = DecodeGraph(slots_B, no_result, SimpleNamespace(replay=replay))  # type: ignore[arg-type]
        return MixedGraph(k, decode, graph)

    prefill.graphs = [build_graph(num_rows, prefill.max_speculative_tokens) for num_rows in sizes]
    choices, batch_size = sorted(llm.adaptive_k.choices, reverse=True), llm.scheduler.max_num_seqs
    prefill.mixed_graphs[batch_size] = [build_mixed_graph(batch_size, rows, k) for k in choices for rows in sizes]
    return replays


# Expected outputs


@dataclass(frozen=True)
class ExpectedOutput:
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    text: str | None
    logprobs: list[dict[int, float]]
    is_clear: bool  # no near-tie that rounding could reverse
    generation: reference.Generation | None = None  # of the reference, with its counts; None for sampled outputs


@cache
def expected_output(
    prompt: tuple[int, ...], params: SamplingParams, name: str | None = None, k: int = 0
) -> ExpectedOutput:
    """With a drafter and K the counts are those of that drafter; the tokens are the same with any."""
    if not params.greedy:
        return expected_sampled_output(prompt, params)
    min_lead = float("inf")
    original = reference.compute_probs
    read, propose = memoized(reference.run_target, name), memoized(reference.propose_draft_tokens, name)

    def watched(logits_KV: Tensor, p: SamplingParams) -> Tensor:
        nonlocal min_lead
        if len(logits_KV):
            best = logits_KV.double().topk(2, -1).values
            min_lead = min(min_lead, float((best[:, 0] - best[:, 1]).min()))
        return original(logits_KV, p)

    with mock.patch.multiple(reference, compute_probs=watched, run_target=read, propose_draft_tokens=propose):
        made = reference_extras.generate(
            target().model, prompt, params, EOS, drafter(name) if name else None, k, MAX_MODEL_LEN, decode=decode
        )
    return ExpectedOutput(
        made.token_ids, made.finish_reason, made.stop_reason, made.text, made.logprobs, min_lead > MIN_LEAD, made
    )


_MEMORY: dict[Any, Any] = {}


def memoized(function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    def remembered(model: Any, tokens: list[int], *rest: Any) -> Any:
        # The other arguments follow from these.
        key = (function.__name__, name, tuple(tokens), *(r for r in rest if isinstance(r, int)))
        if key not in _MEMORY:
            _MEMORY[key] = function(model, tokens, *rest)
        return _MEMORY[key]

    return remembered


@cache
@torch.inference_mode()
def logits_after(tokens: tuple[int, ...]) -> Tensor:
    return reference.run_target(target().model, list(tokens), 1, ())[0][0]


def expected_sampled_output(prompt: tuple[int, ...], params: SamplingParams) -> ExpectedOutput:
    assert params.seed is not None
    out = reference.Generation(list(prompt), params, EOS, min(params.max_tokens, MAX_MODEL_LEN - len(prompt)))
    output = out.token_ids
    logprobs: list[dict[int, float]] = []
    min_lead = float("inf")
    while True:
        raw = logits_after((*prompt, *output))
        logits = reference.process_logits(raw, params, prompt, output, EOS)
        allowed = reference.compute_probs(logits[None], params)[0] > 0
        position = torch.tensor(len(prompt) + len(output))
        noise = gumbel_torch(bits_torch(torch.tensor(params.seed), position, torch.arange(len(logits)))).double()
        scores = (logits + params.temperature * noise).masked_fill(~allowed, -torch.inf)
        best = scores.topk(2).values
        min_lead = min(min_lead, float(best[0] - best[1]))
        output.append(int(scores.argmax()))
        if params.logprobs is not None:
            logprobs.append(reference_extras.compute_token_logprobs(raw, output[-1], params.logprobs))
        finish = reference_extras.find_finish(out, params.stop, decode)
        if finish is not None:
            return ExpectedOutput(output, *finish, logprobs, min_lead > MIN_LEAD)


def have_same_logprobs(got: list[dict[int, float]] | None, want: list[dict[int, float]]) -> bool:
    rows = got or []
    return len(rows) == len(want) and all(
        a.keys() == b.keys() and all(abs(a[t] - b[t]) < 1e-3 for t in a) for a, b in zip(rows, want, strict=True)
    )


def check(got: CompletionOutput, want: ExpectedOutput, counts: bool) -> None:
    assert got.token_ids == want.token_ids
    assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
    assert got.text == want.text
    assert have_same_logprobs(got.logprobs, want.logprobs)
    if counts and want.generation is not None:
        made = want.generation
        assert (got.num_drafts, got.num_accepted_tokens_per_pos) == (made.num_drafts, made.num_accepted_tokens_per_pos)
        assert (got.num_decode_steps, got.is_draft_token) == (len(made.steps), made.is_draft_token)


# Running requests


@dataclass(frozen=True)
class ArrivingRequest:
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival_step: int = 0
    abort_after: int | None = None  # steps after its arrival


@contextmanager
def check_writes(llm: LLM) -> Iterator[None]:
    """Asserts that every pass writes into blocks that only its request uses and that are not in the prefix cache."""
    original = paged.build_query_plan

    def checked(metadata: PagedAttentionMetadata, size: int, window: int | None) -> Any:
        lengths = metadata.num_computed_tokens_B.tolist(), metadata.query_lens_B.tolist()
        rows = zip(metadata.block_tables_BM.tolist(), *lengths, strict=True)
        for table, start, live in rows:
            used = table[: -(-(start + live) // size)]
            owners = [r for r in llm.scheduler.running if r.block_ids[: len(used)] == used]
            assert owners or not live or not any(used), "written into blocks of another request"
            for block in used[start // size :] if live else []:
                assert llm.scheduler.pool.ref_counts[block] == 1 and block not in llm.scheduler.pool._hash_of_block
        return original(metadata, size, window)

    with mock.patch.object(paged, "build_query_plan", checked):
        yield


def run_requests(llm: LLM, requests: Sequence[ArrivingRequest]) -> list[RequestGroup]:
    """Runs all requests and checks the integrity of the engine after each step and at the end."""
    groups: dict[int, RequestGroup] = {}
    step = 0
    while len(groups) < len(requests) or llm.has_unfinished_requests:
        for i, request in enumerate(requests):
            if request.arrival_step == step:
                groups[i] = llm.add_request(list(request.prompt), request.params)
            if request.abort_after is not None and request.arrival_step + request.abort_after == step and i in groups:
                llm.abort_group(groups[i])
        with check_writes(llm):
            llm.step()
        check_scheduler(llm.scheduler)
        step += 1
        assert step < 4000, "it does not finish"
    check_all_released(llm)
    return [groups[i] for i in range(len(requests))]


def check_all_released(llm: LLM) -> None:
    assert not llm.has_unfinished_requests and llm._num_grammars == 0
    pool = llm.scheduler.pool
    check_pool(pool, [])
    assert pool.num_free_blocks == pool.num_blocks - 1
    assert len(llm.scheduler._free_slots) == llm.scheduler.max_num_seqs
