"""Which sizes are recorded, and what the rows of a pass over prompts belong to; replaying them needs a GPU."""

from contextlib import nullcontext
from dataclasses import replace

import engines
import pairs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.config import DecoderConfig, LayerConfig, RopeConfig, SamplingParams
from peagle.engine.cuda_graphs import (
    CHUNK_ROWS,
    DecodeGraph,
    DecodeGraphs,
    batch_sizes,
    chunk_sizes,
    near_lengths,
)
from peagle.engine.llm import LLM
from peagle.engine.loader import check_recordable, random_weights
from peagle.engine.prefill import PrefillInputs, PrefillShape, pack_prefill_inputs, split_last_chunks
from peagle.engine.request import PrefillChunk, Request
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.speculative import reference


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


@pytest.mark.parametrize(
    ("width", "window", "dtype", "want"),
    [
        (64, None, torch.bfloat16, (256, 512)),
        (64, 100, torch.bfloat16, ()),
        (64, None, torch.float32, ()),
        (128, None, torch.bfloat16, ()),
    ],
)
def test_small_targets_without_windows_have_rounds_for_short_requests(width, window, dtype, want) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    layer = LayerConfig(64, 128, num_heads=3, num_kv_heads=1, head_dim=width)
    cfg = DecoderConfig("llama", 32, 2, layer, RopeConfig(), 64, False, (None, window))
    assert near_lengths(random_weights(Decoder, cfg, dtype, torch.device("cpu")), None) == want


@many(120)
@given(
    st.integers(1, 5),
    st.sampled_from([0, 3, 7]),
    st.one_of(st.integers(1, 600), st.integers(235, 260), st.integers(490, 515)),
)
def test_a_round_of_short_requests_has_room_for_all_it_reads_and_makes(batch: int, k: int, length: int) -> None:
    graphs = DecodeGraphs.__new__(DecodeGraphs)  # what a GPU would be needed for is left out
    slots = torch.zeros(0)
    made = {most: DecodeGraph(slots, slots, None) for most in (256, 512, None)}  # type: ignore[arg-type]
    graphs.sizes, graphs.captured = [1, 2, 4], {(size, k): made[None] for size in (1, 2, 4)}
    graphs.short_context_graphs = {(1, k): {512: made[512], 256: made[256]}, (2, k): {512: made[512]}}
    found = graphs.find(batch, k, length)
    if batch > 4:
        assert found is None
        return
    last = length - 1 + max(2 * k - 1, k)  # of the newest token, the drafts behind it, and those made behind them
    lengths = {1: (256, 512), 2: (512,), 3: (), 4: ()}[batch]
    most = next(most for most, one in made.items() if one is found)
    assert most is None or (most in lengths and last < most), "it would be cut off"
    roomy = [n for n in lengths if last + 3 <= n]
    assert not roomy or (most is not None and most <= roomy[0]), "a shorter one would have done"


LONGEST = 70
MASK = 9


@st.composite
def chunks(draw: st.DrawFn) -> list[PrefillChunk]:
    made = []
    for slot in range(draw(st.integers(1, 8))):
        length, said = draw(st.integers(1, 50)), draw(st.integers(0, 12))
        params = SamplingParams(max_tokens=20)
        r = Request(slot, list(range(100, 100 + length)), params, 0, *[frozenset()] * 3, max_model_len=LONGEST)
        r.output_token_ids, r.slot = list(range(500, 500 + said)), slot
        begin = draw(st.integers(0, r.num_prefill_tokens - 1))
        made.append(
            PrefillChunk(
                r,
                begin,
                draw(st.sampled_from([r.num_prefill_tokens, draw(st.integers(begin + 1, r.num_prefill_tokens))])),
            )
        )
    return made


@many(200)
@given(chunks(), st.sampled_from([None, 0, 3]), st.integers(0, 40))
def test_all_of_a_steps_prompts_lie_in_one_array(given_: list[PrefillChunk], masks: int | None, spare: int) -> None:
    """Read back row by row. With room to spare, what is left over belongs to nobody."""
    room = PrefillShape.of(given_, masks)
    if spare:
        room = replace(
            room,
            rows=room.rows + spare,
            sequences=room.sequences + 2,
            ends=room.ends + 2,
            max_rows=room.max_rows + spare,
        )
    fresh, again = split_last_chunks(given_)
    ends = [c for c in given_ if c.is_last]
    order = [c for c in ends if not c.request.output_token_ids] + [c for c in ends if c.request.output_token_ids]
    assert fresh + again == [c.request for c in order] and not any(r.output_token_ids for r in fresh)
    p = PrefillInputs.cut(pack_prefill_inputs(given_, fresh + again, room, LONGEST, MASK), room)
    for b, c in enumerate(given_):
        text = c.request.prompt_token_ids + c.request.output_token_ids
        rows = range(p.first_B1[b], p.first_B1[b + 1])
        assert [(p.tokens_T[i], p.positions_T[i]) for i in rows] == [(text[x], x) for x in range(c.begin, c.end)]
        assert (p.slots_B[b], p.starts_B[b], p.live_B[b]) == (c.request.slot, c.begin, len(rows))
        if c.is_last:
            f = order.index(c)
            known = c.request.output_token_ids[-1] if c.request.output_token_ids else -1
            assert (p.slots_F[f], p.ends_F[f], p.known_F[f]) == (c.request.slot, c.end, known)
            assert p.last_F[f] == rows[-1]
        if masks is not None:
            # a row at x reads the state of the target's row at x and the token at x + 1, and guesses that at x + 2
            own = range(p.draft_first_B1[b], p.draft_first_B1[b + 1])
            want = [(text[x + 1] if x + 1 < c.end else None, x, rows[x - c.begin]) for x in range(c.begin, c.end)]
            if c.is_last:
                want[-1] = (-1 - f, *want[-1][1:])
                want += [(MASK, min(x, LONGEST - 1), room.rows) for x in range(c.end, c.end + masks)]
                assert p.guess_F[f] == own[len(rows) - 1]
            else:
                want[-1] = (text[c.end], *want[-1][1:])
            have = [(p.draft_tokens_R[i], p.draft_positions_R[i], p.draft_source_R[i]) for i in own]
            assert have == want
            assert p.draft_live_B[b] == min(len(own), LONGEST - c.begin)
    used = len(given_)
    for first, rows_ in ((p.first_B1, room.rows), (p.draft_first_B1, len(p.draft_tokens_R))):
        if len(first):
            assert first[0] == 0 and first[-1] == rows_ and (first[used:-1] == first[used]).all()
    assert (p.slots_B[used:] == -1).all() and not p.live_B[used:].any() and not p.draft_live_B[used:].any()
    assert (p.slots_F[len(order) :] == -1).all() and (p.ends_F[len(order) :] == LONGEST).all()


def test_a_pass_is_found_that_has_room_for_all() -> None:
    llm = LLM(pairs.target_folder(), pairs.drafter_folder("p-eagle-1"), 4, tokenizer=False, max_num_seqs=3)
    engines.rehearse(llm, [64, 128, 1024, 8192])
    graphs = llm.model_runner.prefill_graphs
    assert graphs is not None

    def found(rows: int, sequences: int, ends: int, longest: int) -> int | None:
        one = graphs.find(PrefillShape(rows, sequences, ends, longest, 0, 3))
        return one.room.rows if one is not None else None

    assert [found(rows, 1, 1, rows) for rows in (1, 64, 65, 128, 129, 1024)] == [64, 64, 128, 128, 1024, 1024]
    assert found(1025, 1, 1, 1025) is None and found(1025, 2, 1, 1024) == 8192 and found(8193, 9, 1, 1000) is None
    assert found(60, 5, 1, 20) == 128 and found(60, 5, 5, 20) is None  # too many: 128 rows have room for 4 ends as well
    assert found(900, 33, 33, 30) is None and found(900, 32, 32, 30) == 1024


@pytest.mark.parametrize("name", ["p-eagle-1", "eagle3-1"])
def test_places_without_a_prompt_leave_the_others_drafts_alone(name: str) -> None:
    """PrefillShape for four ends, of one to three prompts at a time."""
    target, drafter = pairs.load_pair(name)
    options = {"tokenizer": False, "max_num_seqs": 3, "device": "cpu", "dtype": "float32"}
    llm = LLM(pairs.target_folder(), pairs.drafter_folder(name), 4, **options)
    replays = engines.rehearse(llm, [64, 256])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = pairs.prompts(8)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        want, have = reference.generate(target, prompt, params, frozenset(), drafter, 4), output.outputs[0]
        assert have.token_ids == want.token_ids
        assert (have.num_drafts, have.num_accepted_tokens_per_pos) == (
            want.num_drafts,
            want.num_accepted_tokens_per_pos,
        )
    assert {room.rows for room in replays} == {64, 256}
