"""Measures the cost of decode steps at engine start, for `num_speculative_tokens="auto"` without a cost table.

The engine must be unused: both functions overwrite the device state and leave it zeroed.
"""

from __future__ import annotations

import itertools
import time

import torch

from peagle.engine.model_runner import ModelRunner
from peagle.speculative.adaptive_k import StepCostTable

TYPICAL_CONTEXT = 256  # cached tokens of the timed requests: without context, attention would seem free


def measure_captured_steps(runner: ModelRunner, num_repeats: int = 3) -> StepCostTable:
    """Times every captured decode graph on the GPU."""
    graphs, table, state = runner.decode_graphs, StepCostTable(), runner.state
    assert graphs is not None
    context = min(TYPICAL_CONTEXT, runner.max_model_len // 2)
    tables_SM = state.block_tables_SM[:-1]  # without the padding slot
    block_ids = torch.arange(tables_SM.numel(), device=tables_SM.device) % runner.kv_cache.num_blocks
    tables_SM.copy_(block_ids.view(tables_SM.shape))
    for batch_size, k in graphs.captured:
        graph = graphs.find(batch_size, k, context + num_repeats * (k + 1))
        assert graph is not None
        graph.slots_B.copy_(torch.arange(batch_size, device=runner.device))
        state.num_computed_tokens_S[:-1].fill_(context)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        for _ in range(num_repeats):
            graph.replay()
        end.record()
        end.synchronize()
        table.seconds[batch_size, k] = begin.elapsed_time(end) / num_repeats / 1e3
    for used in (tables_SM, state.num_computed_tokens_S, state.num_draft_tokens_S, state.token_ids_SN):
        used[: len(tables_SM)].zero_()
    return table


def measure_eager_steps(
    runner: ModelRunner, batch_sizes: list[int], choices: list[int], budget_seconds: float = 1.5
) -> StepCostTable:
    """Times decode steps without context and without graphs, within a time budget.

    Each is the fastest of three runs, interleaved so that a busy moment hits all choices alike, after one warm-up. Past
    the budget, remaining runs and larger batch sizes are skipped; batch size 1 gets at least two runs.
    """
    table = StepCostTable()
    began = time.perf_counter()
    for batch_size in batch_sizes:
        slots_B = torch.arange(batch_size, device=runner.device)  # no request has them; they use the padding block
        runner.decode_step(slots_B, choices[0])
        seconds: dict[int, float] = {}
        for run, k in itertools.product(range(3), choices):
            if time.perf_counter() - began > budget_seconds and (batch_size > 1 or run > 1):
                break
            _reset_progress(runner)
            started = time.perf_counter()
            runner.decode_step(slots_B, k)
            elapsed = time.perf_counter() - started
            seconds[k] = min(seconds.get(k, elapsed), elapsed)
        if len(seconds) < len(choices):
            break
        table.seconds |= {(batch_size, k): seconds[k] for k in choices}
    _reset_progress(runner)
    return table


def _reset_progress(runner: ModelRunner) -> None:
    runner.state.num_computed_tokens_S.zero_()
    runner.state.num_draft_tokens_S.zero_()
