"""Settings of `peagle eval`, `bench`, `report`, `plan` and `tune`."""

from dataclasses import dataclass
from typing import Literal

from peagle.config.data import EndpointSettings
from peagle.config.engine import CPU_TIMED_BATCH_SIZES, DEFAULT_NUM_SPECULATIVE_TOKENS, GPU_MEMORY_UTILIZATION, k_option
from peagle.config.options import Settings, checked, device_option, dtype_option, option, require
from peagle.errors import UserError

SpeculationMethod = Literal["none", "eagle3", "p-eagle"]
PlanEngine = Literal["auto", "embedded", "vllm"]


@dataclass(frozen=True)
class EvalSettings(Settings):
    """Workload and method. Results are comparable if all fields up to `seed` are equal."""

    num_speculative_tokens: tuple[int, ...] = k_option((1, 3, 5, 7), metavar="K ...")
    temperatures: tuple[float, ...] = option(
        (0.0,),
        "Sampling temperatures; 0 is greedy.",
        min=0,
        max=100,
        panel="Sampling",
        flags=("--temperature",),
        metavar="T ...",
    )
    max_tokens: int = option(512, "Maximum output tokens of a response.", min=1)
    max_model_len: int = option(4096, "Maximum number of prompt and output tokens.", min=2, panel="Engine")
    limit: int | None = option(
        None, "Use only the first rows of each data set.", min=1, panel="Data", show_default="all"
    )
    raw: bool = option(False, "Send prompts without a chat template.")
    context_bounds: tuple[int, ...] = option(
        (512, 1024, 2048, 4096, 8192, 16384, 32768),
        "Bounds of context lengths to report separately.",
        panel="Data",
        metavar="N ...",
    )
    seed: int = option(0, "Seed of sampling and of the bootstrap.", min=0, max=2**63 - 1, panel="Sampling")
    bootstrap_samples: int = 2000  # resamples for a confidence interval
    min_samples: int = 5  # responses below which no interval is given
    min_drafts: int = 500  # drafts below which a row carries a warning
    replay_tokens: int = 8192  # tokens per forward pass of target and drafter
    replay_rows: int = 8192  # mask rows per forward pass of the drafter
    replay_logits: int = 32 << 20  # drafter logits in memory at once
    gpu_memory_utilization: float = option(
        0.6, "Fraction of the GPU's memory for the engine.", above=0, max=1, panel="Engine"
    )

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "temperatures"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        super().__post_init__()
        edges = self.context_bounds
        if any(b <= a for a, b in zip((0, *edges), edges, strict=False)):
            raise UserError(f"--context-bounds {' '.join(map(str, edges))}: must be increasing lengths")


@dataclass(frozen=True)
class EvalServerSettings(EndpointSettings):
    """A server whose speculative decoding counters are read."""

    concurrency: int = option(
        16, "Requests between two reads of vLLM's counters; 1 gives counts per response.", min=1, panel="Server"
    )
    retries: int = checked(3, min=0)
    settle_s: float = 3.0  # time for the counters to catch up with the responses


@dataclass(frozen=True)
class BenchSettings(Settings):
    """The workload. Rows are comparable if all fields but the loads and `repeats` are equal."""

    concurrency: tuple[int, ...] = option(
        (), "Closed loop: requests in flight.", min=1, panel="Load", show_default="1 8"
    )
    request_rates: tuple[float, ...] = option(
        (), "Open loop: requests per second, Poisson arrivals.", above=0, max=1e6, flags=("--request-rate",)
    )
    num_prompts: int | None = option(
        None, "Requests per repeat.", min=1, panel="Data", show_default="32, or twice the largest concurrency"
    )
    repeats: int = option(3, "Repeats of every load, for confidence intervals.", min=1, panel="Load")
    num_warmups: int | None = option(
        None, "Requests before the first repeat of a load.", min=0, show_default="all prompts"
    )
    max_tokens: int = option(128, "Maximum output tokens of a request.", min=1, panel="Sampling")
    ignore_eos: bool = option(False, "Always generate --max-tokens.")
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.", min=0, max=100)
    random_input_len: int | None = option(
        None, "Random prompts of this many tokens, with EOS ignored.", min=1, panel="Data"
    )
    raw: bool = option(False, "Send prompts without a chat template.")
    seed: int = option(0, "Seed of arrivals, random prompts and sampling.", min=0, max=2**31 - 1, panel="Sampling")
    default_concurrency: tuple[int, ...] = (1, 8)  # if neither concurrency nor request_rates are given
    min_prompts: int = 32
    min_open_loop_s: float = 10.0  # duration of an open loop, if `num_prompts` is None

    def __post_init__(self) -> None:
        if not self.concurrency and not self.request_rates:
            object.__setattr__(self, "concurrency", self.default_concurrency)
        super().__post_init__()

    @property
    def total_prompts(self) -> int:
        """Requests per repeat, equal for every load, so that all rows run the same prompts."""
        if self.num_prompts is not None:
            return self.num_prompts
        open_loop = [int(rate * self.min_open_loop_s) for rate in self.request_rates]
        return max([self.min_prompts, *(2 * concurrency for concurrency in self.concurrency), *open_loop])


@dataclass(frozen=True)
class BenchWarningThresholds:
    """Limits beyond which a row carries a warning."""

    least_seconds: float = 3.0  # duration of a repeat
    least_waves: int = 2  # requests per concurrent request
    spread: float = 0.10  # between the fastest and the slowest repeat, relative to the mean
    lengths: float = 0.25  # relative difference of mean output lengths between two rows
    elsewhere: float = 0.02  # share of the server's tokens that other clients received
    cached: float = 0.10  # share of prompt tokens from the server's prefix cache
    served: float = 0.80  # share of the requested rate that the server sustained


@dataclass(frozen=True)
class BenchServerSettings(Settings):
    """An OpenAI-compatible server under test, and the speculation it runs according to the command line."""

    url: str = ""
    model: str | None = option(None, "Model name on the server.", panel="Server", show_default="its only model")
    connect_s: float = 10.0
    stall_s: float = 60.0  # without a byte
    total_s: float = option(600.0, "Time limit of a request, in seconds.", above=0, flags=("--timeout",))
    failures: int = 8  # consecutive failures before the run stops; at least twice the concurrency
    method: SpeculationMethod = "none"
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        method, k = self.method, self.num_speculative_tokens
        if method == "none" and k is not None:
            raise UserError(f"-k {k}: give --method p-eagle or eagle3, the drafting method of the server")
        if method != "none" and k is None:
            raise UserError(f"--method {method}: give -k, the number of draft tokens of the server")


@dataclass(frozen=True)
class BenchEngineSettings:
    """The embedded engine under test. None: chosen for the device, the target and the load."""

    device: str | None = device_option()
    dtype: str | None = dtype_option()
    max_num_seqs: int | None = option(None, "Maximum number of requests in a batch.", show_default="by the load")
    max_model_len: int | None = None
    gpu_memory_utilization: float = option(GPU_MEMORY_UTILIZATION, "Fraction of the GPU's memory to use.")
    kv_cache_memory_bytes: int | None = None  # instead of that fraction
    cost_table: str | None = None
    enable_prefix_caching: bool = False  # repeats send the same prompts, so caching would skip their prefill


@dataclass(frozen=True)
class ReportSettings:
    """Title of a report, and thresholds for marking uncertain values."""

    title: str = option("Speculative decoding report", "Title of the page.", panel="Output")
    min_responses: int = 20  # acceptance over fewer responses is drawn as a hollow point


@dataclass(frozen=True)
class PlanSettings(Settings):
    """The load of `peagle plan` and the values of K that it compares."""

    concurrency: tuple[int, ...] = option(
        (), "Requests per replica.", min=1, max=1 << 20, panel="Load", show_default="1 8 64"
    )
    num_speculative_tokens: tuple[int, ...] = k_option((1, 2, 3, 4, 5, 7, 9), "Values of K.", metavar="K ...")
    num_prompt_tokens: int = option(512, "Prompt tokens per request; 0 ignores prefill.", min=0, panel="Load")
    num_output_tokens: int = option(256, "Output tokens per request.", min=1)
    throughput: float | None = option(None, "Total output tokens/s to serve.", above=0)
    per_user_throughput: float | None = option(None, "Minimum output tokens/s per request.", above=0)
    tensor_parallel_size: int = option(1, "GPUs per replica.", min=1, max=64, panel="GPU")
    engine: PlanEngine = option("auto", "embedded, vllm, or auto.")
    acceptance_length_k: int = option(
        DEFAULT_NUM_SPECULATIVE_TOKENS, "K of --acceptance-length.", min=1, max=64, panel="Acceptance"
    )
    gpu_memory_utilization: float = checked(GPU_MEMORY_UTILIZATION, above=0, max=1)
    reserved_bytes: int = 3 << 30  # per GPU, for activations and CUDA graphs
    max_tensor_parallel_size: int = 64
    default_concurrency: tuple[int, ...] = (1, 8, 64)
    concurrency_search: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # default with per_user_throughput

    def __post_init__(self) -> None:
        if not self.concurrency:
            searched = self.per_user_throughput is not None
            object.__setattr__(self, "concurrency", self.concurrency_search if searched else self.default_concurrency)
        super().__post_init__()


@dataclass(frozen=True)
class TuneSettings(Settings):
    """The decode steps that `peagle tune` times."""

    max_num_seqs: int = option(64, "Maximum batch size.", min=1, panel="Engine")
    max_model_len: int = option(2048, "Maximum tokens per request.", min=2)
    context_len: int = option(0, "Tokens in the KV cache of each request.", panel="Load")
    repeats: int = option(5, "Repeats per step; the fastest counts.", min=1)
    warmup: int = 1
    batch_sizes: tuple[int, ...] = option((), "Batch sizes to time.", show_default="by device")
    cpu_batch_sizes: tuple[int, ...] = CPU_TIMED_BATCH_SIZES
    concurrency: tuple[int, ...] = option((), "Print vLLM's config for these.", show_default="every batch size")

    def __post_init__(self) -> None:
        super().__post_init__()
        in_context = 0 <= self.context_len < self.max_model_len
        require(in_context, "--context-len", self.context_len, f"from 0 to below {self.max_model_len}")
        for flag, values in (("--batch-sizes", self.batch_sizes), ("--concurrency", self.concurrency)):
            for value in values:
                in_range = 1 <= value <= self.max_num_seqs
                require(in_range, flag, value, f"from 1 to --max-num-seqs, {self.max_num_seqs}")
