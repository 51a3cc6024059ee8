"""What the engine's tests share: a target with a tokenizer, engines of any size, and what a request must get.

Greedy answers are the reference's, counts included. Sampled ones with a seed are found here by a plain loop: the
reference's distribution says which tokens may come, and the noise of (seed, position, token) which of them does.
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
import torch
from torch import Tensor

from peagle.checkpoints.drafter import load_drafter
from peagle.checkpoints.target import Target, load_decoder, load_tokenizer
from peagle.config import SamplingParams
from peagle.engine.cuda_graphs import PrefillGraph, PrefillGraphs
from peagle.engine.llm import LLM
from peagle.engine.loader import block_bytes
from peagle.engine.prefill import PrefillShape
from peagle.engine.request import CompletionOutput, RequestGroup
from peagle.kernels.attention import paged_torch
from peagle.kernels.sampling.sample import bits_torch, gumbel_torch
from peagle.models.drafter import Drafter
from peagle.speculative import reference
from peagle.speculative.adaptive_k import StepCostTable

LONGEST = 64  # four blocks
EOS = frozenset({ord(","), 500})  # one that the target says now and then, one beyond its vocabulary
CLEAR = 1e-4  # least lead of the best token over the next, against rounding that differs between batches
CHAT = "{% for m in messages %}{{ m['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"


@cache
def home() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def byte_names() -> list[str]:
    """How byte-level tokenizers write each byte: printable ones as they are, the rest from U+0100 up."""
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
def any_costs() -> Path:
    path = home() / "costs.json"
    StepCostTable({(1, k): 1.0 for k in range(8)}).save(path)
    return path


def engine(name: str | None, k: int | str, blocks: int | None = None, **options: Any) -> LLM:
    """`blocks` of the cache that requests may have; one more is nobody's."""
    own = target()
    if blocks is not None:
        cfg = drafter(name).cfg if name is not None else None
        options["kv_cache_memory_bytes"] = (blocks + 1) * block_bytes(own.model.cfg, cfg, 4)
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": LONGEST, "max_num_seqs": 4}
    if k == "auto":
        settings["cost_table"] = any_costs()
    return LLM(own, pairs.drafter_folder(name) if name is not None else None, k, **{**settings, **options})  # type: ignore[arg-type]


def rehearse(llm: LLM, sizes: Sequence[int]) -> list[PrefillShape]:
    """Reads prompts as a GPU would, in passes that are recorded with room for so many rows. What a graph would replay
    is run instead, on the same buffers. Tells for how much each had to make room, as it goes."""
    graphs, replays = PrefillGraphs(llm.model_runner, sizes), []

    def record(room: PrefillShape) -> PrefillGraph:
        def replay() -> None:
            replays.append(room)
            made.first_F = llm.model_runner.prefill(made.packed, room, llm.model_runner.sample_first_tokens)

        numbers = [torch.zeros(size, dtype=torch.long) for size in (sum(room.sizes), room.ends)]
        made = PrefillGraph(room, *numbers, SimpleNamespace(replay=replay))  # type: ignore[arg-type]
        return made

    graphs.captured = [record(graphs.room(rows)) for rows in graphs.sizes]
    llm.model_runner.prefill_graphs = graphs
    return replays


# What a request must get


@dataclass(frozen=True)
class Truth:
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    text: str | None
    logprobs: list[dict[int, float]]
    clear: bool  # no near-tie that rounding could tip
    generation: reference.Generation | None = None  # with its counts, where the reference made it


@cache
def truth(prompt: tuple[int, ...], params: SamplingParams, name: str | None = None, k: int = 0) -> Truth:
    """With a drafter and K the counts are those of that drafter; the text is the same with any."""
    if not params.greedy:
        return sampled_truth(prompt, params)
    least = float("inf")
    original = reference.compute_probs
    # requests that differ only in their parameters read the same sequences
    read, propose = _remembered(reference.run_target, name), _remembered(reference.propose_draft_tokens, name)

    def watched(logits_KV: Tensor, p: SamplingParams) -> Tensor:
        nonlocal least
        if len(logits_KV):
            best = logits_KV.double().topk(2, -1).values
            least = min(least, float((best[:, 0] - best[:, 1]).min()))
        return original(logits_KV, p)

    with mock.patch.multiple(reference, compute_probs=watched, run_target=read, propose_draft_tokens=propose):
        made = reference.generate(
            target().model, prompt, params, EOS, drafter(name) if name else None, k, LONGEST, decode=decode
        )
    return Truth(made.token_ids, made.finish_reason, made.stop_reason, made.text, made.logprobs, least > CLEAR, made)


_MEMORY: dict[Any, Any] = {}


def _remembered(function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    def remembered(model: Any, tokens: list[int], *rest: Any) -> Any:
        # of the arguments only these differ between two calls; aux_hidden_states follow from the tokens
        key = (function.__name__, name, tuple(tokens), *(r for r in rest if isinstance(r, int)))
        if key not in _MEMORY:
            _MEMORY[key] = function(model, tokens, *rest)
        return _MEMORY[key]

    return remembered


@cache
@torch.inference_mode()
def logits_after(tokens: tuple[int, ...]) -> Tensor:
    return reference.run_target(target().model, list(tokens), 1, ())[0][0]


def sampled_truth(prompt: tuple[int, ...], params: SamplingParams) -> Truth:
    assert params.seed is not None
    request = reference.ReferenceRequest(list(prompt), params, EOS, LONGEST, decode)
    said: list[int] = []
    logprobs: list[dict[int, float]] = []
    least = float("inf")
    while True:
        raw = logits_after((*prompt, *said))
        logits = reference.process_logits(raw, params, prompt, said, EOS)
        allowed = reference.compute_probs(logits[None], params)[0] > 0
        position = torch.tensor(len(prompt) + len(said))
        noise = gumbel_torch(bits_torch(torch.tensor(params.seed), position, torch.arange(len(logits)))).double()
        scores = (logits + params.temperature * noise).masked_fill(~allowed, -torch.inf)
        best = scores.topk(2).values
        least = min(least, float(best[0] - best[1]))
        said.append(int(scores.argmax()))
        if params.logprobs is not None:
            logprobs.append(reference.compute_token_logprobs(raw, said[-1], params.logprobs))
        end = reference.find_finish(said, request)
        if end is not None:
            return Truth(said, *end, logprobs, least > CLEAR)


def same_logprobs(got: list[dict[int, float]] | None, want: list[dict[int, float]]) -> bool:
    rows = got or []
    return len(rows) == len(want) and all(
        a.keys() == b.keys() and all(abs(a[t] - b[t]) < 1e-3 for t in a) for a, b in zip(rows, want, strict=True)
    )


def check(got: CompletionOutput, want: Truth, counts: bool) -> None:
    assert got.token_ids == want.token_ids
    assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
    assert got.text == want.text
    assert same_logprobs(got.logprobs, want.logprobs)
    if counts and want.generation is not None:
        made = want.generation
        assert (got.num_drafts, got.num_accepted_tokens_per_pos) == (made.num_drafts, made.num_accepted_tokens_per_pos)
        assert (got.num_decode_steps, got.is_draft_token) == (len(made.steps), made.is_draft_token)


# Playing


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int = 0  # at this step
    stays: int | None = None  # steps until it is aborted


@contextmanager
def watched_writes(llm: LLM) -> Iterator[None]:
    """Every pass must write into blocks that its request holds, alone, and that nobody can find yet."""
    original = paged_torch.build_query_plan

    def cut(metadata: paged_torch.PagedAttentionMetadata, size: int, window: int | None) -> Any:
        lengths = metadata.num_computed_tokens_B.tolist(), metadata.query_lens_B.tolist()
        rows = zip(metadata.block_tables_BM.tolist(), *lengths, strict=True)
        for table, start, live in rows:
            used = table[: -(-(start + live) // size)]
            owners = [r for r in llm.scheduler.running if r.block_ids[: len(used)] == used]
            assert owners or not live, "written into blocks that are not the request's"
            for block in used[start // size :] if live else []:
                assert llm.scheduler.pool.ref_counts[block] == 1 and block not in llm.scheduler.pool._hash_of_block
        return original(metadata, size, window)

    with mock.patch.object(paged_torch, "build_query_plan", cut):
        yield


def play(llm: LLM, asked: Sequence[Asked]) -> list[RequestGroup]:
    """All of them through the engine, proving after each step that nothing is lost, and at the end that
    everything was given back."""
    groups: dict[int, RequestGroup] = {}
    step = 0
    while len(groups) < len(asked) or llm.has_unfinished_requests:
        for i, one in enumerate(asked):
            if one.arrives == step:
                groups[i] = llm.add_request(list(one.prompt), one.params)
            if one.stays is not None and one.arrives + one.stays == step and i in groups:
                llm.abort_group(groups[i])
        with watched_writes(llm):
            llm.step()
        llm.check_integrity()
        step += 1
        assert step < 4000, "it does not end"
    nothing_left(llm)
    return [groups[i] for i in range(len(asked))]


def nothing_left(llm: LLM) -> None:
    assert not llm.has_unfinished_requests and llm._shaped == 0
    pool = llm.scheduler.pool
    pool.check_integrity([])
    assert pool.num_free_blocks == pool.num_blocks - 1
    assert len(llm.scheduler._slots) == llm.scheduler.max_num_seqs
