"""Every dataclass of settings and every default, written once.

A file has one subject; all names are to be had from here. Knows nothing about files, tensors or formats.
"""

from __future__ import annotations

from peagle.config.data import (
    BEFORE_LOOP,
    CIRCLE,
    LOOP_GRAM,
    LOOP_SHARE,
    BatchDefaults,
    EndpointSettings,
    ResponseSettings,
    WriterSettings,
)
from peagle.config.deploy import NAME_RULE, VLLM_VERSION, DeploySettings, SagemakerSettings, is_name
from peagle.config.engine import (
    AUTO_CHOICES,
    CPU_BATCHES,
    CPU_PREFILL,
    CPU_SEQS,
    DEEP_CHOICES,
    GPU_MEMORY_FRACTION,
    GPU_PREFILL,
    GPU_SEQS,
    EngineSettings,
)
from peagle.config.measuring import (
    BenchDoubts,
    BenchSettings,
    EmbeddedSettings,
    EvalServerSettings,
    EvalSettings,
    Helped,
    PlanEngine,
    PlanSettings,
    ReportSettings,
    ServerSettings,
    TuneSettings,
)
from peagle.config.models import (
    MASK_ID_NAMES,
    Activation,
    Chunked,
    DecoderConfig,
    DrafterConfig,
    ExpertsConfig,
    Heat,
    LayerConfig,
    RopeConfig,
    RopeKind,
    Window,
)
from peagle.config.sampling import MAX_LOGPROBS, Grammar, GrammarLimits, ParserLimits, SamplingParams
from peagle.config.server import ServeEngine, ServeSettings, ToolParser
from peagle.config.speculation import (
    DEFAULT_DRAFT_TOKENS,
    EAGLE3_DRAFT_TOKENS,
    MAX_DRAFT_TOKENS,
    check_draft_tokens,
    usual_draft_tokens,
)
from peagle.config.training import (
    CHUNK_BYTES,
    CHUNK_HEADROOM,
    CPU_CHUNK_ROWS,
    DEFAULT_EPOCHS,
    GRAD_BUCKET,
    LAYERS,
    LEAST_CHUNK_ROWS,
    LEAST_LR,
    LEAST_WARMUP,
    LK_ETA,
    LOSS_LOGITS,
    MUON_MOMENTUM,
    MUON_SCALE,
    OBJECTIVES,
    RUN_PER_WARMUP,
    TRAIN_DEPTHS,
    TRAPEZOID_DECAY,
    CacheSettings,
    Decay,
    HiddenStatesDtype,
    MeasureSettings,
    Method,
    Objective,
    OptimizerKind,
    TrainConfig,
    setting,
)
