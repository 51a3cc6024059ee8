"""`peagle bench`: measures every variant under every load and writes a result file.

A variant is a target with a drafter and K on an engine in this process, or a server. Names, folders and lengths are
checked before weights are loaded; the embedded engine loads the target's weights once for all variants.

The file is written after every repeat. The same command resumes an interrupted run; more variants, loads and repeats
are added to the file, other prompts or settings are rejected.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from peagle.bench.engines import EmbeddedBench, PromptTokenizer, VllmBench
from peagle.bench.server import ServerBench
from peagle.bench.workload import BenchEngine, Load, Workload, build_workload
from peagle.checkpoints.target import Target, read_target_config
from peagle.checkpoints.validate import build_speculative_config
from peagle.config import BenchEngineSettings, BenchServerSettings, BenchSettings, SpeculationMethod
from peagle.display import ProgressBar
from peagle.engine.llm import LLM
from peagle.errors import UserError
from peagle.eval.acceptance import open_drafters
from peagle.http_client import parse_server_url
from peagle.hub.resolve import resolve_target
from peagle.results.comparison import all_warnings
from peagle.results.files import read_resumable, write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import BenchRepeat, BenchRow, Results

OPEN_LOOP_MAX_NUM_SEQS = {"cuda": 256, "cpu": 16}
ENGINES = ("embedded", "vllm")
DraftTokens = int | Literal["auto"]
RowKey = tuple[str, str | None, SpeculationMethod, DraftTokens | None, int | None, float | None]


@dataclass(frozen=True)
class BenchVariant:
    """One way to run a target: the labels of its rows and a function that opens it."""

    label: str
    engine: str  # "embedded", "vllm", or the URL of a server
    drafter: str | None
    method: SpeculationMethod
    num_speculative_tokens: int | Literal["auto"] | None
    open: Callable[[], BenchEngine] = field(compare=False)


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
        self.settings, self.engine = settings, engine
        self.shared_settings = {"target": target, **asdict(settings)}  # of all rows of a result file
        self.folder = resolve_target(target)
        self.config = read_target_config(self.folder)
        self.tokenizer = PromptTokenizer(self.folder)
        self._loaded_target: Target | None = None
        self._drafters: list[tuple[str | None, Path | None, SpeculationMethod, DraftTokens | None]] = []
        if baseline or not drafters:
            self._drafters.append((None, None, "none", None))
        for name, drafter in zip(drafters, open_drafters(drafters, self.folder), strict=True):
            self._drafters += [(name, drafter.folder, drafter.method, k) for k in num_speculative_tokens]

    def build_workload(self, data: Sequence[str], settings: BenchSettings) -> Workload:
        return build_workload(data, settings, lambda: self.tokenizer.random_token_ids(self.config))

    def build(self, workload: Workload, settings: BenchSettings) -> list[BenchVariant]:
        """Variants with distinct labels: the drafter's name is appended where they would be equal."""
        options = self._engine_options(workload, settings)
        open_engine = self._open_embedded if self.engine == "embedded" else self._open_vllm
        engine_name = "peagle" if self.engine == "embedded" else self.engine
        kinds = [(method, k) for _, _, method, k in self._drafters]
        variants = []
        for drafter, folder, method, k in self._drafters:
            label = f"{engine_name} no drafter" if method == "none" else f"{engine_name} {method} K={k}"
            if kinds.count((method, k)) > 1 and drafter:
                label += f" ({Path(drafter).name})"
            open_variant = partial(open_engine, folder, method, k, options)
            variants.append(BenchVariant(label, self.engine, drafter, method, k, open_variant))
        return variants

    def _open_embedded(
        self, drafter: Path | None, method: SpeculationMethod, k: DraftTokens | None, options: dict[str, Any]
    ) -> BenchEngine:
        llm = LLM(self._loaded_target or self.folder, drafter, "auto" if k is None else k, **options)
        self._loaded_target = llm.target
        return EmbeddedBench(llm, self.tokenizer)

    def _open_vllm(
        self, drafter: Path | None, method: SpeculationMethod, k: DraftTokens | None, options: dict[str, Any]
    ) -> BenchEngine:
        """vLLM at its best: its defaults, CUDA graphs for whole batches, and its faster argmax."""
        names = ("dtype", "max_num_seqs", "max_model_len", "enable_prefix_caching", "gpu_memory_utilization")
        llm_options = {name: options[name] for name in names} | {"dtype": options["dtype"] or "auto"}
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
        return VllmBench(self.tokenizer, speculative_config, llm_options)

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


def server_variant(settings: BenchServerSettings, target: str | None) -> BenchVariant:
    """A server. The tokenizer of `target` counts tokens if the server does not."""
    method, k, base_url = settings.method, settings.num_speculative_tokens, parse_server_url(settings.url, "--engine")
    tokenizer = PromptTokenizer(resolve_target(target)) if target is not None else None
    label = f"{base_url.partition('://')[2]} {'no drafter' if method == 'none' else f'{method} K={k}'}"
    return BenchVariant(label, base_url, None, method, k, lambda: ServerBench(settings, tokenizer))


class BenchResultFile:
    """The rows measured so far, in a file or in memory."""

    def __init__(
        self,
        path: Path | None,
        workload: Workload,
        settings: BenchSettings,
        shared_settings: dict[str, Any],
        provenance: Provenance,
    ) -> None:
        self.path, self.provenance, self.workload_sha256 = path, provenance, workload.sha256
        self.settings = {
            "workload_sha256": self.workload_sha256,
            "data": workload.name,
            "num_prompts": len(workload.prompts),
            **{name: getattr(workload, name) for name in ("max_tokens", "ignore_eos", "temperature", "seed")},
            "num_warmups": settings.num_warmups,
            "num_repeats": settings.repeats,
            **shared_settings,
        }
        self.rows: dict[RowKey, BenchRow] = {}
        self.warnings: list[str] = list(workload.warnings)
        self.earlier_duration = 0.0
        if path is not None and path.exists():
            self._resume(path)

    def _resume(self, path: Path) -> None:
        old = read_resumable(path, "bench", self.settings, ignored=("workload_sha256", "data", "num_repeats"))
        if old.settings.get("workload_sha256") != self.workload_sha256:
            raise UserError(f"--out {path}: was measured with other prompts (--data); give another file")
        here, there = self.provenance.machine, old.provenance.machine
        for part in ("gpu", "cpu"):
            if here.get(part) != there.get(part):
                raise UserError(
                    f"--out {path}: was measured on {there.get(part)}, this is {here.get(part)}; give another file"
                )
        row_warnings = set(all_warnings(old.rows))
        self.rows = {_row_key(row, row): row for row in old.rows}
        self.settings = {**old.settings, **self.settings}
        self.warnings += [w for w in old.warnings if w not in row_warnings and w not in self.warnings]
        if (old.provenance.commit, old.provenance.versions) != (self.provenance.commit, self.provenance.versions):
            self.warnings.append(
                f"some rows were measured by another version (commit {old.provenance.commit}, "
                f"{old.provenance.started_at})"
            )
        self.earlier_duration = old.provenance.duration

    def find_repeats(self, variant: BenchVariant, load: Load) -> list[BenchRepeat]:
        row = self.rows.get(_row_key(variant, load))
        return row.repeats if row is not None else []

    def put_row(self, variant: BenchVariant, load: Load, repeats: list[BenchRepeat], warnings: Sequence[str]) -> None:
        key = _row_key(variant, load)
        row = self.rows[key] = BenchRow(variant.label, *key, repeats, self.workload_sha256)
        labelled = (f"{row.label}, {row.load_name}: {warning}" for warning in warnings)
        self.warnings += [warning for warning in labelled if warning not in self.warnings]

    def save(self, finished: bool) -> Results:
        provenance = self.provenance.with_duration(self.earlier_duration)
        rows = list(self.rows.values())
        results = Results("bench", provenance, self.settings, rows, finished, self.warnings + all_warnings(rows))
        if self.path is not None:
            write_results(self.path, results)
        return results


def _row_key(variant: BenchVariant | BenchRow, load: Load | BenchRow) -> RowKey:
    """What identifies a row in a file."""
    labels = (variant.engine, variant.drafter, variant.method, variant.num_speculative_tokens)
    return *labels, load.concurrency, load.request_rate


def run_bench(
    variants: Sequence[BenchVariant],
    workload: Workload,
    settings: BenchSettings,
    progress: ProgressBar,
    out: Path | None = None,
    shared_settings: dict[str, Any] | None = None,
) -> Results:
    """Measures what `out` does not contain yet. Rows of a file must agree in `shared_settings`.

    After Ctrl-C `finished` is false. Repeats that are complete are in `out` at any time.
    """
    packages = ("vllm",) if any(variant.engine == "vllm" for variant in variants) else ()
    file = BenchResultFile(out, workload, settings, shared_settings or {}, Provenance.collect(packages=packages))
    all_loads = [*map(Load, settings.concurrency), *(Load(request_rate=rate) for rate in settings.request_rates)]

    def measure(
        engine: BenchEngine, variant: BenchVariant, load: Load, phase: str, num_prompts: int | None, seed: int
    ) -> tuple[BenchRepeat, list[str]]:
        prompts = workload.prompts[:num_prompts]  # None: all of them
        activity = f"{variant.label}, {load}, {phase}"
        progress.print(f"{activity}: {len(prompts)} requests")
        return engine.measure(workload, prompts, load, seed, partial(progress.update, activity, total=len(prompts)))

    try:
        for variant in variants:
            loads = [at for at in all_loads if len(file.find_repeats(variant, at)) < settings.repeats]
            if not loads:
                continue
            with variant.open() as engine:
                for load in loads:
                    # Every engine warms up alike: the same prompts under the same load.
                    if settings.num_warmups != 0:
                        measure(engine, variant, load, "warm-up", settings.num_warmups, settings.seed)
                    while len(repeats := file.find_repeats(variant, load)) < settings.repeats:
                        # Arrival times differ between repeats and are equal for all variants.
                        phase, seed = f"{len(repeats) + 1} of {settings.repeats}", settings.seed + len(repeats)
                        repeat, warnings = measure(engine, variant, load, phase, None, seed)
                        file.put_row(variant, load, [*repeats, repeat], warnings)
                        file.save(finished=False)
    except KeyboardInterrupt:
        return file.save(finished=False)
    return file.save(finished=True)
