"""Names and flags -> what is measured: variants of the embedded engine, or a server, and the prompts for them.

Knows folders and how an engine or a client is made of settings. What can be wrong is found before weights are read; the
target's are read once and shared by all of its variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from peagle.bench.http_client import parse_url
from peagle.bench.offline import EmbeddedBench, PromptReader
from peagle.bench.run import Variant, renamed
from peagle.bench.server import ServerBench, Stated
from peagle.bench.vllm import VllmBench
from peagle.bench.workload import KNOWN_IDS, Workload, random_workload, read_workload, usable_ids
from peagle.checkpoints.drafter import check_drafter_fits, read_drafter_config
from peagle.checkpoints.target import Target, load_tokenizer, read_target_config
from peagle.checkpoints.validate import build_speculative_config
from peagle.config import BenchEngineSettings, BenchServerSettings, BenchSettings, SpeculationMethod
from peagle.engine.llm import LLM
from peagle.errors import UserError
from peagle.eval.datasets import open_datasets
from peagle.hub.resolve import resolve_drafter, resolve_target

SEQS = {"cuda": 256, "cpu": 16}  # requests at once, where those that arrive decide: what the engine takes by itself
ENGINES = ("embedded", "vllm")
PromptSet = Sequence[str]


class Embedded:
    """A target, and the drafters and numbers of drafts to run it with."""

    def __init__(
        self,
        target: str,
        drafters: Sequence[str],
        draft_tokens: Sequence[int | Literal["auto"]],
        baseline: bool,
        settings: BenchEngineSettings,
        engine: str = "embedded",
    ) -> None:
        if engine not in ENGINES:
            raise UserError(f"--engine {engine}: must be {' or '.join(ENGINES)}; a server's address goes to --url")
        if engine == "vllm" and "auto" in draft_tokens and drafters:
            raise UserError("-k auto: vLLM drafts a fixed number of tokens a round; give numbers")
        self.name, self.settings, self.engine = target, settings, engine
        self.folder = resolve_target(target)
        self.cfg = read_target_config(self.folder)
        self.reader = PromptReader(self.folder)
        self._loaded: Target | None = None
        self._wanted: list[tuple[str | None, Path | None, SpeculationMethod, int | Literal["auto"] | None]] = []
        if baseline or not drafters:
            self._wanted.append((None, None, "none", None))
        for drafter in drafters:
            folder = resolve_drafter(drafter)
            own = read_drafter_config(folder, self.cfg)
            check_drafter_fits(own, self.cfg, folder)
            method: SpeculationMethod = "p-eagle" if own.parallel else "eagle3"
            self._wanted += [(drafter, folder, method, k) for k in draft_tokens]

    @property
    def fixed(self) -> dict[str, Any]:
        """What all rows of a file share."""
        return {"target": self.name, **asdict(self.settings)}

    def workload(self, prompts: PromptSet, settings: BenchSettings, skip_bad_rows: bool = False) -> Workload:
        return _workload(prompts, settings, lambda: self.reader.random_ids(self.cfg), skip_bad_rows)

    def variants(self, workload: Workload, settings: BenchSettings) -> list[Variant]:
        options = self._options(workload, settings)
        made = []
        for drafter, folder, method, k in self._wanted:
            who = "peagle" if self.engine == "embedded" else self.engine
            name = f"{who} no drafter" if method == "none" else f"{who} {method} K={k}"
            opener = self._opener(folder, k, options)
            if self.engine == "vllm":
                opener = self._vllm_opener(folder, method == "p-eagle", k, options)
            made.append(Variant(name, self.engine, drafter, method, k, opener))
        return renamed(made)

    def _vllm_opener(
        self, folder: Path | None, parallel: bool, k: int | Literal["auto"] | None, options: dict[str, Any]
    ) -> Callable[[], VllmBench]:
        """In vLLM's own best way: its defaults, CUDA graphs for a whole batch's rows, and its faster argmax."""
        given = {
            "dtype": options["dtype"] or "auto",
            "max_num_seqs": options["max_num_seqs"],
            "max_model_len": options["max_model_len"],
            "enable_prefix_caching": options["enable_prefix_caching"],
            "gpu_memory_utilization": options["gpu_memory_utilization"],
        }
        if (
            options["kv_cache_memory_bytes"] is not None
        ):  # the share is still checked against what neighbours leave free
            given |= {"kv_cache_memory_bytes": options["kv_cache_memory_bytes"], "gpu_memory_utilization": 0.05}
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            given["enforce_eager"] = True  # compiling for a CPU takes minutes
        speculative = None
        if folder is not None:
            assert isinstance(k, int)
            speculative = build_speculative_config(str(folder), k, parallel)
            if on_gpu:
                # a parallel drafter reads up to 2K rows a request: above 512 in all vLLM records no graph by itself
                rows = given["max_num_seqs"] * (2 * k if parallel else k + 1)
                speculative["use_local_argmax_reduction"] = True
                given["max_cudagraph_capture_size"] = max(512, -(-rows // 64) * 64)
        return lambda: VllmBench(self.folder, speculative, given, self.reader)

    def _opener(
        self, folder: Path | None, k: int | Literal["auto"] | None, options: dict[str, Any]
    ) -> Callable[[], EmbeddedBench | VllmBench]:
        def opened() -> EmbeddedBench:
            llm = LLM(self._loaded or self.folder, folder, "auto" if k is None else k, **options)
            self._loaded = llm.target
            return EmbeddedBench(llm, self.reader)

        return opened

    def _options(self, workload: Workload, settings: BenchSettings) -> dict[str, Any]:
        own = asdict(self.settings)
        longest = max(len(self.reader.ids(ask)) for ask in workload.asks) + workload.max_tokens
        if own["max_model_len"] is None:
            own["max_model_len"] = min(-(-longest // 64) * 64, self.cfg.max_positions)
        if longest > own["max_model_len"]:
            raise UserError(
                f"--max-tokens {workload.max_tokens}: with the longest prompt {longest} tokens, more than the "
                f"{own['max_model_len']} of the context; ask for fewer, or give shorter prompts"
            )
        if own["max_num_seqs"] is None:
            device = self.settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
            arriving = [SEQS.get(device.partition(":")[0], SEQS["cpu"])] if settings.rates else []
            own["max_num_seqs"] = max([*settings.concurrency, *arriving])
        return own


class Server:
    """An address, and what its owner says that runs there."""

    def __init__(self, settings: BenchServerSettings, stated: Stated, label: str | None, tokenizer: str | None) -> None:
        self.settings, self.stated = settings, stated
        self.address = parse_url(settings.url)
        self.tokenizer = load_tokenizer(_tokenizer_folder(tokenizer)) if tokenizer is not None else None
        if stated.method == "none" and stated.k is not None:
            raise UserError(f"-k {stated.k}: say with --method p-eagle or eagle3 what the server drafts with")
        if stated.method != "none" and stated.k is None:
            raise UserError(f"--method {stated.method}: say with -k how many tokens a round the server drafts")
        helped = "no drafter" if stated.method == "none" else stated.method
        told = f"{self.address.netloc} {helped}" + (f" K={stated.k}" if stated.k is not None else "")
        self.label = label or told

    def workload(self, prompts: PromptSet, settings: BenchSettings, skip_bad_rows: bool = False) -> Workload:
        return _workload(prompts, settings, self._random_ids, skip_bad_rows)

    def _random_ids(self) -> list[int]:
        if self.tokenizer is None:
            return list(KNOWN_IDS)
        return usable_ids(len(self.tokenizer), self.tokenizer.all_special_ids)

    def variants(self) -> list[Variant]:
        def opened() -> ServerBench:
            return ServerBench(self.settings, self.stated, self.tokenizer)

        return [Variant(self.label, str(self.address), None, self.stated.method, self.stated.k, opened)]


def _tokenizer_folder(name: str) -> Path:
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else resolve_target(name)


def _workload(
    prompts: PromptSet, settings: BenchSettings, random_ids: Callable[[], list[int]], skip_bad_rows: bool
) -> Workload:
    if settings.random_input is not None:
        if prompts:
            raise UserError(f"--random-input {settings.random_input}: makes its own prompts; leave --prompts out")
        return random_workload(random_ids(), settings)
    if not prompts:
        raise UserError("no prompts: give --prompts FILE, or --random-input N for made-up ones")
    return read_workload(open_datasets(prompts, skip_bad_rows=skip_bad_rows), settings)
