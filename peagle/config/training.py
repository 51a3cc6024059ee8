"""Settings of `peagle train`: the run, the hidden states of the target, and validation during training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from peagle.config.engine import MAX_SPECULATIVE_TOKENS
from peagle.config.options import Check, Settings, option, require

Objective = Literal["ce", "kl", "tv", "lk", "lk-hybrid"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
LossWeighting = Literal["acceptance", "uniform"]
HiddenStatesDtype = Literal["bfloat16", "fp8"]
Method = Literal["p-eagle", "eagle3"]
OptimizerKind = Literal["adamw", "muon"]
LrSchedule = Literal["cosine", "linear", "constant", "trapezoid"]

LK_ETA = 3.0  # lk-hybrid moves from kl to tv with exp(-eta * acceptance); value of the LK-losses paper
MIN_ACCEPTANCE = 1e-30  # lower bound of the acceptance inside a logarithm: keeps the loss `lk` finite
LOSS_LOGITS = 128 << 20  # student logits, and teacher logits, held at once by the loss: 256 MB each in bf16
DEFAULT_NUM_LAYERS: Mapping[Method, int] = {"p-eagle": 4, "eagle3": 1}
DEFAULT_NUM_DEPTHS: Mapping[Method, int] = {"p-eagle": 8, "eagle3": 4}
DEFAULT_EPOCHS = 4.0
MIN_WARMUP_STEPS = 20  # of a run whose length is given in minutes
WARMUP_DIVISOR = 10  # warm-up takes at most 1 / WARMUP_DIVISOR of the run
TRAPEZOID_DECAY_FRACTION = 0.25  # last part of the run, in which a trapezoid schedule decays
MIN_LR_RATIO = 0.02  # of --lr, at the end of every decay
MUON_MOMENTUM = 0.95
MUON_UPDATE_RMS = 0.2  # root mean square of an update divided by the learning rate, close to AdamW's
ALLREDUCE_ELEMENTS = 64 << 20  # gradient elements per all-reduce: 256 MB
MAX_CHUNK_BYTES = 3 << 30  # activations of one chunk of chains
CHUNK_MEMORY_FRACTION = 0.85  # of the free GPU memory; the rest covers fragmentation
MIN_CHUNK_SIZE = 256
CPU_CHUNK_SIZE = 4096
# Of the hidden states cache: maximum file size, unless one row is larger, and tokens per forward pass of the target
CACHE_SHARD_BYTES, CACHE_FORWARD_TOKENS = 512 << 20, 16384
# Of the engine that measures the acceptance length during training, on the same device
VALIDATION_KV_CACHE_BYTES, VALIDATION_PREFILL_TOKENS, VALIDATION_NUM_SEQS = 4 << 30, 4096, 256
BETA: Check = (lambda value: 0 <= value < 1, "from 0 to below 1")


@dataclass(frozen=True)
class TrainConfig(Settings):
    """How a drafter is trained. Every field is a flag of `peagle train` and a key of a recipe."""

    method: Method = option(
        "p-eagle", "p-eagle drafts all tokens in one pass, eagle3 one token per pass.", panel="Model"
    )
    num_layers: int | None = option(
        None, "Drafter layers; default 4 for p-eagle, 1 for eagle3. Layers beyond those of --init are added.", min=1
    )
    intermediate_size: int | None = option(
        None, "MLP width of the drafter; default the target's. Wider than --init widens its MLPs.", min=1
    )
    init: str = option("target", "Initial weights: target (its last layers), random, or a drafter's folder.")
    aux_layer_ids: tuple[int, ...] | None = option(
        None, "Auxiliary hidden state layers of the target, comma-separated; default 2, L//2, L-3."
    )
    mask_token: str = option("auto", "Mask token of p-eagle: its text, its id, or auto for an unused reserved token.")
    fc_norm: bool = option(True, "Normalize each auxiliary hidden state before fc (EAGLE-3.1).")
    train_embeddings: bool = option(False, "Give the drafter its own embeddings, initialized from the target's.")
    train_lm_head: bool = option(
        False, "Give the drafter its own LM head, initialized from the target's; implied by --draft-vocab-size."
    )
    draft_vocab_size: int | None = option(None, "Draft only the N most frequent tokens of the data.", min=1)

    num_depths: int = option(
        0,
        "Draft tokens to train (K); 0 means 8 for p-eagle and 4 for eagle3.",
        min=0,
        max=MAX_SPECULATIVE_TOKENS,
        panel="Loss and COD sampling",
    )
    down_sample_ratio: float = option(
        0.8, "COD sampling: fraction of the anchors kept from one depth to the next.", above=0, max=1
    )
    objective: Objective = option("lk-hybrid", "Loss per position: ce, kl, tv, lk or lk-hybrid.")
    loss_weighting: LossWeighting = option(
        "acceptance",
        "acceptance weights a position by the probability that all earlier drafts are accepted; or uniform.",
    )
    depth_decay: float = option(1.0, "Loss weight of a depth relative to the depth before it.", above=0, max=1)

    max_seq_len: int = option(
        4096,
        "Tokens per conversation; longer ones lose the start of their prompt.",
        min=1,
        panel="Batches and length of the run",
    )
    batch_tokens: int = option(16384, "Tokens per packed batch and GPU.", min=1)
    gradient_accumulation_steps: int = option(1, "Batches per GPU and optimizer step.", min=1)
    steps: int | None = option(None, "Length of the run in optimizer steps.", min=1)
    minutes: float | None = option(None, "Length of the run in minutes of training, over all resumes.", above=0)
    epochs: float | None = option(None, "Length of the run in epochs; 4 if no length is given.", above=0)

    lr: float = option(1e-3, "Peak learning rate.", above=0, panel="Optimizer")
    warmup_steps: int = option(100, "Warm-up steps; at most a tenth of the run.", min=0)
    lr_schedule: LrSchedule = option("cosine", "cosine, linear, trapezoid (constant, then linear) or constant.")
    optimizer: OptimizerKind = option("adamw", "adamw, or muon for the weight matrices of layers and AdamW elsewhere.")
    beta1: float = option(0.9, "AdamW: decay of the first moment.", check=BETA)
    beta2: float = option(0.95, "AdamW: decay of the second moment.", check=BETA)
    weight_decay: float = option(0.01, "Weight decay of matrices; norms, embeddings and mask_hidden have none.", min=0)
    max_grad_norm: float = option(1.0, "Gradient-norm clipping threshold; 0 disables clipping.", min=0)
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = option(
        "auto", "bfloat16 (with fp32 master weights), float32, or auto: bfloat16 on a GPU.", panel="Engine"
    )
    chunk_size: int | Literal["auto"] = option(
        "auto",
        "COD positions per forward and backward pass; auto fits GPU memory.",
        check=(lambda size: size == "auto" or size >= 1, "auto, or at least 1"),
    )
    cuda_graphs: bool = option(True, "Capture steps of small batches as CUDA graphs.")
    activation_checkpointing: bool = option(False, "Recompute drafter layers in the backward pass to save memory.")
    shard_target: bool = option(False, "Shard the target over the GPUs (FSDP2).")
    chat_template: str | None = option(None, "Jinja file with a chat template, instead of the target's.", panel="Data")
    raw: bool = option(False, "The responses continue raw prompts, as `peagle data --raw` wrote them.")
    hidden_states_cache: str | None = option(
        None,
        "Folder that caches the target's hidden states, instead of running the target in every step.",
        panel="Hidden states of the target",
    )
    hidden_states_dtype: HiddenStatesDtype = option("bfloat16", "Of the cache: bfloat16, or fp8 in half the space.")
    vllm_hidden_states: str | None = option(
        None, "Folder with hidden states written by vLLM (see `peagle hidden-states`)."
    )

    validation_size: int = option(
        32,
        "Conversations in the validation set; at most a fifth of the data.",
        min=0,
        panel="Validation, logging and saving",
    )
    validation_every: int = option(500, "Steps between measurements of acceptance length; 0: only at the end.", min=0)
    validation_tokens: int = option(128, "Output tokens per validation prompt.", min=1)
    log_every: int = option(20, "Steps between two lines of log.jsonl.", min=1)
    save_minutes: float = option(5.0, "Minutes between two saves of the training state.", above=0)
    seed: int = option(0, "Seed of new weights, the order of the data and COD sampling.", min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_depths == 0:
            object.__setattr__(self, "num_depths", DEFAULT_NUM_DEPTHS[self.method])
        if self.aux_layer_ids is not None:
            object.__setattr__(self, "aux_layer_ids", tuple(sorted(self.aux_layer_ids)))
            distinct = len(set(self.aux_layer_ids)) == len(self.aux_layer_ids) > 0
            require(distinct, "--aux-layer-ids", self.aux_layer_ids, "distinct layer ids, comma-separated")
        one_source = self.hidden_states_cache is None or self.vllm_hidden_states is None
        require(one_source, "--hidden-states-cache", self.hidden_states_cache, "given without --vllm-hidden-states")
        fits = self.max_seq_len <= self.batch_tokens
        require(fits, "--max-seq-len", self.max_seq_len, f"at most --batch-tokens {self.batch_tokens}")

    @property
    def target_head_only(self) -> bool:
        """The run needs the target's embeddings, final norm and LM head, but none of its layers."""
        return self.vllm_hidden_states is not None and self.validation_size == 0 and self.init != "target"
