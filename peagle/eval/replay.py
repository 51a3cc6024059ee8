"""Predicts what a drafter proposes at every position of finished responses, in one pass for all K.

The next token of a response is decided by the target alone: greedily, or by noise that depends on (seed, position,
token). So it is the same for every drafter and K, and a drafter's proposal at a position depends only on the tokens
before it. Target and drafter therefore run over the finished responses as in training, with a chain of K - 1 mask rows
at every position, and the length of the correct run there is all that `replay_drafts` needs for any K. EAGLE-3's later
draft tokens depend on its own earlier ones, but a later one counts only if the earlier ones equal the response, so it
may be given the response's tokens.

Responses are extended by K - 1 tokens beyond their end: draft tokens are counted before the output is cut.

Shapes: N tokens of a packed batch, R rows of a chunk, A anchors, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.config import EvalSettings
from peagle.data.batches import PackedBatch
from peagle.eval.conversations import CompletedTurn
from peagle.kernels.sampling.sample import argmax
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.cod_sampling import all_cod_positions
from peagle.training.hidden_states.online import OnlineHiddenStates
from peagle.training.partition import ChainChunk, DepthZeroOutputs, DrafterForward, split_chains


@dataclass(frozen=True)
class ExtendedResponse:
    """A response and the tokens that the target would generate after its end."""

    turn: CompletedTurn
    extension_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.turn.request.prompt_token_ids + self.turn.response.token_ids + self.extension_ids


@torch.inference_mode()
def compute_correct_runs(
    target: Decoder,
    drafter: Drafter,
    responses: Sequence[ExtendedResponse],
    num_depths: int,
    settings: EvalSettings,
    on_progress: Callable[[int], None],
) -> list[dict[int, int]]:
    """For each response: number n of known tokens -> how many of the next tokens the drafter predicts, in a row.

    Runs are at most `num_depths` long. The row at position n - 2 has the newest token and predicts the one after it.
    """
    runs: list[dict[int, int]] = []
    hidden_states = OnlineHiddenStates(target, drafter.cfg.aux_layer_ids)
    for group in _pack(responses, settings.replay_tokens):
        batch = _build_batch(group)
        run_N = _batch_runs(drafter, hidden_states, batch, num_depths, settings).tolist()
        start = 0
        for response in group:
            first, size = len(response.turn.request.prompt_token_ids) + 1, len(response.token_ids)
            runs.append({n: run_N[start + n - 2] for n in range(first, size)})
            start += size
        on_progress(len(runs))
    return runs


def _batch_runs(
    drafter: Drafter, source: OnlineHiddenStates, batch: PackedBatch, num_depths: int, settings: EvalSettings
) -> Tensor:
    """[N]: length of the correct run after each position.

    Logits of a chain's next row are computed only if all rows before it were correct: with a large vocabulary they are
    most of the work.
    """
    states = source.states(batch)
    forward = DrafterForward(drafter, states, batch, states.hidden_ND.device)
    depth_zero = forward.run_depth_zero()
    run_N = torch.zeros(len(batch), dtype=torch.long)
    max_rows = max(settings.replay_logits // drafter.cfg.draft_vocab_size, 1)
    for chunk in split_chains(all_cod_positions(batch, num_depths), settings.replay_rows):
        anchor_A = chunk.anchor_A
        correct = _is_correct(drafter, depth_zero.output_ND, anchor_A, anchor_A + 2, forward, max_rows)
        run_N[anchor_A[correct]] = 1
        _extend_runs(drafter, forward, depth_zero, chunk, run_N, max_rows)
    return run_N


def _extend_runs(
    drafter: Drafter,
    forward: DrafterForward,
    depth_zero: DepthZeroOutputs,
    chunk: ChainChunk,
    run_N: Tensor,
    max_rows: int,
) -> None:
    """Extends the runs by the chains of a chunk, depth by depth."""
    if not len(chunk.anchor_R):
        return
    output_RD = forward.run_chains(depth_zero, chunk)
    for depth in range(1, int(chunk.depth_R.max()) + 1):
        rows = ((chunk.depth_R == depth) & (run_N[chunk.anchor_R] == depth)).nonzero()[:, 0]
        if not len(rows):
            return
        anchors = chunk.anchor_R[rows]
        correct = _is_correct(drafter, output_RD, rows, anchors + depth + 2, forward, max_rows)
        run_N[anchors[correct]] = depth + 1


def _is_correct(
    drafter: Drafter, output_RD: Tensor, rows: Tensor, labels: Tensor, forward: DrafterForward, max_rows: int
) -> Tensor:
    """Whether each row's draft token equals the token at position `labels`; logits of at most max_rows at once."""
    parts = []
    for some_rows, some_labels in zip(rows.split(max_rows), labels.split(max_rows), strict=True):
        draft_ids = drafter.to_target_ids(argmax(drafter.compute_logits(output_RD[forward.to_device(some_rows)])))
        parts.append((draft_ids == forward.token_N[forward.to_device(some_labels)]).cpu())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _pack(responses: Sequence[ExtendedResponse], max_tokens: int) -> Iterator[list[ExtendedResponse]]:
    """Groups of consecutive responses with at most max_tokens; a longer response is a group of its own."""
    group: list[ExtendedResponse] = []
    for response in responses:
        if group and sum(len(r.token_ids) for r in group) + len(response.token_ids) > max_tokens:
            yield group
            group = []
        group.append(response)
    if group:
        yield group


def _build_batch(responses: Sequence[ExtendedResponse]) -> PackedBatch:
    size = torch.tensor([len(response.token_ids) for response in responses])
    prompt = torch.tensor([len(response.turn.request.prompt_token_ids) for response in responses])
    end = size.cumsum(0)
    start_N = (end - size).repeat_interleave(size)
    index_N = torch.arange(int(end[-1]))
    return PackedBatch(
        torch.tensor([token for response in responses for token in response.token_ids]),  # type: ignore[arg-type]
        index_N - start_N,  # type: ignore[arg-type]
        start_N,  # type: ignore[arg-type]
        end.repeat_interleave(size),  # type: ignore[arg-type]
        index_N - start_N >= prompt.repeat_interleave(size),  # type: ignore[arg-type]
        tuple(response.turn.request.row.id for response in responses),
    )
