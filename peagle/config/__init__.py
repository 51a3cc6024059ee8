"""All settings and their defaults, one file per subject. Import the names from this package."""

from __future__ import annotations

from peagle.config.data import (
    LOOP_NGRAM_TOKENS,
    LOOP_REPEATED_SHARE,
    LOOP_TAIL_TOKENS,
    MIN_TOKENS_BEFORE_LOOP,
    EndpointSettings,
    PackingSettings,
    ResponseEngineSettings,
    ResponseSettings,
)
from peagle.config.engine import (
    AUTO_DEEP_SPECULATIVE_TOKENS,
    AUTO_SPECULATIVE_TOKENS,
    CPU_MAX_NUM_SEQS,
    CPU_MAX_PREFILL_TOKENS,
    CPU_TIMED_BATCH_SIZES,
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    EAGLE3_NUM_SPECULATIVE_TOKENS,
    GPU_MAX_NUM_SEQS,
    GPU_MAX_PREFILL_TOKENS,
    MAX_SPECULATIVE_TOKENS,
    EngineSettings,
    check_num_speculative_tokens,
    default_num_speculative_tokens,
)
from peagle.config.evaluation import (
    BenchEngineSettings,
    BenchServerSettings,
    BenchSettings,
    BenchWarningThresholds,
    EvalServerSettings,
    EvalSettings,
    PlanSettings,
    ReportSettings,
    SpeculationMethod,
    TuneSettings,
)
from peagle.config.models import (
    MASK_TOKEN_ID_KEYS,
    AttentionTemperature,
    ChunkedAttention,
    DecoderConfig,
    DrafterConfig,
    ExpertsConfig,
    LayerConfig,
    RopeConfig,
    Window,
)
from peagle.config.sampling import MAX_LOGPROBS, Grammar, GrammarLimits, ParserLimits, SamplingParams, check_prompt
from peagle.config.serving import (
    VLLM_VERSION,
    DeploySettings,
    SagemakerSettings,
    ServeEngine,
    ServeSettings,
    ToolCallParserName,
)
from peagle.config.training import (
    ALLREDUCE_ELEMENTS,
    CHUNK_MEMORY_FRACTION,
    CPU_CHUNK_SIZE,
    DEFAULT_EPOCHS,
    DEFAULT_NUM_LAYERS,
    LK_ETA,
    LOSS_LOGITS,
    MAX_CHUNK_BYTES,
    MIN_ACCEPTANCE,
    MIN_CHUNK_SIZE,
    MIN_LR_RATIO,
    MIN_WARMUP_STEPS,
    MUON_MOMENTUM,
    MUON_UPDATE_RMS,
    OBJECTIVES,
    TRAPEZOID_DECAY_FRACTION,
    WARMUP_DIVISOR,
    CacheSettings,
    HiddenStatesDtype,
    LossWeighting,
    LrSchedule,
    Method,
    Objective,
    TrainConfig,
    ValidationEngineSettings,
)
