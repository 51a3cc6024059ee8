"""Which sizes are recorded, and where the rows of a padded pass belong; replaying them needs a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pairs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle import reference
from peagle.config import DecoderConfig, LayerConfig, RopeConfig, SamplingParams
from peagle.engine.graphs import CHUNK_ROWS, ChunkGraphs, GuessBuffers, GuessGraphs, batch_sizes, chunk_sizes
from peagle.engine.llm import LLM
from peagle.engine.loading import check_recordable
from peagle.errors import UserError


@many(60)
@given(st.integers(1, 2048))
def test_batch_sizes_end_with_the_largest_and_waste_little(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for batch in range(1, most + 1):
        padded = min(s for s in sizes if s >= batch)
        assert padded <= max(2 * batch - 1, 8) if batch < 16 else padded <= 1.51 * batch + 8


def test_large_targets_record_short_prompts_only() -> None:
    assert max(chunk_sizes(8_000_000_000, 16384)) == 512
    assert chunk_sizes(135_000_000, 16384) == list(CHUNK_ROWS)
    assert chunk_sizes(135_000_000, 100) == [64]


@pytest.mark.parametrize(("width", "fine"), [(16, True), (64, True), (128, True), (8, False), (80, False), (96, False)])
def test_heads_that_cannot_be_recorded_are_refused(width: int, fine: bool) -> None:
    layer = LayerConfig(64, 128, num_heads=2, num_kv_heads=1, head_dim=width)
    cfg = DecoderConfig("llama", 32, 1, layer, RopeConfig(), 64, False, (None,))
    with nullcontext() if fine else pytest.raises(UserError, match=f"width {width} .*cuda_graphs=False"):
        check_recordable(cfg, None)


def graphs() -> ChunkGraphs:
    made = ChunkGraphs(lambda *inputs: None, [64, 256], None, 8, torch.zeros(1))  # type: ignore[arg-type, return-value]
    for rows in made.sizes:
        meta = torch.zeros(3, made.sequences(rows) + 1)
        made.recorded[rows] = SimpleNamespace(tokens_T=torch.zeros(rows), meta_3B=meta)  # type: ignore[assignment]
    return made


@many(200)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60)), min_size=1, max_size=20))
def test_rows_behind_the_prompts_belong_to_a_sequence_that_keeps_nothing(given_: list[tuple[int, int]]) -> None:
    starts, counts = [s for s, _ in given_], [c for _, c in given_]
    made = graphs()
    found = made.find(counts)
    rows = next((size for size in (64, 256) if sum(counts) <= size), None)
    if rows is None or len(counts) > rows // 16:
        assert found is None
        return
    assert found is made.recorded[rows]
    begins, live, first = ChunkGraphs.meta(found, starts, counts, counts)
    assert len(begins) == len(live) == len(first) == rows // 16 + 2
    assert first[0] == 0 and first[-1] == rows and first == sorted(first)
    owned = [first[i + 1] - first[i] for i in range(len(first) - 1)]
    assert owned[: len(counts)] == counts and begins[: len(counts)] == starts
    assert sum(owned[len(counts) : -1]) == 0 and owned[-1] == rows - sum(counts)
    assert not any(live[len(counts) :])


def test_a_prompt_longer_than_a_pass_looks_at_is_not_recorded() -> None:
    made = ChunkGraphs(lambda *inputs: None, [8192], None, 8, torch.zeros(1))  # type: ignore[arg-type, return-value]
    made.recorded[8192] = SimpleNamespace()  # type: ignore[assignment]
    assert made.find([1024, 1024]) is not None
    assert made.find([1025, 5]) is None and made.find([8193]) is None and made.find([1] * 200) is None


def test_places_without_a_prompt_leave_the_others_guesses_alone() -> None:
    """Five places for one to three prompts. What a graph would replay is run here instead, on the same buffers."""
    target, drafter = pairs.load_pair("eagle3-1")
    llm = LLM(pairs.target_folder(), pairs.drafter_folder("eagle3-1"), 4, tokenizer=False, max_num_seqs=3)
    runner, replays = llm.runner, []
    tables = runner.state.block_tables_SM.shape[1]
    like = target.embed_tokens.weight
    made = GuessGraphs(runner.one_by_one, [5], 4, like.shape[1], tables, runner.longest, like)
    inputs = (torch.zeros(5).long(), torch.zeros(5, like.shape[1]), torch.zeros(5).long(), torch.zeros(5, tables).int())
    out = torch.zeros(5, 4).long()

    def replay() -> None:
        replays.append(int((inputs[2] < runner.longest).sum()))
        out.copy_(runner.one_by_one(*inputs, 4))

    graph = SimpleNamespace(replay=replay)
    made.recorded[5] = GuessBuffers(inputs, runner.longest, out, graph)  # type: ignore[arg-type]
    runner.first_guesses = made
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = pairs.prompts(8)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        want, have = reference.generate(target, prompt, params, frozenset(), drafter, 4), output.outputs[0]
        assert have.token_ids == want.token_ids
        assert (have.num_drafts, have.accepted_per_position) == (want.num_drafts, want.accepted_per_position)
    assert made.find(6) is None and sum(replays) == 8 and len(set(replays)) > 1
