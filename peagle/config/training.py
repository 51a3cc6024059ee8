"""How drafters are trained: the run, what the target said, and how it is measured meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from peagle.config.speculation import MAX_SPECULATIVE_TOKENS
from peagle.config.validation import field_validator
from peagle.errors import UserError

Objective = Literal["ce", "kl", "tv", "lk", "lk-hybrid"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
LK_ETA = 3.0  # how fast lk-hybrid turns from kl to tv as acceptance grows; the LK-losses paper's
LOSS_LOGITS = 128 << 20  # logits of the student, and of the teacher, that live at once in the loss: 256 MB each in bf16

HiddenStatesDtype = Literal["bfloat16", "fp8"]
Method = Literal["p-eagle", "eagle3"]
OptimizerKind = Literal["adamw", "muon"]
Decay = Literal["cosine", "linear", "constant", "trapezoid"]
LAYERS: Mapping[Method, int] = {"p-eagle": 4, "eagle3": 1}  # deeper pays only where a pass makes all drafts
TRAIN_DEPTHS: Mapping[Method, int] = {"p-eagle": 8, "eagle3": 4}
DEFAULT_EPOCHS = 4.0
LEAST_WARMUP = 20  # steps, where a tenth of the time would be fewer
RUN_PER_WARMUP = 10  # a run is at least so many times as long as its warm-up
TRAPEZOID_DECAY = 0.25  # share of the run in which a trapezoid falls; level before that
LEAST_LR = 0.02  # of the highest, at the end of every decay
MUON_MOMENTUM = 0.95
MUON_SCALE = 0.2  # root mean square of its steps, over the rate; AdamW's are about as long
GRAD_BUCKET = 64 << 20  # elements that are summed over ranks in one call: 256 MB
CHUNK_BYTES = 3 << 30  # that a chunk of chains keeps for its way back, on a GPU with room: a small drafter needs one
CHUNK_HEADROOM = 0.85  # of free memory that is counted with, since an allocator never packs perfectly
LEAST_CHUNK_ROWS = 256
CPU_CHUNK_ROWS = 4096


def setting(default: Any, help: str) -> Any:
    """A field of `TrainConfig`; the help is its flag's."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainConfig:
    """How a drafter is trained. Every field is a flag of `peagle train` and a key of a recipe."""

    method: Method = setting("p-eagle", "p-eagle drafts all tokens in one pass, eagle3 one after another.")
    layers: int | None = setting(None, "Of the drafter; 4 for p-eagle, 1 for eagle3. More than --init's are added.")
    mlp_width: int | None = setting(None, "Of the drafter's MLPs; as the target's are. Wider than --init's: they grow.")
    init: str = setting("target", "Start from the target's last layers, target-first, random, or a drafter's folder.")
    aux_layer_ids: tuple[int, ...] | None = setting(
        None, "Layers of the target that are read, by commas; 2, half, last but 3."
    )
    mask_token: str = setting("auto", "The mask token of p-eagle: a token's text, its id, or auto: a reserved one.")
    fc_norm: bool = setting(True, "A norm for each tap (EAGLE-3.1).")
    own_embeddings: bool = setting(False, "Train the drafter's own embeddings, from the target's.")
    own_head: bool = setting(False, "Train the drafter's own head, from the target's; with --draft-vocab it always is.")
    draft_vocab: int | None = setting(None, "Draft only the most frequent tokens of the data, so many.")

    depths: int | None = setting(None, "Draft tokens that are trained; 8 for p-eagle, 4 for eagle3.")
    rate: float = setting(0.8, "Of the chains that reach a depth so many go on to the next.")
    objective: Objective = setting("lk-hybrid", "ce, kl, tv, lk or lk-hybrid: what a row is asked for.")
    sharpen: float = setting(1.0, "Times the target's logits: above 1 rows are asked more for its likeliest token.")
    depth_decay: float = setting(1.0, "Each depth counts so much of the one before it; 1 counts all alike.")
    by_reach: bool = setting(False, "A row counts by the chance that all drafts before it are accepted.")
    by_start: bool = setting(False, "A chain counts by the chance that a round begins with it.")
    by_value: bool = setting(False, "A row counts by the drafts that are kept if it is.")

    max_length: int = setting(4096, "Tokens of a conversation; longer ones are cut in front of the response.")
    batch_tokens: int = setting(16384, "Tokens of a packed batch, on each GPU.")
    accumulate: int = setting(1, "Batches of each GPU that make one step.")
    steps: int | None = setting(None, "Length of the whole run in steps.")
    minutes: float | None = setting(None, "Length of the whole run in minutes of training, over all resumes.")
    epochs: float | None = setting(None, "Length in passes over the data; 4 if no other length is given.")

    lr: float = setting(1e-3, "The highest learning rate.")
    table_share: float = setting(1.0, "So much of --lr for embeddings and head of its own.")
    warmup: int = setting(100, "Steps until it is reached; a tenth of the run at most.")
    decay: Decay = setting("cosine", "cosine, linear, trapezoid (level, then linear) or constant.")
    optimizer: OptimizerKind = setting("adamw", "adamw, or muon: orthogonal steps for matrices, AdamW for the rest.")
    beta1: float = setting(0.9, "AdamW's memory of the gradient.")
    beta2: float = setting(0.95, "AdamW's memory of its square.")
    weight_decay: float = setting(0.01, "Of matrices; norms, embeddings and the mask's hidden state have none.")
    clip: float = setting(1.0, "Longest gradient; 0 is off.")
    dtype: str = setting("auto", "bfloat16 (with fp32 masters), float32, or auto: bfloat16 on a GPU.")
    chunk_rows: int | Literal["auto"] = setting("auto", "Chain rows that are computed together; auto fits the memory.")
    graphs: bool = setting(True, "Capture steps on a GPU as CUDA graphs, where batches are small enough for it.")
    checkpoint_layers: bool = setting(False, "Recompute layers in the backward pass: less memory, more time.")
    shard_target: bool = setting(False, "Spread a target that does not fit over the GPUs (FSDP2).")
    chat_template: str | None = setting(None, "A Jinja file, instead of the target's own template.")
    raw: bool = setting(False, "The responses continue prompts as they are: `peagle data --raw` wrote them.")
    cache: str | None = setting(None, "Keep what the target says in this folder, instead of asking it every time.")
    cache_dtype: HiddenStatesDtype = setting("bfloat16", "bfloat16, or fp8: half the room.")
    vllm_states: str | None = setting(None, "Read what the target says from a folder vLLM's connector wrote.")

    held_out: int = setting(32, "Conversations kept aside to measure acceptance on; at most a fifth.")
    measure_every: int = setting(500, "Steps between measurements of acceptance; 0 measures at the end only.")
    measure_tokens: int = setting(128, "New tokens of each answer when measuring.")
    log_every: int = setting(20, "Steps between lines of the log.")
    save_minutes: float = setting(5.0, "Minutes between saves of the training state.")
    seed: int = setting(0, "Of new weights, of the order of the data and of sampled rows.")

    def __post_init__(self) -> None:
        require = field_validator(self)
        if self.aux_layer_ids is not None:
            object.__setattr__(self, "aux_layer_ids", tuple(sorted(self.aux_layer_ids)))
        require(self.method in get_args(Method), "method", " or ".join(get_args(Method)))
        require(self.objective in OBJECTIVES, "objective", " or ".join(OBJECTIVES))
        require(self.optimizer in get_args(OptimizerKind), "optimizer", " or ".join(get_args(OptimizerKind)))
        require(self.decay in get_args(Decay), "decay", " or ".join(get_args(Decay)))
        require(
            self.cache_dtype in get_args(HiddenStatesDtype), "cache_dtype", " or ".join(get_args(HiddenStatesDtype))
        )
        require(
            self.cache is None or self.vllm_states is None, "cache", "without --vllm-states, or the other way round"
        )
        require(self.dtype in ("auto", "bfloat16", "float32", "float64"), "dtype", "auto, bfloat16 or float32")
        require(self.chunk_rows == "auto" or self.chunk_rows >= 1, "chunk_rows", "auto, or at least 1")
        require(
            self.aux_layer_ids is None or len(set(self.aux_layer_ids)) == len(self.aux_layer_ids) > 0,
            "aux_layer_ids",
            "different layers, by commas",
        )
        for name in ("rate", "depth_decay"):
            require(0.0 < getattr(self, name) <= 1.0, name, "above 0 and at most 1")
        require(
            self.depths is None or 1 <= self.depths <= MAX_SPECULATIVE_TOKENS,
            "depths",
            f"from 1 to {MAX_SPECULATIVE_TOKENS}",
        )
        shape, length = ("layers", "mlp_width", "draft_vocab"), ("max_length", "batch_tokens", "accumulate", "steps")
        for name in (*shape, *length, "log_every"):
            require(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        for name in ("minutes", "epochs", "lr", "table_share", "save_minutes", "sharpen"):
            require(getattr(self, name) is None or getattr(self, name) > 0, name, "above 0")
        for name in ("warmup", "weight_decay", "clip", "held_out", "measure_every", "seed"):
            require(getattr(self, name) >= 0, name, "0 or more")
        for name in ("beta1", "beta2"):
            require(0.0 <= getattr(self, name) < 1.0, name, "from 0 to below 1")
        require(self.max_length <= self.batch_tokens, "max_length", f"at most --batch-tokens, {self.batch_tokens}")
        require(self.measure_tokens >= 1, "measure_tokens", "at least 1")

    @property
    def num_layers(self) -> int:
        return self.layers if self.layers is not None else LAYERS[self.method]

    @property
    def num_depths(self) -> int:
        return self.depths if self.depths is not None else TRAIN_DEPTHS[self.method]

    @property
    def tables_only(self) -> bool:
        """Nobody needs the target's layers: what they say is read, none is started from, nothing is measured."""
        return self.vllm_states is not None and self.held_out == 0 and self.init not in ("target", "target-first")


@dataclass(frozen=True)
class CacheSettings:
    """How the target's states are kept on disk."""

    dtype: HiddenStatesDtype = "bfloat16"  # fp8 takes half the room
    shard_bytes: int = 512 << 20  # of one file, unless a single row is larger
    pass_tokens: int = 16384  # that the target reads at once

    def __post_init__(self) -> None:
        if self.dtype not in get_args(HiddenStatesDtype):
            raise UserError(f"--cache-dtype {self.dtype}: must be {' or '.join(get_args(HiddenStatesDtype))}")
        for name in ("shard_bytes", "pass_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--cache-{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class MeasureSettings:
    """The engine that measures a drafter while it trains, on the same device."""

    cache_bytes: int = 4 << 30  # of its keys and values, at most; what does not fit waits its turn
    prefill_tokens: int = 4096  # of prompts that are read at once
    max_num_seqs: int = 256
    cuda_graphs: bool = False  # recording them takes longer than a few hundred rounds save
