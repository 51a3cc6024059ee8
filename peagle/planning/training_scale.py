"""A training run on GPUs that are not here: its plan from a config.json, or a model known by name, and rates.

The drafter's rates are an H200's, measured (benchmarks/results/h200-training-step.json, 20,480 tokens in one step);
another GPU's are in proportion to what its maker says of its products. What was not measured is assumed, and said so:
the target's pass reaches `plan.REACHED` of the matrix rate, gradients travel at the nominal rate of links. Knows
nothing about modules or data files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from peagle.checkpoints.families import read_decoder_config
from peagle.checkpoints.files import read_config_json
from peagle.config import DecoderConfig, ExpertsConfig, LayerConfig, RopeConfig
from peagle.errors import UserError
from peagle.planning.gpus import GPUS, GpuSpec
from peagle.planning.shapes import KNOWN_MODELS, ModelShape, load_target_shape
from peagle.training import resource_plan as plan
from peagle.training.recipe import Recipe
from peagle.training.run import plan_drafter_config, planned_chunk
from peagle.training.schedule import Schedule

MEASURED_ON = GPUS["h200"]
PRODUCTS = 663e12  # operations a second of a drafter's step, all but attention: 663 TFLOP in 1.00 s
ATTENTION = 325e12  # of its attention: 200 TFLOP in 0.61 s
MATRIX_RATE = 790e12  # of a large product
COPY_RATE = 4.3e12  # bytes a second, read and written
NETWORK = 50e9  # bytes a second that a GPU sends to other nodes: 400 Gb/s
USABLE = 0.95  # of a GPU's memory, beside what the driver and NCCL take
ELEMENT = 2  # bf16


@dataclass(frozen=True)
class Cluster:
    gpu: GpuSpec
    gpus: int = 8  # of a node
    nodes: int = 1
    network: float = NETWORK

    def __post_init__(self) -> None:
        for flag, value in (("gpus", self.gpus), ("nodes", self.nodes)):
            if value < 1:
                raise UserError(f"--{flag} {value}: must be at least 1")
        if not self.network > 0:
            raise UserError(f"--network {self.network}: must be above 0")

    @property
    def machine(self) -> plan.TrainingHardware:
        """All GPUs of a node send to the next node at once, so rings between nodes share its network."""
        scale = self.gpu.matrix_flops / MEASURED_ON.matrix_flops
        copies = self.gpu.memory_bandwidth / MEASURED_ON.memory_bandwidth
        link = self.gpu.link_bandwidth if self.nodes == 1 else min(self.gpu.link_bandwidth, self.gpus * self.network)
        what = "as measured on an H200" if self.gpu == MEASURED_ON else f"an H200's, measured, times {scale:.2f}"
        return plan.TrainingHardware(
            world=self.gpus * self.nodes,
            products=PRODUCTS * scale,
            attention=ATTENTION * scale,
            target=plan.REACHED * MATRIX_RATE * scale,
            rate_from=f"estimated: operations over rates {what}; the target at {plan.REACHED:.0%} of the matrix rate",
            per_node=self.gpus,
            link=link,
            memory_rate=COPY_RATE * copies,
            memory=USABLE * self.gpu.memory_bytes,
        )


def target_on_paper(name: str) -> DecoderConfig:
    """From a folder with a config.json or that file, from a hub's folder of that name here, or by a known name: the
    last part of a hub id will do."""
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            return read_decoder_config(read_config_json(file.parent), file)
        except UserError:
            return as_decoder(
                load_target_shape(str(file))
            )  # not one that runs here; its sizes may be read all the same
    return as_decoder(load_target_shape(known_name(name)))


def known_name(name: str) -> str:
    """openai/gpt-oss-20b -> gpt-oss-20b, Qwen/Qwen3-Coder-30B-A3B-Instruct -> qwen3-coder-30b-a3b."""
    last = name.lower().rsplit("/", 1)[-1]
    found = [known for known in KNOWN_MODELS if last == known or last.startswith(f"{known}-")]
    return max(found, key=len, default=name)


def as_decoder(shape: ModelShape) -> DecoderConfig:
    """As far as a plan needs one: no biases, no norms but the usual ones, which are too small to matter."""
    if len(set(shape.is_moe_layer)) > 1:
        raise UserError(f"--target {shape.name}: layers without experts among layers with them cannot be planned")
    experts = None
    if shape.is_moe_layer[0]:
        # what every token goes to is counted as one expert more, of the same width, that is always chosen
        shared = shape.shared_expert_intermediate_size // shape.moe_intermediate_size
        experts = ExpertsConfig(
            shape.num_experts + shared, shape.num_experts_per_tok + shared, shape.moe_intermediate_size
        )
    layer = LayerConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size or shape.num_experts_per_tok * shape.moe_intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        experts=experts,
    )
    rope, longest = RopeConfig(), 1 << 17
    layers = tuple(replace(layer, num_kv_heads=kv_heads, head_dim=wide) for kv_heads, wide in shape.kv_shapes)
    tied, windows = shape.tie_word_embeddings, shape.windows
    return DecoderConfig("", shape.vocab_size, shape.num_layers, layer, rope, longest, tied, windows, layers=layers)


def on_paper(
    recipe: Recipe, cluster: Cluster, data: plan.DatasetStats, known_rate: float | None = None
) -> plan.TrainingPlan:
    """The plan of a run on such GPUs."""
    cfg, target, machine = recipe.train, target_on_paper(recipe.target), cluster.machine
    shape = plan_drafter_config(cfg, target)
    chunk = planned_chunk(cfg, target, shape, data, machine.world, ELEMENT, machine.memory)
    steps = Schedule.of(cfg, data.tokens / (cfg.batch_tokens * cfg.accumulate * machine.world)).steps
    return plan.make_plan(cfg, target, shape, data, machine, steps, ELEMENT, chunk, known_rate)


def assumed_data(recipe: Recipe, tokens: int, mean_length: int | None) -> plan.DatasetStats:
    """Of data that is not there yet: the most it can take. Every document is as long as --max-length allows unless
    a length is given, and all of it is asked."""
    if tokens < 1:
        raise UserError(f"--data-tokens {tokens}: must be at least 1")
    longest = recipe.train.max_length
    if mean_length is not None and not 1 <= mean_length <= longest:
        raise UserError(f"--mean-length {mean_length}: must be from 1 to --max-length, {longest}")
    return plan.DatasetStats(tokens, 1.0, float(mean_length or longest))
