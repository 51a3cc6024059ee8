"""Times decode steps of the embedded engine by batch size and number of draft tokens, and saves the cost table."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from peagle.config import TuneSettings
from peagle.engine.kv_cache import BLOCK_SIZE
from peagle.engine.llm import LLM
from peagle.engine.loader import time_decode_step
from peagle.engine.model_runner import ModelRunner
from peagle.errors import UserError
from peagle.results.files import replace_file
from peagle.speculative.adaptive_k import StepCostTable

StepKind = tuple[int, int]  # batch size, number of draft tokens


@dataclass(frozen=True)
class CostTableKey:
    """What a cost table was measured for. A table is only valid for an equal key."""

    target: str
    drafter: str
    device: str
    dtype: str
    context_len: int


def load_engine(target: str, drafter: str, settings: TuneSettings, device: str | None, dtype: str | None) -> LLM:
    """Loads the engine with a placeholder cost table, so that it does not time its decode steps itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        StepCostTable({(1, 0): 1.0}).save(path)
        return LLM(
            target,
            drafter,
            "auto",
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            device=device,
            dtype=dtype,
            cost_table=path,
            tokenizer=False,
        )


def cost_table_key(llm: LLM, target: str, drafter: str, context_len: int) -> CostTableKey:
    device = llm.model_runner.device
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return CostTableKey(target, drafter, device_name, llm.dtype, context_len)


def list_step_kinds(llm: LLM, settings: TuneSettings) -> list[StepKind]:
    """The decode steps to time, smallest first. On a GPU: those with a CUDA graph."""
    graphs, choices = llm.model_runner.decode_graphs, llm.adaptive_k.choices
    cpu_sizes = [size for size in settings.cpu_batch_sizes if size <= settings.max_num_seqs]
    sizes = settings.batch_sizes or (graphs.batch_sizes if graphs is not None else cpu_sizes)
    kinds = [(size, k) for size in sorted({*sizes, *settings.concurrency}) for k in choices]
    return kinds if graphs is None else [(size, k) for size, k in kinds if graphs.find(size, k, 0)]


def time_decode_steps(
    runner: ModelRunner, step_kinds: list[StepKind], table: StepCostTable, settings: TuneSettings
) -> Iterator[StepKind]:
    """Adds the missing step kinds to the table, a batch size at once: the fastest of several repeats.

    Repeats alternate between the values of K, so that a busy moment affects all of them. Yields after every step.
    """
    if settings.context_len:
        _assign_kv_blocks(runner, max((size for size, _ in step_kinds), default=0), settings.context_len)
    for batch_size in sorted({size for size, _ in step_kinds}):
        missing = [k for size, k in step_kinds if size == batch_size and (size, k) not in table.seconds]
        fastest = dict.fromkeys(missing, float("inf"))
        for repeat in range(settings.warmup + settings.repeats):
            for k in missing:
                seconds = time_decode_step(runner, batch_size, k, settings.context_len)
                if repeat >= settings.warmup:
                    fastest[k] = min(fastest[k], seconds)
                if repeat == settings.warmup + settings.repeats - 1 and k == missing[-1]:
                    table.seconds |= {(batch_size, k): seconds for k, seconds in fastest.items()}
                yield batch_size, k


@torch.inference_mode()
def _assign_kv_blocks(runner: ModelRunner, num_requests: int, context_len: int) -> None:
    """Gives each request slot its own KV blocks for the context. The engine cannot serve requests afterwards."""
    num_new_tokens = 2 * runner.max_speculative_tokens + 2
    blocks_per_request = -(-min(context_len + num_new_tokens, runner.max_model_len) // BLOCK_SIZE)
    num_blocks = runner.kv_cache.num_blocks
    if 1 + num_requests * blocks_per_request > num_blocks:
        max_context_len = (num_blocks - 1) // max(num_requests, 1) * BLOCK_SIZE - num_new_tokens
        raise UserError(
            f"--context-len {context_len}: the KV cache is too small for {num_requests} such requests; "
            f"use at most {max(max_context_len, 0)}, or a smaller --max-num-seqs"
        )
    num_used = num_requests * blocks_per_request
    block_ids = 1 + torch.randperm(num_used, device=runner.device).view(num_requests, blocks_per_request).int()
    runner.state.block_tables_SM[:num_requests, :blocks_per_request] = block_ids


def save_cost_table(path: Path, table: StepCostTable, key: CostTableKey, finished: bool) -> None:
    """The engine also reads an unfinished table."""
    with replace_file(path, "--cost-table") as temporary:
        table.save(temporary, **asdict(key), finished=finished)


def load_cost_table(path: Path, key: CostTableKey) -> StepCostTable:
    """The table of an earlier run with the same key; empty if the file does not exist."""
    if not path.exists():
        return StepCostTable()
    try:
        table = StepCostTable.load(path)
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        raise UserError(f"--cost-table {path}: exists and is not a cost table; use another file") from None
    for name, value in asdict(key).items():
        if found.get(name) != value:
            raise UserError(
                f"--cost-table {path}: was measured for {name} {found.get(name)}, not {value}; "
                "use another file or --overwrite"
            )
    return table
