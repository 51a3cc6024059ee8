"""peagle beside stock vLLM on one GPU: the same checkpoints, prompts and output lengths.

    python benchmarks/serving.py --vllm-path DEST --smollm2 DIR --prompts train_prompts.jsonl.gz --out serving.json

Every engine is a worker process of its own. Starting vLLM is mostly host work, so workers start side by side;
they are measured strictly one at a time, while the others wait for a line on their standard input. The start-up
row is different: there one worker of each side starts alone, with empty compile caches. Results are written to
--out after every measurement; `--resume` keeps what is there and measures the rest. Prints a table, then one
JSON line. `--tiny` runs everything on the CPU in a toy size, to try the script itself.

The 8B rows have random weights, so acceptance is synthetic on both sides: draft i is accepted with the same
unconditional rate. Rates are output tokens over the wall seconds of generate(), prefill included.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RATES = (0.72, 0.52, 0.38, 0.28, 0.21, 0.16, 0.13)
ROWS = ("startup", "c1", "c8", "c64", "16k", "none", "smollm2", "data", "differs")
SIDES = ("vllm", "peagle")
GB = 10**9

Json = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much of everything is run."""

    layers: int = 32
    width: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    prompt: int = 256
    output: int = 256
    small_output: int = 512
    long_prompt: int = 16384
    batch: int = 64
    data_prompts: int = 5000
    data_output: int = 256
    data_seqs: int = 1024
    text_prompts: int = 200
    text_output: int = 128
    text_batch: int = 32
    repeats: int = 3


TINY = Sizes(5, 64, 160, 4, 2, 32, 160, 16, 16, 8, 64, 4, 12, 8, 8, 4, 6, 2, 1)


@dataclass
class Engine:
    """One configuration, in terms that both sides understand."""

    side: str
    name: str
    label: str
    target: str
    drafter: str | None = None
    k: int | str = 0  # drafts a round; "auto" leaves it to peagle
    parallel: bool = True
    synthetic: bool = True
    rates: tuple[float, ...] = RATES  # of accepting draft i, where that is synthetic
    dummy: bool = True
    alone: bool = False  # starts with nothing beside it, for the start-up row
    max_num_seqs: int = 64
    max_model_len: int = 1024
    kv_bytes: int = 6 * GB
    capture: int | None = None  # vLLM's largest CUDA graph, where its default of 512 tokens is too small
    plain: bool = False  # a second try of vLLM, with neither that nor its faster argmax
    gpu_gb: float = 30.0  # what it takes on the GPU, for deciding how many start side by side
    measures: list[Json] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.side}/{self.name}"


def wanted_engines(rows: set[str], sides: list[str], sizes: Sizes) -> list[Engine]:
    """Every engine with the measurements that the rows need of it, those that start alone first."""
    vocab, reps = sizes.vocab, sizes.repeats

    def speed(name: str, c: int, count: int, length: int, tokens: int, ids: int) -> Json:
        one = {"name": name, "kind": "speed", "concurrency": c, "count": count, "max_tokens": tokens, "repeats": reps}
        return one | {"random": length, "vocab": ids}

    p, o, b = sizes.prompt, sizes.output, sizes.batch
    few = max(1, b // 8)
    c1 = speed("c1", 1, few, p, o, vocab)
    none1 = speed("c1", 1, max(1, few // 4), p, o, vocab)
    c8 = speed("c8", few, few, p, o, vocab)
    c64 = speed("c64", b, b, p, o, vocab)
    long = speed("16k", 1, max(1, few // 2 - 1), sizes.long_prompt, o, vocab)
    small = 49152
    s1 = speed("c1", 1, max(1, few // 2), p, sizes.small_output, small)
    s8 = speed("c8", few, few, p, sizes.small_output, small)
    s64 = speed("c64", b, b, p, sizes.small_output, small)
    data: Json = {"name": "data", "kind": "data", "count": sizes.data_prompts, "max_tokens": sizes.data_output}
    data |= {"temperature": 0.7, "warm": sizes.data_seqs}
    texts: Json = {"name": "texts", "kind": "texts", "count": sizes.text_prompts, "max_tokens": sizes.text_output}
    texts |= {"batches": [sizes.text_batch, max(1, sizes.text_batch // 2)]}

    def needed(*pairs: tuple[str, Json]) -> list[Json]:
        return [measure for row, measure in pairs if row in rows]

    room = sizes.long_prompt + o + 256
    e8 = Engine("", "", "", "8b", max_num_seqs=b, max_model_len=2 * p + o + 256, kv_bytes=54 * GB // 10)
    sm = Engine("", "", "", "smollm2", max_num_seqs=b, max_model_len=2048, kv_bytes=2 * GB, gpu_gb=7, dummy=False)
    found: list[Engine] = []
    for side in sides:
        vllm = side == "vllm"
        p7 = needed(("c1", c1), ("c8", c8), ("16k", long))
        if vllm:
            p7 += needed(("c64", c64))
        found.append(
            replace(
                e8,
                side=side,
                name="8b-p7",
                label="P-EAGLE K=7",
                drafter="8b-p4",
                k=7,
                alone="startup" in rows,
                max_model_len=room,
                measures=p7,
            )
        )
        none = needed(("none", none1))
        if vllm:
            none += needed(("c64", c64))
        found.append(
            replace(e8, side=side, name="8b-none", label="no drafter", gpu_gb=25 if vllm else 23, measures=none)
        )
        if vllm:
            of64 = needed(("c64", c64))
            e3 = replace(e8, side=side, drafter="8b-e1", k=3, parallel=False, gpu_gb=27, measures=of64)
            found.append(replace(e3, name="8b-e3", label="EAGLE-3 K=3"))
            pe = replace(e8, side=side, drafter="8b-p4", measures=of64)
            found.append(replace(pe, name="8b-p3", label="P-EAGLE K=3", k=3))
            # 64 requests draft on 10 rows each: more than vLLM's largest graph by default
            found.append(replace(pe, name="8b-p5", label="P-EAGLE K=5", k=5, capture=1024, gpu_gb=31))
        else:
            auto = replace(e8, side=side, drafter="8b-p4", measures=needed(("c64", c64)))
            found.append(replace(auto, name="8b-auto", label="P-EAGLE K auto", k="auto"))
        found.append(
            replace(
                sm,
                side=side,
                name="smollm2-p7",
                label="P-EAGLE K=7",
                drafter="smollm2-p4",
                k=7,
                capture=1024,
                measures=needed(("smollm2", s1), ("smollm2", s8), ("smollm2", s64)),
            )
        )
        own = replace(sm, side=side, drafter="shipped", k=7, synthetic=False, measures=needed(("differs", texts)))
        found.append(replace(own, name="smollm2-own", label="shipped drafter K=7"))
        for seqs in (sizes.data_seqs, sizes.data_seqs // 2) if vllm else (sizes.data_seqs,):
            full = seqs == sizes.data_seqs
            found.append(
                replace(
                    sm,
                    side=side,
                    name=f"smollm2-none-{seqs}",
                    label=f"no drafter, {seqs} at once",
                    max_num_seqs=seqs,
                    kv_bytes=12 * GB,
                    capture=seqs,
                    gpu_gb=18,
                    measures=(needed(("differs", texts)) if full else []) + needed(("data", data)),
                )
            )
    found = [e for e in found if e.measures or e.alone]
    return sorted(found, key=lambda e: not e.alone)


def target_config(sizes: Sizes) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "rope_theta": 500000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "bos_token_id": sizes.vocab - 2,
        "eos_token_id": sizes.vocab - 1,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def write_config(folder: Path, config: Json) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_hollow(folder: Path, config: Json, shapes: dict[str, tuple[int, ...]]) -> None:
    """A checkpoint whose header is whole and whose bytes are a hole in the file: for loading with random weights.

    Nobody reads the bytes then, but a loader may look up names and shapes.
    """
    write_config(folder, config)
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_checkpoints(engines: list[Engine], sizes: Sizes, smollm2: Path | None, scratch: Path) -> dict[str, str]:
    """Name -> folder of every target and drafter that the engines name."""
    import torch

    from peagle.checkpoints.drafter import config_values, drafter_layout, plain_name, save_drafter
    from peagle.checkpoints.target import read_target_config
    from peagle.config import DecoderConfig, DrafterConfig
    from peagle.hub.resolve import resolve_drafter
    from peagle.models.drafter import Drafter

    def drafter_for(target: DecoderConfig, layers: int, mask_id: int | None) -> DrafterConfig:
        return DrafterConfig(
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            num_layers=layers,
            layer=target.layer,
            rope=target.rope,
            max_positions=target.max_positions,
            target_hidden_size=target.layer.hidden_size,
            aux_layer_ids=target.default_aux_layer_ids,
            mask_token_id=mask_id,
        )

    folders: dict[str, str] = {"shipped": str(resolve_drafter("smollm2-135m-p-eagle"))}
    if smollm2 is not None:
        folders["smollm2"] = str(smollm2)
    config = target_config(sizes)
    write_config(scratch / "8b", config)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (scratch / "8b" / "generation_config.json").write_text(json.dumps(ends))
    folders["8b"] = str(scratch / "8b")
    big = read_target_config(scratch / "8b")
    for name, layers, mask_id in (("8b-p4", 4, sizes.vocab - 3), ("8b-e1", 1, None)):
        cfg = drafter_for(big, layers, mask_id)
        shapes = {plain_name(n): slot.shape for n, slot in drafter_layout(cfg).items()}
        write_hollow(scratch / name, config_values(cfg, torch.bfloat16), shapes)
        folders[name] = str(scratch / name)
    if any(e.drafter == "smollm2-p4" for e in engines) and smollm2 is not None:
        folders["smollm2-p4"] = str(scratch / "smollm2-p4")
        if not (scratch / "smollm2-p4").exists():
            cfg = drafter_for(read_target_config(smollm2), 4, 16)
            drafter = Drafter(cfg)
            rng = torch.Generator().manual_seed(0)
            for parameter in drafter.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.02, generator=rng)
            save_drafter(drafter.to(torch.bfloat16), scratch / "smollm2-p4")
    return folders


def round_bytes(sizes: Sizes, drafter_layers: int) -> int:
    """What one round at concurrency 1 must read: the target but its embeddings, the drafter and its head."""
    width, heads = sizes.width, sizes.heads * sizes.head_dim
    kv = 2 * sizes.kv_heads * sizes.head_dim
    mlp = 3 * width * sizes.intermediate
    layer = width * (heads + kv) + heads * width + mlp + 2 * width
    head = sizes.vocab * width
    target = sizes.layers * layer + width + head
    drafter = 3 * width * width + drafter_layers * layer + width * (heads + kv) + 2 * width + head
    return 2 * (target + drafter)


def write_prompts(file: Path | None, smollm2: Path | None, sizes: Sizes, into: Path) -> str | None:
    """Token ids of the first turns in SmolLM2's chat template; those for the texts come after those for the data."""
    if file is None or smollm2 is None:
        return None
    from peagle.checkpoints.target import encode_prompt, load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    wanted = sizes.data_prompts + sizes.text_prompts
    ids: list[list[int]] = []
    with gzip.open(file, "rt") if file.suffix == ".gz" else open(file) as lines:
        for line in lines:
            row = json.loads(line)
            one = encode_prompt(tokenizer, row["turns"][0] if "turns" in row else row["prompt"], raw=False)
            if len(one) <= 1024:
                ids.append(one)
            if len(ids) == wanted:
                break
    if len(ids) < wanted:
        print(f"{file}: only {len(ids)} of {wanted} prompts; they are repeated", flush=True)
        ids = [ids[i % len(ids)] for i in range(wanted)]
    into.write_text(json.dumps(ids))
    return str(into)


@dataclass
class Run:
    """What one generate() gave: tokens by request, and the rounds of decoding it took where that is known."""

    tokens: list[list[int]]
    rounds: int | None = None
    accepted: list[int] | None = None

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


Generate = Callable[..., Run]


def open_peagle(job: Json, adjust: Callable[[Any], Json] | None = None) -> tuple[Generate, Json]:
    """Every call into peagle stands here."""
    import peagle
    from peagle import LLM, SamplingParams

    settings: Json = {}
    if job["drafter"]:
        settings["num_speculative_tokens"] = job["k"]
        if job["synthetic"]:
            settings["synthetic_acceptance_rates"] = job["rates"]
    llm = LLM(
        job["target"],
        job["drafter"],
        device=job["device"],
        dtype=job["dtype"],
        max_num_seqs=job["max_num_seqs"],
        max_model_len=job["max_model_len"],
        kv_cache_memory=job["kv_bytes"],
        load_format="dummy" if job["dummy"] else "auto",
        prefix_reuse=False,  # as on the other side
        tokenizer=False,  # likewise: ids in, ids out
        **settings,
    )

    def generate(prompts: list[list[int]], max_tokens: int, temperature: float = 0.0, ignore_eos: bool = True) -> Run:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos)
        outputs = [request.outputs[0] for request in llm.generate(prompts, params)]
        tokens = [list(out.token_ids) for out in outputs]
        by_position = zip_longest(*(out.accepted_per_position for out in outputs), fillvalue=0)
        return Run(tokens, sum(out.rounds for out in outputs), [sum(counts) for counts in by_position])

    return generate, {"peagle": peagle.__version__} | (adjust(llm) if adjust else {})


def open_vllm(job: Json) -> tuple[Generate, Json]:
    """Every call into vLLM stands here. CUDA graphs, torch.compile and asynchronous scheduling are its defaults."""
    import vllm
    from vllm import LLM, SamplingParams

    settings: Json = {}
    if job["drafter"]:
        spec: Json = {"method": "eagle3", "model": job["drafter"], "num_speculative_tokens": job["k"]}
        if job["parallel"]:
            spec["parallel_drafting"] = True
        if job["device"] == "cuda":
            if job["synthetic"]:
                spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": job["rates"]}
            # Its default scatters the draft logits into a second full-vocabulary table before the argmax;
            # this takes the argmax at once, with the same result.
            spec["use_local_argmax_reduction"] = not job["plain"]
        settings["speculative_config"] = spec
    if job["capture"] and job["device"] == "cuda" and not job["plain"]:
        settings["max_cudagraph_capture_size"] = job["capture"]
    if job["device"] == "cpu":
        settings["enforce_eager"] = True
    llm = LLM(
        job["target"],
        dtype=job["dtype"],
        load_format="dummy" if job["dummy"] else "auto",
        skip_tokenizer_init=True,
        max_num_seqs=job["max_num_seqs"],
        max_model_len=job["max_model_len"],
        max_num_batched_tokens=job["batched_tokens"],
        kv_cache_memory_bytes=job["kv_bytes"],
        gpu_memory_utilization=0.05,  # overruled by the line above, but checked against what neighbours leave free
        enable_prefix_caching=False,  # prompts are distinct, so it could only cost
        seed=0,
        **(settings | job["vllm_settings"]),
    )
    about: Json = {"vllm": vllm.__version__, "plain": job["plain"]}
    for call in job["vllm_calls"]:
        about[call] = llm.collective_rpc(call)
    try:
        config = llm.llm_engine.vllm_config
        about["async_scheduling"] = bool(config.scheduler_config.async_scheduling)
        about["runner_v2"] = bool(config.use_v2_model_runner)
        about["cudagraph_mode"] = str(config.compilation_config.cudagraph_mode)
        about["max_capture"] = config.compilation_config.max_cudagraph_capture_size
    except Exception as error:
        about["unknown"] = repr(error)

    # One output of the engine core is one request's share of one round: counting them as they come in costs
    # nothing there, while vLLM's own counters would have to be switched on.
    rounds = [0]
    counting = False
    try:
        core = llm.llm_engine.engine_core
        receive = core.get_output

        def received() -> Any:
            outputs = receive()
            rounds[0] += sum(1 for one in outputs.outputs if one.new_token_ids)
            return outputs

        core.get_output = received
        counting = True
    except Exception as error:
        about["rounds"] = repr(error)

    def generate(prompts: list[list[int]], max_tokens: int, temperature: float = 0.0, ignore_eos: bool = True) -> Run:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            ignore_eos=ignore_eos,
            stop_token_ids=None if ignore_eos else job["eos_ids"],
            detokenize=False,
        )
        rounds[0] = 0
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        tokens = [list(out.outputs[0].token_ids) for out in outputs]
        return Run(tokens, rounds[0] - len(tokens) if counting else None)

    return generate, about


def prompts_for(measure: Json, turn: int, prompts_file: str | None) -> list[list[int]]:
    """Fresh ones for every turn, the same on both sides, so that no cache of prefixes helps anyone."""
    if "random" in measure:
        rng = random.Random(f"{measure['name']}-{turn}")
        ids = range(10, measure["vocab"] - 10)
        return [rng.choices(ids, k=measure["random"]) for _ in range(measure["count"])]
    assert prompts_file is not None, "this measurement needs --prompts and --smollm2"
    return json.loads(Path(prompts_file).read_text())


def timed(generate: Generate, prompts: list[list[int]], at_once: int, max_tokens: int) -> tuple[float, list[Run]]:
    runs = []
    started = time.perf_counter()
    for i in range(0, len(prompts), at_once):
        runs.append(generate(prompts[i : i + at_once], max_tokens))
    return time.perf_counter() - started, runs


def measure_speed(generate: Generate, measure: Json, job: Json) -> Json:
    c, tokens = measure["concurrency"], measure["max_tokens"]
    timed(generate, prompts_for(measure, -1, None)[: max(c, 2)], c, tokens)
    turns = []
    for turn in range(measure["repeats"]):
        prompts = prompts_for(measure, turn, None)
        # The same prompts for one token: what prefill takes. Other prompts, since one engine may keep prefixes.
        prefill_s, _ = timed(generate, prompts_for(measure, turn + 1000, None), c, 1)
        seconds, runs = timed(generate, prompts, c, tokens)
        count = sum(run.count for run in runs)
        rounds = None if any(run.rounds is None for run in runs) else sum(run.rounds or 0 for run in runs)
        one: Json = {"seconds": seconds, "prefill_s": prefill_s, "tokens": count, "rounds": rounds}
        one["tok_s"] = count / seconds
        one["decode_tok_s"] = (count - len(prompts)) / (seconds - prefill_s)
        if rounds:
            one["al"] = (count - len(prompts)) / rounds
            if c == 1:
                one["round_ms"] = 1000 * (seconds - prefill_s) / rounds
            if job["drafter"] and job["synthetic"] and job["k"] != "auto":
                # Luck of the draw taken out: the same rounds, had they accepted what the rates promise
                promised = 1 + sum(job["rates"])
                even = prefill_s + (seconds - prefill_s) * one["al"] / promised
                one["even_tok_s"] = count / even
        if rounds and all(run.accepted for run in runs):
            sums = [sum(counts) for counts in zip_longest(*(run.accepted or [] for run in runs), fillvalue=0)]
            one["accepted_share"] = [round(n / rounds, 3) for n in sums]
        turns.append(one)
    result: Json = {"turns": turns, "concurrency": c, "requests": measure["count"]}
    for name in ("tok_s", "decode_tok_s", "even_tok_s", "al", "round_ms", "prefill_s", "rounds"):
        values = [turn[name] for turn in turns if turn.get(name) is not None]
        if values:
            result[name] = statistics.median(values)
    return result


def measure_data(generate: Generate, measure: Json, job: Json) -> Json:
    """All prompts in one call, sampled, ended by the end of the text: how training data is written."""
    prompts = prompts_for(measure, 0, job["prompts"])
    chosen, others = prompts[: measure["count"]], prompts[: measure["warm"]][::-1]
    settings = {"temperature": measure["temperature"], "ignore_eos": False}
    generate([p[:64] for p in others], 16, **settings)
    started = time.perf_counter()
    run = generate(chosen, measure["max_tokens"], **settings)
    seconds = time.perf_counter() - started
    ended = sum(len(tokens) < measure["max_tokens"] for tokens in run.tokens)
    return {
        "seconds": seconds,
        "tokens": run.count,
        "tok_s": run.count / seconds,
        "prompts_s": len(chosen) / seconds,
        "mean_tokens": run.count / len(chosen),
        "prompt_tokens": sum(map(len, chosen)),
        "ended_share": ended / len(chosen),
    }


def measure_texts(generate: Generate, measure: Json, job: Json) -> Json:
    """Greedy texts, as a fingerprint each; the second batch size shows how far batching alone moves them."""
    prompts = prompts_for(measure, 0, job["prompts"])[-measure["count"] :]
    result: Json = {"count": len(prompts)}
    for name, size in zip(("texts", "texts_other_batch"), measure["batches"], strict=True):
        texts: list[list[int]] = []
        runs = []
        for i in range(0, len(prompts), size):
            runs.append(generate(prompts[i : i + size], measure["max_tokens"], ignore_eos=False))
            texts += runs[-1].tokens
        result[name] = [hashlib.sha256(json.dumps(t).encode()).hexdigest()[:12] for t in texts]
        rounds = sum(run.rounds or 0 for run in runs)
        if rounds and job["drafter"]:
            result["al"] = (sum(map(len, texts)) - len(texts)) / rounds
    return result


MEASURES = {"speed": measure_speed, "data": measure_data, "texts": measure_texts}


def write_json(path: Path, value: Any) -> None:
    """Seen whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(value))
    os.replace(unfinished, path)


def worker(
    file: Path,
    measures: Mapping[str, Callable[[Generate, Json, Json], Json]] = MEASURES,
    adjust: Callable[[Any], Json] | None = None,
) -> None:
    """Builds one engine, says so in ready.json, then measures what each line of standard input asks for.

    `adjust` is done to peagle's engine before its first token, as a session's `vllm_calls` are to vLLM's.
    """
    job = json.loads(file.read_text())
    folder = Path(job["folder"])
    vocab = job["vocab"]

    def since() -> float:
        return time.time() - job["started"]

    try:
        generate, about = open_vllm(job) if job["side"] == "vllm" else open_peagle(job, adjust)
        ready: Json = {"about": about, "built_s": since()}
        first = {"name": "first", "random": job["first_prompt"], "vocab": vocab, "count": 2}
        one, other = prompts_for(first, 0, None)
        generate([one], 1)
        ready["first_token_s"] = since()
        if job["alone"]:
            # A first token may come before everything is compiled; this shows when full speed is reached.
            generate([other], job["first_prompt"])
            ready["first_text_s"] = since()
        write_json(folder / "ready.json", ready)
    except BaseException as error:
        write_json(folder / "ready.json", {"error": f"{type(error).__name__}: {error}"[:2000]})
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    for line in sys.stdin:
        measure = json.loads(line)
        try:
            result = measures[measure["kind"]](generate, measure, job)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        write_json(folder / f"{measure['name']}.json", result)
    sys.stdout.flush()
    os._exit(0)


def probe() -> None:
    """The GPU's name, memory and copy rate, as one JSON line."""
    import torch

    if not torch.cuda.is_available():
        print(json.dumps({"gpu": None, "torch": torch.__version__}))
        return
    size = 4 << 30
    source, sink = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = 0.0
    for _ in range(5):
        start.record()
        for _ in range(10):
            sink.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 10 * 2 * size / (start.elapsed_time(end) / 1000))
    properties = torch.cuda.get_device_properties(0)
    facts = {"gpu": properties.name, "memory_gb": properties.total_memory / GB, "copy_tb_s": best / 1e12}
    print(json.dumps(facts | {"torch": torch.__version__, "cuda": torch.version.cuda}))


class Worker:
    """The parent's end of a worker process."""

    def __init__(self, engine: Engine, job: Json, scratch: Path, env: dict[str, str], python: str) -> None:
        self.engine = engine
        # A new folder each time, so that compile caches inside it are empty
        self.folder = Path(tempfile.mkdtemp(prefix=f"{engine.side}-{engine.name}-", dir=scratch))
        self.log = self.folder / "log.txt"
        cache = self.folder / "cache"
        env = env | {
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TRITON_CACHE_DIR": job["triton_cache"] or str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        }
        file = self.folder / "job.json"
        command = [python, job["script"], "--worker", str(file)]
        file.write_text(json.dumps(job | {"folder": str(self.folder), "started": time.time()}))
        with open(self.log, "wb") as log:
            # Its own session: vLLM's engine core is a grandchild, and both must be gone at the end.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def read(self, name: str) -> Json | None:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def ready(self) -> Json | None:
        """None while it starts."""
        if found := self.read("ready"):
            return found
        if self.process.poll() is not None:
            return self.read("ready") or {"error": f"exit status {self.process.returncode} while starting"}
        return None

    def ask(self, measure: Json, deadline: float) -> Json:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((json.dumps(measure) + "\n").encode())
            self.process.stdin.flush()
        except OSError as error:
            return {"error": f"worker is gone: {error}"}
        while time.time() < deadline:
            if found := self.read(measure["name"]):
                return found
            if self.process.poll() is not None:
                return self.read(measure["name"]) or {"error": f"exit status {self.process.returncode}"}
            time.sleep(0.05)
        return {"error": "out of time"}

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def stop(self) -> None:
        """Kills the whole group; a polite end takes vLLM seconds and there is nothing left to save."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        shutil.rmtree(self.folder / "cache", ignore_errors=True)


class Session:
    """All of one call: waves of workers, what they measured, and the time that is left."""

    script = Path(__file__).resolve()  # what a worker runs
    filled = 0.93  # of the GPU's memory, by a wave
    batched_tokens = 16384 + 512  # vLLM reads in one step
    warm_triton = False  # kernels compiled by one worker serve those started after it
    vllm_settings: Json = {}  # further ones
    vllm_calls: tuple[str, ...] = ()  # what its workers are asked to do before the first token

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        if args.vllm_path:
            args.vllm_path = args.vllm_path.resolve()
        self.sizes = TINY if args.tiny else Sizes()
        self.device = "cpu" if args.tiny else "cuda"
        self.began = time.time()
        self.deadline = self.began + args.seconds
        self.scratch = Path(args.scratch or tempfile.mkdtemp(prefix="peagle-serving-")).resolve()
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.live: list[Worker] = []
        self.results: Json = {"measurements": {}, "starts": {}, "notes": [], "calls": []}
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
        if args.resume and args.out and args.out.exists():
            self.results |= json.loads(args.out.read_text())
        self.machine: Json = {}
        self.folders: dict[str, str] = {}
        self.prompts: str | None = None

    def left(self) -> float:
        return self.deadline - time.time()

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.began:6.1f} s] {text}", flush=True)

    def note(self, text: str) -> None:
        self.say(text)
        self.results["notes"].append(text)

    def failed(self, one: Worker, why: str) -> None:
        self.note(f"{one.engine.key} {why}")
        print(one.tail(), flush=True)
        if self.args.out:
            shutil.copy(one.log, self.args.out.with_name(f"{one.engine.side}-{one.engine.name}.log"))

    def save(self) -> None:
        if self.args.out:
            write_json(self.args.out, self.results | {"rows": self.rows()})

    def missing(self, engine: Engine) -> list[Json]:
        done = self.results["measurements"].get(engine.key, {})
        return [m for m in engine.measures if "error" in done.get(m["name"], {"error": "not measured"})]

    def prepare(self, engines: list[Engine]) -> list[Engine]:
        """Writes what the workers need; the engines, without what cannot be measured for want of it."""
        compiling = None
        if self.args.vllm_path and any(e.side == "vllm" for e in engines):
            # Unpacked wheels hold no bytecode; without it vLLM's first start would pay for the compiler.
            command = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(self.args.vllm_path)]
            if not list((self.args.vllm_path / "vllm").glob("__pycache__/*")):
                compiling = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        command = [sys.executable, str(Path(__file__).resolve()), "--probe"]
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
            self.machine = json.loads(asked.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError, subprocess.SubprocessError) as error:
            self.note(f"the GPU could not be asked: {error!r} {getattr(error, 'stderr', '') or ''}"[:1000])
        engines = self.write_inputs(engines)
        if compiling is not None:
            try:
                compiling.wait(60)
            except subprocess.TimeoutExpired:
                compiling.kill()
        usable = [e for e in engines if e.target in self.folders and (e.measures or e.alone)]
        self.say(f"prepared {len(usable)} engines in {self.scratch}; {self.machine}")
        return usable

    def write_inputs(self, engines: list[Engine]) -> list[Engine]:
        """Checkpoints and prompts."""
        smollm2 = self.args.smollm2
        try:
            if smollm2 is None and any(e.target == "smollm2" for e in engines):
                from peagle.hub.resolve import resolve_target

                smollm2 = resolve_target("smollm2-135m")
        except Exception as error:
            self.note(f"no SmolLM2: {error}")
        if smollm2 is not None and not (smollm2 / "config.json").is_file():
            self.note(f"--smollm2 {smollm2}: no checkpoint there, its rows are left out")
            smollm2 = None
        self.folders = write_checkpoints(engines, self.sizes, smollm2, self.scratch)
        try:
            if any(m["kind"] in ("data", "texts") for e in engines for m in e.measures):
                self.prompts = write_prompts(self.args.prompts, smollm2, self.sizes, self.scratch / "prompts.json")
        except Exception as error:
            self.note(f"no prompts from {self.args.prompts}: {error!r}")
        if self.prompts is None:
            if any(m["kind"] != "speed" for e in engines for m in e.measures):
                self.note("no prompts (--prompts), so the rows data and differs are left out")
            engines = [replace(e, measures=[m for m in e.measures if m["kind"] == "speed"]) for e in engines]
        return engines

    def start(self, engine: Engine) -> Worker:
        target = Path(self.folders[engine.target])
        k = 7 if engine.k == "auto" else int(engine.k)
        eos = json.loads((target / "generation_config.json").read_text()).get("eos_token_id")
        job = {name: value for name, value in asdict(engine).items() if name != "measures"}
        job |= {
            "target": str(target),
            "drafter": self.folders[engine.drafter] if engine.drafter else None,
            "rates": list(engine.rates[:k]),
            "script": str(self.script),
            "triton_cache": str(self.scratch / "triton") if self.warm_triton else None,
            "vllm_settings": self.vllm_settings,
            "vllm_calls": self.vllm_calls,
            "device": self.device,
            "dtype": "float32" if self.args.tiny else "bfloat16",
            "kv_bytes": GB // 2 if self.args.tiny else engine.kv_bytes,
            "batched_tokens": 2048 if self.args.tiny else self.batched_tokens,
            "eos_ids": eos if isinstance(eos, list) else [eos],
            "vocab": json.loads((target / "config.json").read_text())["vocab_size"],
            "first_prompt": self.sizes.prompt,
            "prompts": self.prompts,
        }
        env = os.environ | {
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        path = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
        if engine.side == "vllm":
            env |= {
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            }
            if self.args.tiny:
                env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            path = [str(self.args.vllm_path)] * bool(self.args.vllm_path) + path
        else:
            path = [str(ROOT), *path]
        env["PYTHONPATH"] = os.pathsep.join(path)
        python = self.args.vllm_python if engine.side == "vllm" else sys.executable
        one = Worker(engine, job, self.scratch, env, python)
        self.live.append(one)
        return one

    def stop(self, one: Worker) -> None:
        one.stop()
        if one in self.live:
            self.live.remove(one)

    def run(self, engines: list[Engine]) -> None:
        queue = [e for e in engines if self.missing(e) or (e.alone and e.key not in self.results["starts"])]
        tried: set[str] = set()
        while queue:
            least = 60 if any(e.side == "vllm" for e in queue[:1]) else 20
            if self.left() < (5 if self.args.tiny else least):
                self.note(f"out of time: not started: {', '.join(e.key for e in queue)}")
                return
            wave = self.next_wave(queue)
            again = [e for e in self.run_wave(wave) if e.key not in tried]
            tried |= {e.key for e in again}
            queue = queue[len(wave) :] + again

    def next_wave(self, queue: list[Engine]) -> list[Engine]:
        if queue[0].alone:
            return queue[:1]
        room = self.machine.get("memory_gb", 150.0) * self.filled
        wave: list[Engine] = []
        for engine in queue:
            room -= engine.gpu_gb
            if wave and (room < 0 or len(wave) == self.args.parallel):
                break
            wave.append(engine)
        return wave

    def run_wave(self, wave: list[Engine]) -> list[Engine]:
        """Starts all, waits until none is starting any more, measures one after the other. Returns whom to retry.

        A second try costs minutes of a GPU at worst; a row that is missing costs a whole further call.
        """
        self.say(f"starting {', '.join(e.key for e in wave)}")
        waiting, ready, again = [self.start(engine) for engine in wave], [], []
        # Whoever is slow must leave time to measure the others.
        give_up = min(time.time() + self.args.start_seconds, self.deadline - 10)
        while waiting and time.time() < give_up:
            time.sleep(0.1)
            for one in list(waiting):
                state = one.ready()
                if state is None:
                    continue
                waiting.remove(one)
                key = one.engine.key
                if "error" in state:
                    self.failed(one, f"did not start: {state['error'][:300]}")
                    again.append(replace(one.engine, alone=False, plain=True))
                    self.stop(one)
                else:
                    kept = "starts" if one.engine.alone else "starts_side_by_side"
                    self.results.setdefault(kept, {})[key] = state
                    self.say(f"{key} ready, first token after {state['first_token_s']:.1f} s")
                    ready.append(one)
        for one in waiting:
            self.failed(one, "was still starting when time was up")
            self.stop(one)
        self.save()
        for one in sorted(ready, key=lambda w: wave.index(w.engine)):
            for measure in self.missing(one.engine):
                if self.left() < 3:
                    self.note(f"out of time: {one.engine.key} {measure['name']} not measured")
                    continue
                result = one.ask(measure, min(self.deadline, time.time() + self.args.measure_seconds))
                self.results["measurements"].setdefault(one.engine.key, {})[measure["name"]] = result
                if "error" in result:
                    self.failed(one, f"{measure['name']}: {result['error'][:300]}")
                else:
                    figure = f"{result['tok_s']:.0f} tok/s" if "tok_s" in result else "done"
                    self.say(f"{one.engine.key} {measure['name']}: {figure}")
                self.save()
            self.stop(one)
        return again

    def found(self, key: str, measure: str) -> Json | None:
        one = self.results["measurements"].get(key, {}).get(measure)
        return one if one and "error" not in one else None

    def rows(self) -> list[Json]:
        """What was measured, set beside the goals."""
        labels = {e.key: e.label for e in wanted_engines(set(ROWS), ["vllm", "peagle"], self.sizes)}
        rows: list[Json] = []

        def faster(row: str, goal: float, measure: str, theirs: list[str], ours: str, value: str = "tok_s") -> None:
            all_theirs = {f"vllm/{name}": self.found(f"vllm/{name}", measure) for name in theirs}
            measured = {key: one for key, one in all_theirs.items() if one and value in one}
            mine = self.found(f"peagle/{ours}", measure)
            best = max(measured, key=lambda key: measured[key][value], default=None)
            one: Json = {"row": row, "goal": f"{goal:g}x", "unit": value}
            if best:
                one |= {"vllm": measured[best][value], "vllm_configuration": labels[best]}
                one["vllm_all"] = {labels[key]: m[value] for key, m in measured.items()}
                one["vllm_missing"] = [labels[key] for key in all_theirs if key not in measured]
                one["vllm_al"] = measured[best].get("al")
            if mine and value in mine:
                one |= {"peagle": mine[value], "peagle_al": mine.get("al")}
            if best and mine and value in mine:
                one["ratio"] = mine[value] / measured[best][value]
                one["met"] = one["ratio"] >= goal
                if value == "tok_s" and "even_tok_s" in mine and "even_tok_s" in measured[best]:
                    one["ratio_at_equal_acceptance"] = mine["even_tok_s"] / measured[best]["even_tok_s"]
            if best or mine:
                rows.append(one)

        def beside(
            row: str, goal: str, vllm: float | None, peagle: float | None, met: bool | None, **more: Any
        ) -> None:
            if vllm is None and peagle is None:
                return
            one: Json = {"row": row, "goal": goal, **more}
            one |= {name: value for name, value in (("vllm", vllm), ("peagle", peagle)) if value is not None}
            rows.append(one | ({"met": met} if met is not None else {}))

        faster("8B, P-EAGLE K=7, c=1", 1.25, "c1", ["8b-p7"], "8b-p7")
        shares: dict[str, float] = {}
        copy = self.machine.get("copy_tb_s") or self.results.get("copy_tb_s")
        if copy:
            floor_ms = round_bytes(self.sizes, 4) / (copy * 1e12) * 1000
            for side in ("vllm", "peagle"):
                if (one := self.found(f"{side}/8b-p7", "c1")) and "round_ms" in one:
                    shares[side] = floor_ms / one["round_ms"]
            ours = shares.get("peagle")
            met = None if ours is None else ours >= 0.8
            more = {"unit": "share of the memory limit", "floor_ms": floor_ms}
            beside("8B, P-EAGLE K=7, c=1: memory limit", "80%", shares.get("vllm"), ours, met, **more)
        faster("8B, P-EAGLE K=7, c=8", 1.2, "c8", ["8b-p7"], "8b-p7")
        faster("8B, K auto, c=64", 1.15, "c64", ["8b-none", "8b-e3", "8b-p3", "8b-p5", "8b-p7"], "8b-auto")
        for name, goal in (("c1", 4.0), ("c8", 2.5), ("c64", 1.3)):
            faster(f"SmolLM2, P-EAGLE K=7, {name[0]}={name[1:]}", goal, name, ["smollm2-p7"], "smollm2-p7")
        seqs = self.sizes.data_seqs
        both = [f"smollm2-none-{seqs}", f"smollm2-none-{seqs // 2}"]
        faster("SmolLM2, 5,000 prompts, T=0.7", 2.0, "data", both, both[0])
        faster("8B, P-EAGLE K=7, c=1, 16K context", 1.25, "16k", ["8b-p7"], "8b-p7")
        faster("the same, decoding alone", 1.25, "16k", ["8b-p7"], "8b-p7", "decode_tok_s")
        faster("8B, no drafter, c=1", 1.1, "c1", ["8b-none"], "8b-none")
        starts = {side: self.results["starts"].get(f"{side}/8b-p7") for side in ("vllm", "peagle")}
        first = {side: one["first_token_s"] for side, one in starts.items() if one}
        ratio = first["vllm"] / first["peagle"] if len(first) == 2 else None
        more = {"unit": "s", "first_text_s": {side: one.get("first_text_s") for side, one in starts.items() if one}}
        if ratio is not None:
            more["ratio"] = ratio
        met = None if ratio is None else ratio >= 2
        beside("8B start-up to first token", "half", first.get("vllm"), first.get("peagle"), met, **more)
        differs: dict[str, float] = {}
        batching: dict[str, float] = {}
        for side in ("vllm", "peagle"):
            on, off = self.found(f"{side}/smollm2-own", "texts"), self.found(f"{side}/{both[0]}", "texts")
            if on and off:
                differs[side] = differing(on["texts"], off["texts"])
                batching[side] = differing(off["texts"], off["texts_other_batch"])
        met = differs["peagle"] <= differs["vllm"] if len(differs) == 2 else None
        more = {"unit": "share of texts", "differing_by_batch_size_alone": batching}
        beside("bf16: texts changed by speculation", "no more", differs.get("vllm"), differs.get("peagle"), met, **more)
        return rows

    def table(self, rows: list[Json]) -> str:
        return table(rows)

    def report(self) -> None:
        if copy := self.machine.get("copy_tb_s"):
            self.results["copy_tb_s"] = copy
        commit = ""
        if shutil.which("git"):
            found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
            commit = found.stdout.strip()
        versions = {"python": platform.python_version()}
        for kind in ("starts", "starts_side_by_side"):
            for state in self.results.get(kind, {}).values():
                versions |= {name: state["about"][name] for name in ("vllm", "peagle") if name in state["about"]}
        call = {
            "command": " ".join(["python", *sys.argv]),
            "commit": os.environ.get("PEAGLE_COMMIT") or commit or "unknown",
            "seconds": round(time.time() - self.began, 1),
            "machine": self.machine,
            "versions": versions,
        }
        self.results["calls"].append(call)
        self.save()
        rows = self.rows()
        print(self.table(rows))
        print(json.dumps({"rows": rows, "notes": self.results["notes"], "calls": self.results["calls"]}))


def differing(ours: list[str], theirs: list[str]) -> float:
    return sum(a != b for a, b in zip(ours, theirs, strict=False)) / len(ours)


def table(rows: list[Json]) -> str:
    def figure(row: Json, side: str) -> str:
        value = row.get(side)
        if value is None:
            return "-"
        if str(row["unit"]).startswith("share"):
            return f"{value:.1%}"
        text = f"{value:.1f} s" if row["unit"] == "s" else f"{value:,.0f}"
        al = row.get(f"{side}_al") or 1
        return text + (f" (AL {al:.2f})" if al > 1 else "")

    lines = [("", "vLLM", "with", "peagle", "ratio", "even", "goal", "met")]
    for row in rows:
        ratio = f"{row['ratio']:.2f}x" if "ratio" in row else "-"
        even = f"{row['ratio_at_equal_acceptance']:.2f}x" if "ratio_at_equal_acceptance" in row else ""
        met = {True: "yes", False: "NO", None: "-"}[row.get("met")]
        shown = row.get("vllm_configuration", "")
        lines.append((row["row"], figure(row, "vllm"), shown, figure(row, "peagle"), ratio, even, row["goal"], met))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(["output tokens/s where no unit is given; even: at the acceptance the rates promise", *text])


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm-path", type=Path, help="folder with the unpacked vLLM, for vLLM's workers alone")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter of vLLM's workers; this one if none")
    parser.add_argument("--sides", default="vllm,peagle")
    parser.add_argument("--out", type=Path, help="results, written after every measurement")
    parser.add_argument("--resume", action="store_true", help="keep what --out holds and measure the rest")
    parser.add_argument("--seconds", type=float, default=560, help="wall clock for everything")
    parser.add_argument("--start-seconds", type=float, default=280, help="for a wave of workers to start")
    parser.add_argument("--measure-seconds", type=float, default=120, help="for one measurement")
    parser.add_argument("--parallel", type=int, default=7, help="workers that start side by side at most")
    parser.add_argument("--scratch", help="folder for checkpoints, logs and caches; a temporary one by default")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU, to try the script itself")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def check_names(parser: argparse.ArgumentParser, given: str, known: Iterable[str]) -> list[str]:
    names = given.split(",")
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"unknown: {', '.join(unknown)}")
    return names


def run_session(session: Session, engines: list[Engine]) -> None:
    """However it ends, no worker is left and what there is gets reported."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        session.run(session.prepare(engines))
    except KeyboardInterrupt:
        session.note("interrupted")
    except Exception as error:
        traceback.print_exc()
        session.note(f"stopped: {error!r}")
    finally:
        for one in list(session.live):
            session.stop(one)
        session.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--smollm2", type=Path, help="its Hugging Face folder; asked of peagle when not given")
    parser.add_argument("--prompts", type=Path, help="JSONL (or .gz) with `turns`, for the rows data and differs")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {','.join(ROWS)}")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker)
    if args.probe:
        return probe()
    rows, sides = check_names(parser, args.rows, ROWS), check_names(parser, args.sides, SIDES)
    sys.path.insert(0, str(ROOT))
    session = Session(args)
    run_session(session, wanted_engines(set(rows), sides, session.sizes))


if __name__ == "__main__":
    main()
