"""Packed prefill inputs, read back row by row, and prefill in the fixed shapes of captured graphs."""

from __future__ import annotations

from dataclasses import replace

import engines
import numpy as np
import pairs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.config import SamplingParams
from peagle.engine.llm import LLM
from peagle.engine.prefill import PrefillInputs, PrefillShape, pack_prefill_inputs
from peagle.engine.request import PrefillChunk, Request
from peagle.speculative import reference

MAX_MODEL_LEN = 70
MASK = 9


def make_request(slot: int, num_prompt_tokens: int, num_output_tokens: int) -> Request:
    prompt, params = list(range(100, 100 + num_prompt_tokens)), SamplingParams(max_tokens=20)
    request = Request(slot, prompt, params, 0, frozenset(), MAX_MODEL_LEN)
    request.output_token_ids, request.slot = list(range(500, 500 + num_output_tokens)), slot
    return request


@st.composite
def chunk_lists(draw: st.DrawFn) -> list[PrefillChunk]:
    chunks = []
    for slot in range(draw(st.integers(1, 8))):
        request = make_request(slot, draw(st.integers(1, 50)), draw(st.integers(0, 12)))
        num_tokens = request.num_prefill_tokens
        begin = draw(st.integers(0, num_tokens - 1))
        end = draw(st.sampled_from([num_tokens, draw(st.integers(begin + 1, num_tokens))]))
        chunks.append(PrefillChunk(request, begin, end))
    return chunks


def test_worked_example() -> None:
    """The example in the docstring of `pack_prefill_inputs`."""
    chunk = PrefillChunk(make_request(0, 3, 0), 0, 3)
    shape = PrefillShape.from_chunks([chunk], 2)
    p = PrefillInputs.unpack(pack_prefill_inputs([chunk], [chunk.request], shape, MAX_MODEL_LEN, MASK), shape)
    assert p.token_ids_T.tolist() == [100, 101, 102] and p.positions_T.tolist() == [0, 1, 2]
    assert p.draft_token_ids_R.tolist() == [101, 102, -1, MASK, MASK]
    assert p.draft_positions_R.tolist() == [0, 1, 2, 3, 4]
    assert p.draft_source_rows_R.tolist() == [0, 1, 2, 3, 3] and p.first_draft_rows_F.tolist() == [2]


@many(200)
@given(chunk_lists(), st.sampled_from([None, 0, 3]), st.integers(0, 40))
def test_packed_inputs(chunks: list[PrefillChunk], num_mask_rows: int | None, num_spare_rows: int) -> None:
    """With spare rows, as in a captured graph, the unused rows and ends belong to the padding slot."""
    shape = PrefillShape.from_chunks(chunks, num_mask_rows)
    if num_spare_rows:
        shape = replace(
            shape,
            num_rows=shape.num_rows + num_spare_rows,
            num_sequences=shape.num_sequences + 2,
            num_ends=shape.num_ends + 2,
            max_query_len=shape.max_query_len + num_spare_rows,
        )
    ends = [c for c in chunks if c.is_last]
    order = [c for c in ends if not c.request.output_token_ids] + [c for c in ends if c.request.output_token_ids]
    ended = [c.request for c in order]
    p = PrefillInputs.unpack(pack_prefill_inputs(chunks, ended, shape, MAX_MODEL_LEN, MASK), shape)
    for b, c in enumerate(chunks):
        token_ids = c.request.all_token_ids
        rows = range(p.query_start_loc_B1[b], p.query_start_loc_B1[b + 1])
        assert [(p.token_ids_T[i], p.positions_T[i]) for i in rows] == [
            (token_ids[x], x) for x in range(c.begin, c.end)
        ]
        assert (p.slots_B[b], p.num_computed_tokens_B[b], p.query_lens_B[b]) == (c.request.slot, c.begin, len(rows))
        if c.is_last:
            f = order.index(c)
            known = c.request.output_token_ids[-1] if c.request.output_token_ids else -1
            assert (p.end_slots_F[f], p.num_tokens_F[f], p.known_token_ids_F[f]) == (c.request.slot, c.end, known)
            assert p.last_rows_F[f] == rows[-1]
        if num_mask_rows is not None:
            # The row at x holds the target's hidden state at x and the token at x + 1, and predicts the token at x + 2.
            draft_rows = range(p.draft_query_start_loc_B1[b], p.draft_query_start_loc_B1[b + 1])
            want = [(token_ids[x + 1] if x + 1 < c.end else None, x, rows[x - c.begin]) for x in range(c.begin, c.end)]
            if c.is_last:
                want[-1] = (-1 - f, *want[-1][1:])
                masks = range(c.end, c.end + num_mask_rows)
                want += [(MASK, min(x, MAX_MODEL_LEN - 1), shape.num_rows) for x in masks]
                assert p.first_draft_rows_F[f] == draft_rows[len(rows) - 1]
            else:
                want[-1] = (token_ids[c.end], *want[-1][1:])
            have = [(p.draft_token_ids_R[i], p.draft_positions_R[i], p.draft_source_rows_R[i]) for i in draft_rows]
            assert have == want
            assert p.draft_query_lens_B[b] == min(len(draft_rows), MAX_MODEL_LEN - c.begin)
    used = len(chunks)
    for starts, num_rows in (
        (p.query_start_loc_B1, shape.num_rows),
        (p.draft_query_start_loc_B1, len(p.draft_token_ids_R)),
    ):
        if len(starts):
            assert starts[0] == 0 and starts[-1] == num_rows and (starts[used:-1] == starts[used]).all()
    assert (p.slots_B[used:] == -1).all() and not p.query_lens_B[used:].any() and not p.draft_query_lens_B[used:].any()
    assert (p.end_slots_F[len(order) :] == -1).all()
    assert np.array_equal(p.num_tokens_F[len(order) :], np.full(shape.num_ends - len(order), MAX_MODEL_LEN))


def test_smallest_fitting_graph_is_found() -> None:
    llm = LLM(pairs.target_folder(), pairs.drafter_folder("p-eagle-1"), 4, tokenizer=False, max_num_seqs=3)
    engines.emulate_prefill_graphs(llm, [64, 128, 1024, 8192])

    def found(num_rows: int, num_sequences: int, num_ends: int, max_query_len: int) -> int | None:
        shape = PrefillShape(num_rows, num_sequences, num_ends, max_query_len, 0, 3)
        graph = llm.model_runner.prefill.find_graph(shape)
        return graph.shape.num_rows if graph is not None else None

    assert [found(rows, 1, 1, rows) for rows in (1, 64, 65, 128, 129, 1024)] == [64, 64, 128, 128, 1024, 1024]
    assert found(1025, 1, 1, 1025) is None and found(1025, 2, 1, 1024) == 8192 and found(8193, 9, 1, 1000) is None
    assert found(60, 5, 5, 20) == 128 and found(60, 5, 9, 20) is None  # 64 rows hold 4 sequences, 128 rows 8 ends
    assert found(900, 65, 65, 30) is None and found(900, 64, 64, 30) == 1024


def test_mixed_graph_with_most_draft_tokens_is_found() -> None:
    llm = LLM(pairs.target_folder(), pairs.drafter_folder("p-eagle-1"), "auto", tokenizer=False, max_num_seqs=3)
    engines.emulate_prefill_graphs(llm, [64, 128])
    find = llm.model_runner.prefill.find_mixed_graph
    short, long = (PrefillChunk(make_request(0, n, 0), 0, n) for n in (20, 90))

    def found(num_requests: int, k: int, *chunks: PrefillChunk) -> tuple[int, int] | None:
        graph = find(num_requests, k, chunks)
        return (graph.k, graph.prefill.shape.num_rows) if graph is not None else None

    captured = llm.model_runner.prefill.mixed_graphs[3]
    llm.model_runner.prefill.mixed_graphs[3] = [g for g in captured if g.k in (1, 3)]
    assert [found(2, k, short) for k in (1, 2, 3, 5)] == [(1, 64), (1, 64), (3, 64), (3, 64)]
    assert found(3, 3, long) == (3, 128) and found(3, 3, long, long) is None
    assert found(4, 3, short) is None, "too many requests"
    assert found(3, 7, short) is None and found(3, 0, short) is None, "half as many draft tokens, or more"
    chunks = [PrefillChunk(make_request(i, 10, 0), 0, 10) for i in range(6)]
    assert found(3, 3, *chunks) is None, "only the pass of 128 rows holds six sequences, and has 68 unused rows"


@pytest.mark.parametrize("name", ["p-eagle-1", "eagle3-1"])
def test_unused_ends_do_not_change_draft_tokens(name: str) -> None:
    """The graphs hold four ends; one to three prompts are prefilled at a time."""
    target, drafter = pairs.load_pair(name)
    options = {"tokenizer": False, "max_num_seqs": 3, "device": "cpu", "dtype": "float32"}
    llm = LLM(pairs.target_folder(), pairs.drafter_folder(name), 4, **options)
    replays = engines.emulate_prefill_graphs(llm, [64, 256])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = pairs.prompts(8)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        want, have = reference.generate(target, prompt, params, frozenset(), drafter, 4), output.outputs[0]
        assert have.token_ids == want.token_ids
        assert have.num_drafts == want.num_drafts
        assert have.num_accepted_tokens_per_pos == want.num_accepted_tokens_per_pos
    assert {shape.num_rows for shape in replays} == {64, 256}
