"""Settings of `peagle train`: the run, the hidden states of the target, and validation during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from peagle.config.speculation import MAX_SPECULATIVE_TOKENS
from peagle.config.validation import field_validator
from peagle.errors import UserError

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


def setting(default: Any, help: str) -> Any:
    """A field of `TrainConfig`; `help` documents its flag."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainConfig:
    """How a drafter is trained. Every field is a flag of `peagle train` and a key of a recipe."""

    method: Method = setting("p-eagle", "p-eagle drafts all tokens in one pass, eagle3 one token per pass.")
    num_layers: int | None = setting(
        None, "Drafter layers; default 4 for p-eagle, 1 for eagle3. Layers beyond those of --init are added."
    )
    intermediate_size: int | None = setting(
        None, "MLP width of the drafter; default the target's. Wider than --init widens its MLPs."
    )
    init: str = setting("target", "Initial weights: target (its last layers), random, or the folder of a drafter.")
    aux_layer_ids: tuple[int, ...] | None = setting(
        None, "Auxiliary hidden state layers of the target, comma-separated; default 2, L//2, L-3."
    )
    mask_token: str = setting("auto", "Mask token of p-eagle: its text, its id, or auto for an unused reserved token.")
    fc_norm: bool = setting(True, "Normalize each auxiliary hidden state before fc (EAGLE-3.1).")
    train_embeddings: bool = setting(False, "Give the drafter its own embeddings, initialized from the target's.")
    train_lm_head: bool = setting(
        False, "Give the drafter its own LM head, initialized from the target's; implied by --draft-vocab-size."
    )
    draft_vocab_size: int | None = setting(None, "Draft only the N most frequent tokens of the data.")

    num_depths: int = setting(0, "Draft tokens to train (K); 0 means 8 for p-eagle and 4 for eagle3.")
    down_sample_ratio: float = setting(0.8, "COD sampling: fraction of the anchors kept from one depth to the next.")
    objective: Objective = setting("lk-hybrid", "Loss per position: ce, kl, tv, lk or lk-hybrid.")
    loss_weighting: LossWeighting = setting(
        "acceptance",
        "acceptance weights a position by the probability that all earlier drafts are accepted; or uniform.",
    )
    depth_decay: float = setting(1.0, "Loss weight of a depth relative to the depth before it.")

    max_seq_len: int = setting(4096, "Tokens per conversation; longer ones lose the start of their prompt.")
    batch_tokens: int = setting(16384, "Tokens per packed batch and GPU.")
    gradient_accumulation_steps: int = setting(1, "Batches per GPU and optimizer step.")
    steps: int | None = setting(None, "Length of the run in optimizer steps.")
    minutes: float | None = setting(None, "Length of the run in minutes of training, over all resumes.")
    epochs: float | None = setting(None, "Length of the run in epochs; 4 if no length is given.")

    lr: float = setting(1e-3, "Peak learning rate.")
    warmup_steps: int = setting(100, "Warm-up steps; at most a tenth of the run.")
    lr_schedule: LrSchedule = setting("cosine", "cosine, linear, trapezoid (constant, then linear) or constant.")
    optimizer: OptimizerKind = setting("adamw", "adamw, or muon for the weight matrices of layers and AdamW elsewhere.")
    beta1: float = setting(0.9, "AdamW: decay of the first moment.")
    beta2: float = setting(0.95, "AdamW: decay of the second moment.")
    weight_decay: float = setting(0.01, "Weight decay of matrices; norms, embeddings and mask_hidden have none.")
    max_grad_norm: float = setting(1.0, "Gradient-norm clipping threshold; 0 disables clipping.")
    dtype: str = setting("auto", "bfloat16 (with fp32 master weights), float32, or auto: bfloat16 on a GPU.")
    chunk_size: int | Literal["auto"] = setting(
        "auto", "COD positions per forward and backward pass; auto fits GPU memory."
    )
    cuda_graphs: bool = setting(True, "Capture steps of small batches as CUDA graphs.")
    activation_checkpointing: bool = setting(False, "Recompute drafter layers in the backward pass to save memory.")
    shard_target: bool = setting(False, "Shard the target over the GPUs (FSDP2).")
    chat_template: str | None = setting(None, "Jinja file with a chat template, instead of the target's.")
    raw: bool = setting(False, "The responses continue raw prompts, as `peagle data --raw` wrote them.")
    hidden_states_cache: str | None = setting(
        None, "Folder that caches the target's hidden states, instead of running the target in every step."
    )
    hidden_states_dtype: HiddenStatesDtype = setting("bfloat16", "Of the cache: bfloat16, or fp8 in half the space.")
    vllm_hidden_states: str | None = setting(
        None, "Folder with hidden states written by vLLM (see `peagle hidden-states`)."
    )

    validation_size: int = setting(32, "Conversations in the validation set; at most a fifth of the data.")
    validation_every: int = setting(500, "Steps between measurements of acceptance length; 0: only at the end.")
    validation_tokens: int = setting(128, "Output tokens per validation prompt.")
    log_every: int = setting(20, "Steps between two lines of log.jsonl.")
    save_minutes: float = setting(5.0, "Minutes between two saves of the training state.")
    seed: int = setting(0, "Seed of new weights, the order of the data and COD sampling.")

    def __post_init__(self) -> None:
        require = field_validator(self)
        choices = {"method": Method, "objective": Objective, "loss_weighting": LossWeighting}
        choices |= {"optimizer": OptimizerKind, "lr_schedule": LrSchedule, "hidden_states_dtype": HiddenStatesDtype}
        for name, kind in choices.items():
            require(getattr(self, name) in get_args(kind), name, " or ".join(get_args(kind)))
        if self.num_depths == 0:
            object.__setattr__(self, "num_depths", DEFAULT_NUM_DEPTHS[self.method])
        if self.aux_layer_ids is not None:
            object.__setattr__(self, "aux_layer_ids", tuple(sorted(self.aux_layer_ids)))
            distinct = len(set(self.aux_layer_ids)) == len(self.aux_layer_ids) > 0
            require(distinct, "aux_layer_ids", "distinct layer ids, comma-separated")
        require(
            self.hidden_states_cache is None or self.vllm_hidden_states is None,
            "hidden_states_cache",
            "given without --vllm-hidden-states",
        )
        require(self.dtype in ("auto", "bfloat16", "float32", "float64"), "dtype", "auto, bfloat16 or float32")
        require(self.chunk_size == "auto" or self.chunk_size >= 1, "chunk_size", "auto, or at least 1")
        for name in ("down_sample_ratio", "depth_decay"):
            require(0.0 < getattr(self, name) <= 1.0, name, "above 0 and at most 1")
        require(1 <= self.num_depths <= MAX_SPECULATIVE_TOKENS, "num_depths", f"from 1 to {MAX_SPECULATIVE_TOKENS}")
        at_least_1 = ["num_layers", "intermediate_size", "draft_vocab_size", "max_seq_len", "batch_tokens"]
        at_least_1 += ["gradient_accumulation_steps", "steps", "log_every", "validation_tokens"]
        for name in at_least_1:
            require(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        for name in ("minutes", "epochs", "lr", "save_minutes"):
            require(getattr(self, name) is None or getattr(self, name) > 0, name, "above 0")
        for name in ("warmup_steps", "weight_decay", "max_grad_norm", "validation_size", "validation_every", "seed"):
            require(getattr(self, name) >= 0, name, "0 or more")
        for name in ("beta1", "beta2"):
            require(0.0 <= getattr(self, name) < 1.0, name, "from 0 to below 1")
        require(self.max_seq_len <= self.batch_tokens, "max_seq_len", f"at most --batch-tokens {self.batch_tokens}")

    @property
    def num_new_layers(self) -> int:
        """Layers of a drafter that starts from no folder."""
        return self.num_layers if self.num_layers is not None else DEFAULT_NUM_LAYERS[self.method]

    @property
    def target_head_only(self) -> bool:
        """The run needs the target's embeddings, final norm and LM head, but none of its layers."""
        return self.vllm_hidden_states is not None and self.validation_size == 0 and self.init != "target"


@dataclass(frozen=True)
class CacheSettings:
    """How hidden states are cached on disk."""

    dtype: HiddenStatesDtype = "bfloat16"
    shard_bytes: int = 512 << 20  # maximum file size, unless a single row is larger
    forward_tokens: int = 16384  # tokens per forward pass of the target

    def __post_init__(self) -> None:
        if self.dtype not in get_args(HiddenStatesDtype):
            raise UserError(f"--hidden-states-dtype {self.dtype}: must be {' or '.join(get_args(HiddenStatesDtype))}")
        for name in ("shard_bytes", "forward_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"CacheSettings.{name} {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class ValidationEngineSettings:
    """The engine that measures the acceptance length during training, on the same device."""

    max_kv_cache_bytes: int = 4 << 30
    max_prefill_tokens: int = 4096
    max_num_seqs: int = 256
    cuda_graphs: bool = False  # capturing takes longer than a validation run saves
