"""What a round costs here, by requests at once and drafts: timed one after another, kept as they come.

Knows the engine's rounds and the file they are kept in; nothing about acceptance or what is chosen from them.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from peagle.config import TuneSettings
from peagle.engine.kv_cache import BLOCK_SIZE
from peagle.engine.llm import LLM
from peagle.engine.model_runner import ModelRunner
from peagle.errors import UserError
from peagle.speculative.adaptive_k import StepCostTable


@dataclass(frozen=True)
class Subject:
    """What is timed. Costs of another subject are no use."""

    target: str
    drafter: str
    device: str
    dtype: str
    context: int


def untimed(target: str, drafter: str, settings: TuneSettings, device: str | None, dtype: str | None) -> LLM:
    """An engine that has not timed its rounds itself."""
    with _any_costs() as table:
        return LLM(
            target,
            drafter,
            "auto",
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            device=device,
            dtype=dtype,
            cost_table=table,
            tokenizer=False,
        )


@contextmanager
def _any_costs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        StepCostTable({(1, 0): 1.0}).save(path)
        yield path


def subject_of(llm: LLM, target: str, drafter: str, context: int) -> Subject:
    return Subject(target, drafter, _device_name(llm.model_runner.device), llm.dtype, context)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def wanted(llm: LLM, settings: TuneSettings) -> list[tuple[int, int]]:
    """The rounds worth timing, smallest first. On a GPU those that are recorded, but where batches are asked for."""
    graphs, choices = llm.model_runner.decode_graphs, llm.adaptive_k.choices
    if graphs is not None:
        batches = settings.batches or tuple(graphs.sizes)
        return [(b, k) for b in sorted({*batches, *settings.concurrency}) for k in choices if graphs.find(b, k, 0)]
    usual = tuple(b for b in settings.cpu_batches if b <= settings.max_num_seqs)
    return [(b, k) for b in sorted({*(settings.batches or usual), *settings.concurrency}) for k in choices]


def sweep(
    runner: ModelRunner,
    rounds: list[tuple[int, int]],
    table: StepCostTable,
    settings: TuneSettings,
    timed: Callable[[int, int], None] = lambda batch, k: None,
    done: Callable[[int], None] = lambda batch: None,
) -> None:
    """Times what the table does not have yet: the fastest of some rounds each, in turns, so that a busy moment hits
    all numbers of drafts alike. `timed` is told of every round, `done` of every batch that entered the table."""
    if settings.context:
        _occupy(runner, max((b for b, _ in rounds), default=0), settings.context)
    for batch in sorted({b for b, _ in rounds}):
        missing = [k for b, k in rounds if b == batch and (b, k) not in table.seconds]
        fastest = dict.fromkeys(missing, float("inf"))
        for turn in range(settings.warmup + settings.repeats):
            for k in missing:
                took = _time(runner, batch, k, settings.context)
                fastest[k] = min(fastest[k], took) if turn >= settings.warmup else fastest[k]
                timed(batch, k)
        table.seconds |= {(batch, k): seconds for k, seconds in fastest.items()}
        if missing:
            done(batch)


@torch.inference_mode()
def _occupy(runner: ModelRunner, requests: int, context: int) -> None:
    """Gives each of the first slots blocks of its own for the context and what a round adds. Nobody may use the engine
    for anything else afterwards."""
    each = -(-min(context + 2 * runner.max_speculative_tokens + 2, runner.max_model_len) // BLOCK_SIZE)
    there = len(runner.cache.keys[0])
    if 1 + requests * each > there:
        most = (there - 1) // max(requests, 1) * BLOCK_SIZE - 2 * runner.max_speculative_tokens - 2
        raise UserError(
            f"--context {context}: the cache has no room for {requests} requests of it; at most {max(most, 0)}, or "
            "fewer --max-num-seqs"
        )
    blocks = 1 + torch.randperm(requests * each, device=runner.device).view(requests, each).int()
    runner.state.block_tables_SM[:requests, :each] = blocks


@torch.inference_mode()
def _time(runner: ModelRunner, batch: int, k: int, context: int) -> float:
    """Seconds of a round: rows of nobody, or of requests that all have the context behind them."""
    slots_B = torch.arange(batch, device=runner.device) if context else torch.full((batch,), -1, device=runner.device)
    graph = runner.decode_graphs.find(batch, k, context) if runner.decode_graphs is not None else None
    if graph is not None:
        graph.slots_B.fill_(-1)
        graph.slots_B[:batch].copy_(slots_B)
        graph.slots = None  # what it holds is not what `load` put there
    runner.state.num_computed_tokens_S[:-1] = context  # the round before moved it on
    _wait(runner)
    started = time.perf_counter()
    if graph is not None:
        graph.replay()
    else:
        runner.decode_step(slots_B, k)
    _wait(runner)
    return time.perf_counter() - started


def _wait(runner: ModelRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


def keep(path: Path, table: StepCostTable, subject: Subject, finished: bool) -> None:
    """Takes the place of what is there as a whole. The engine reads an unfinished table too."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        table.save(unfinished, **asdict(subject), finished=finished)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from None


def kept(path: Path, subject: Subject) -> StepCostTable:
    """What an earlier run of the same subject timed; empty if there is no file."""
    if not path.exists():
        return StepCostTable()
    try:
        about = json.loads(path.read_text())
        table = StepCostTable.load(path)
        there = {name: about.get(name) for name in asdict(subject)}
    except (OSError, ValueError, AttributeError):
        raise UserError(f"--out {path}: is there and no table of `peagle tune`; name another file") from None
    for name, value in asdict(subject).items():
        if there[name] != value:
            raise UserError(
                f"--out {path}: is a table for {name} {there[name]}, not {value}; name another file, or --again to "
                "measure anew"
            )
    return table
