"""Variants to measure: a target with each drafter and K on an engine in this process, or a server.

Names, folders and lengths are checked before weights are loaded. The weights of the target are loaded once and shared
by all variants of the embedded engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from peagle.bench.offline import EmbeddedBench, PromptTokenizer
from peagle.bench.run import BenchVariant, disambiguate_labels
from peagle.bench.server import DeclaredSpeculation, ServerBench
from peagle.bench.vllm import VllmBench
from peagle.bench.workload import COMMON_TOKEN_IDS, Workload, dataset_workload, random_workload
from peagle.checkpoints.drafter import check_drafter_fits, read_drafter_config
from peagle.checkpoints.target import Target, read_target_config
from peagle.checkpoints.validate import build_speculative_config
from peagle.config import BenchEngineSettings, BenchServerSettings, BenchSettings, SpeculationMethod
from peagle.engine.llm import LLM
from peagle.errors import UserError
from peagle.eval.datasets import open_datasets
from peagle.http_client import parse_server_url
from peagle.hub.resolve import resolve_drafter, resolve_target

OPEN_LOOP_MAX_NUM_SEQS = {"cuda": 256, "cpu": 16}
ENGINES = ("embedded", "vllm")
DraftTokens = int | Literal["auto"]


class EngineVariants:
    """A target on the embedded engine or on vLLM, with and without drafters."""

    def __init__(
        self,
        target: str,
        drafters: Sequence[str],
        num_speculative_tokens: Sequence[DraftTokens],
        baseline: bool,
        settings: BenchEngineSettings,
        engine: str = "embedded",
    ) -> None:
        if engine not in ENGINES:
            raise UserError(f"--engine {engine}: must be {', '.join(ENGINES)}, or the URL of a server")
        if engine == "vllm" and "auto" in num_speculative_tokens and drafters:
            raise UserError("-k auto: vLLM needs a fixed number of draft tokens; give numbers")
        self.target, self.settings, self.engine = target, settings, engine
        self.folder = resolve_target(target)
        self.config = read_target_config(self.folder)
        self.tokenizer = PromptTokenizer(self.folder)
        self._loaded_target: Target | None = None
        self._drafters: list[tuple[str | None, Path | None, SpeculationMethod, DraftTokens | None]] = []
        if baseline or not drafters:
            self._drafters.append((None, None, "none", None))
        for drafter in drafters:
            folder = resolve_drafter(drafter)
            drafter_config = read_drafter_config(folder, self.config)
            check_drafter_fits(drafter_config, self.config, folder)
            method: SpeculationMethod = "p-eagle" if drafter_config.parallel else "eagle3"
            self._drafters += [(drafter, folder, method, k) for k in num_speculative_tokens]

    @property
    def shared_settings(self) -> dict[str, Any]:
        """Settings that all rows of a result file share."""
        return {"target": self.target, **asdict(self.settings)}

    def build_workload(self, data: Sequence[str], settings: BenchSettings) -> Workload:
        return _build_workload(data, settings, lambda: self.tokenizer.random_token_ids(self.config))

    def build(self, workload: Workload, settings: BenchSettings) -> list[BenchVariant]:
        options = self._engine_options(workload, settings)
        variants = []
        for drafter, folder, method, k in self._drafters:
            engine_name = "peagle" if self.engine == "embedded" else self.engine
            label = f"{engine_name} no drafter" if method == "none" else f"{engine_name} {method} K={k}"
            opener = self._embedded_opener if self.engine == "embedded" else self._vllm_opener
            variants.append(BenchVariant(label, self.engine, drafter, method, k, opener(folder, method, k, options)))
        return disambiguate_labels(variants)

    def _embedded_opener(
        self, drafter: Path | None, method: SpeculationMethod, k: DraftTokens | None, options: dict[str, Any]
    ) -> Callable[[], EmbeddedBench | VllmBench]:
        def open_engine() -> EmbeddedBench:
            llm = LLM(self._loaded_target or self.folder, drafter, "auto" if k is None else k, **options)
            self._loaded_target = llm.target
            return EmbeddedBench(llm, self.tokenizer)

        return open_engine

    def _vllm_opener(
        self, drafter: Path | None, method: SpeculationMethod, k: DraftTokens | None, options: dict[str, Any]
    ) -> Callable[[], EmbeddedBench | VllmBench]:
        """vLLM at its best: its defaults, CUDA graphs for whole batches, and its faster argmax."""
        llm_options = {
            "dtype": options["dtype"] or "auto",
            "max_num_seqs": options["max_num_seqs"],
            "max_model_len": options["max_model_len"],
            "enable_prefix_caching": options["enable_prefix_caching"],
            "gpu_memory_utilization": options["gpu_memory_utilization"],
        }
        if options["kv_cache_memory_bytes"] is not None:  # vLLM still checks the utilization against free memory
            llm_options |= {"kv_cache_memory_bytes": options["kv_cache_memory_bytes"], "gpu_memory_utilization": 0.05}
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            llm_options["enforce_eager"] = True  # compiling for a CPU takes minutes
        speculative_config = None
        if drafter is not None:
            assert isinstance(k, int)
            parallel = method == "p-eagle"
            speculative_config = build_speculative_config(str(drafter), k, parallel)
            if on_gpu:
                # A parallel drafter has up to 2K rows per request; above 512 rows vLLM captures no graph by default.
                num_rows = llm_options["max_num_seqs"] * (2 * k if parallel else k + 1)
                speculative_config["use_local_argmax_reduction"] = True
                llm_options["max_cudagraph_capture_size"] = max(512, -(-num_rows // 64) * 64)
        return lambda: VllmBench(self.folder, speculative_config, llm_options, self.tokenizer)

    def _engine_options(self, workload: Workload, settings: BenchSettings) -> dict[str, Any]:
        """Options of the LLM; max_model_len and max_num_seqs default to what the workload needs."""
        options = asdict(self.settings)
        max_prompt_tokens = max(len(self.tokenizer.encode(prompt)) for prompt in workload.prompts)
        max_total_tokens = max_prompt_tokens + workload.max_tokens
        if options["max_model_len"] is None:
            options["max_model_len"] = min(-(-max_total_tokens // 64) * 64, self.config.max_positions)
        if max_total_tokens > options["max_model_len"]:
            raise UserError(
                f"--max-tokens {workload.max_tokens}: the longest prompt has {max_prompt_tokens} tokens, together more "
                f"than max_model_len {options['max_model_len']}; use fewer or shorter prompts"
            )
        if options["max_num_seqs"] is None:
            device = self.settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
            open_loop = OPEN_LOOP_MAX_NUM_SEQS.get(device.partition(":")[0], OPEN_LOOP_MAX_NUM_SEQS["cpu"])
            options["max_num_seqs"] = max([*settings.concurrency, *([open_loop] if settings.request_rates else [])])
        return options


class ServerVariant:
    """A server, and the speculation it runs according to the command line."""

    def __init__(self, settings: BenchServerSettings, declared: DeclaredSpeculation) -> None:
        method, k = declared.method, declared.num_speculative_tokens
        if method == "none" and k is not None:
            raise UserError(f"-k {k}: give --method p-eagle or eagle3, the drafting method of the server")
        if method != "none" and k is None:
            raise UserError(f"--method {method}: give -k, the number of draft tokens of the server")
        self.settings, self.declared = settings, declared
        self.base_url = parse_server_url(settings.url, "--engine")

    def build_workload(self, data: Sequence[str], settings: BenchSettings) -> Workload:
        return _build_workload(data, settings, lambda: list(COMMON_TOKEN_IDS))

    def build(self) -> list[BenchVariant]:
        method, k = self.declared.method, self.declared.num_speculative_tokens
        speculation = "no drafter" if method == "none" else f"{method} K={k}"
        label = f"{self.base_url.partition('://')[2]} {speculation}"
        return [BenchVariant(label, self.base_url, None, method, k, lambda: ServerBench(self.settings, self.declared))]


def _build_workload(data: Sequence[str], settings: BenchSettings, token_ids: Callable[[], list[int]]) -> Workload:
    if settings.random_input_len is not None:
        if data:
            raise UserError(f"--random-input-len {settings.random_input_len}: replaces --data; give one of them")
        return random_workload(token_ids(), settings)
    if not data:
        raise UserError("--data: give files or data sets with prompts, or --random-input-len N for random prompts")
    return dataset_workload(open_datasets(data), settings)
