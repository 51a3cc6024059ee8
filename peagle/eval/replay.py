"""What a drafter foretells at every place of finished texts, in one pass: all that rounds of any K need to know.

Knows target, drafter and texts; nothing about engines, conversations or counts.

What comes next in a text is decided by the target alone: greedily, or by noise that follows from (seed, position,
token). So it is the same for every drafter and K, and what a drafter guesses at a place depends on the text before
that place and on nothing else: neither on K nor on where earlier rounds began. Target and drafter therefore read the
finished texts as in training, with a chain of K - 1 rows at every place, and the length of the run of right guesses
there is all that `walk` needs to play the rounds of any K. EAGLE-3's later guesses see its own earlier ones, but a
later one only counts where the earlier ones are the text's, so it may be given those.

Texts are continued by K - 1 tokens behind their end for this: drafts are counted before the text is cut.

Shapes: N tokens of a packed batch, R rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.config import EvalSettings
from peagle.data.batches import PackedBatch
from peagle.eval.conversations import Answer
from peagle.kernels.sampling.sample import argmax
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.cod_sampling import all_cod_positions
from peagle.training.hidden_states.online import OnlineHiddenStates
from peagle.training.partition import ChainChunk, DepthZeroOutputs, DrafterForward, split_chains


@dataclass(frozen=True)
class Text:
    """An answer with what the target would have said behind its end."""

    answer: Answer
    beyond: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.answer.asked.prompt_ids + self.answer.said.token_ids + self.beyond


@torch.inference_mode()
def runs(
    target: Decoder,
    drafter: Drafter,
    texts: Sequence[Text],
    depths: int,
    settings: EvalSettings,
    tell: Callable[[int], None],
) -> list[dict[int, int]]:
    """For each text: by the number n of tokens known, how many tokens from there on the drafter foretells in a row, at
    most `depths`. The row at position p = n - 2 holds the newest token and guesses the one after it."""
    found: list[dict[int, int]] = []
    source = OnlineHiddenStates(target, drafter.cfg.aux_layer_ids)
    for group in packed(texts, settings.replay_tokens):
        batch = batch_of(group)
        run_N = lengths(drafter, source, batch, depths, settings).tolist()
        start = 0
        for text in group:
            first, size = len(text.answer.asked.prompt_ids) + 1, len(text.token_ids)
            found.append({n: run_N[start + n - 2] for n in range(first, size)})
            start += size
        tell(len(found))
    return found


def lengths(
    drafter: Drafter, source: OnlineHiddenStates, batch: PackedBatch, depths: int, settings: EvalSettings
) -> Tensor:
    """[N]: how long a run of right guesses begins behind each row. The head is asked for a chain's next row only where
    all before it were right: that is most of the work where the vocabulary is large."""
    states = source.states(batch)
    view = DrafterForward(drafter, states, batch, states.hidden_ND.device)
    leaves = view.run_depth_zero()
    run_N = torch.zeros(len(batch), dtype=torch.long)
    rows = all_cod_positions(batch, depths)
    most = max(settings.replay_logits // drafter.cfg.draft_vocab_size, 1)
    for chunk in split_chains(rows, settings.replay_rows):
        right = _right(drafter, leaves.output_ND, chunk.anchor_A, chunk.anchor_A + 2, view, most)
        run_N[chunk.anchor_A[right]] = 1
        _follow(drafter, view, leaves, chunk, run_N, most)
    return run_N


def _follow(
    drafter: Drafter, view: DrafterForward, leaves: DepthZeroOutputs, chunk: ChainChunk, run_N: Tensor, most: int
) -> None:
    """Adds the chunk's chains to the runs, depth by depth."""
    if not len(chunk.anchor_R):
        return
    said_RD = view.run_chains(leaves, chunk)
    for depth in range(1, int(chunk.depth_R.max()) + 1):
        at = ((chunk.depth_R == depth) & (run_N[chunk.anchor_R] == depth)).nonzero()[:, 0]
        if not len(at):
            return
        anchor = chunk.anchor_R[at]
        right = _right(drafter, said_RD, at, anchor + depth + 2, view, most)
        run_N[anchor[right]] = depth + 1


def _right(drafter: Drafter, said_RD: Tensor, at: Tensor, question: Tensor, view: DrafterForward, most: int) -> Tensor:
    """Of the rows `at`, on the CPU: is the guess the token that is asked for? At most so many rows of logits live."""
    found = []
    for some, asked in zip(at.split(most), question.split(most), strict=True):
        guess = drafter.to_target_ids(argmax(drafter.compute_logits(said_RD[view.to_device(some)])))
        found.append((guess == view.token_N[view.to_device(asked)]).cpu())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def packed(texts: Sequence[Text], tokens: int) -> Iterator[list[Text]]:
    """In order, as many together as fit; a longer one alone."""
    group: list[Text] = []
    for text in texts:
        if group and sum(len(t.token_ids) for t in group) + len(text.token_ids) > tokens:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def batch_of(texts: Sequence[Text]) -> PackedBatch:
    size = torch.tensor([len(text.token_ids) for text in texts])
    prompt = torch.tensor([len(text.answer.asked.prompt_ids) for text in texts])
    end = size.cumsum(0)
    start_N = (end - size).repeat_interleave(size)
    index_N = torch.arange(int(end[-1]))
    return PackedBatch(
        torch.tensor([token for text in texts for token in text.token_ids]),  # type: ignore[arg-type]
        index_N - start_N,  # type: ignore[arg-type]
        start_N,  # type: ignore[arg-type]
        end.repeat_interleave(size),  # type: ignore[arg-type]
        index_N - start_N >= prompt.repeat_interleave(size),  # type: ignore[arg-type]
        tuple(text.answer.asked.row.id for text in texts),
    )
