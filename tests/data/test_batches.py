"""Examples and batches: every token once, documents whole, the mask where the response is; rows that are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import EOS, make_chat
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.config import OPEN_BATCHES
from peagle.data.batches import (
    BatchCursor,
    PackedBatch,
    ResponseDataset,
    TrainingExample,
    batches,
    load_responses,
    pack,
)
from peagle.data.chat_format import ChatFormat
from peagle.errors import UserError


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return make_chat(tmp_path_factory.mktemp("chat") / "t")


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_examples(path: Path, conversations: list[tuple[list[int], list[list[int]]]]) -> ResponseDataset:
    rows = ({"id": i, "token_ids": ids, "spans": spans} for i, (ids, spans) in enumerate(conversations))
    return load_responses(write(path, *rows))


def test_the_worked_example(tmp_path: Path) -> None:
    found = as_examples(tmp_path / "r.jsonl", [([7, 8, 9], [[1, 3]]), ([4, 5], [[1, 2]])])
    assert found[0] == TrainingExample((7, 8, 9), ((1, 3),), "0#0")
    packing = next(p for seed in range(9) if (p := pack(found, 8, seed))[0].row_ids == ("0#0", "1#0"))
    assert len(packing) == 1
    batch = packing[0]
    assert batch.token_ids_N.tolist() == [7, 8, 9, 4, 5]
    assert batch.position_N.tolist() == [0, 1, 2, 0, 1]
    assert batch.start_N.tolist() == [0, 0, 0, 3, 3]
    assert batch.end_N.tolist() == [3, 3, 3, 5, 5]
    assert batch.loss_mask_N.tolist() == [False, True, True, False, True]
    assert batch.token_ids_N.dtype == torch.int64 and batch.loss_mask_N.dtype == torch.bool
    assert torch.equal(batch.to("cpu").end_N, batch.end_N) and len(batch) == 5


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[int], list[list[int]]]]:
    made = []
    for _ in range(draw(st.integers(1, 30))):
        edges = draw(st.lists(st.integers(1, 6), min_size=2, max_size=6))  # prompt, answer, prompt, ...
        ends = np.cumsum(edges).tolist()
        spans = [[ends[i], ends[i + 1]] for i in range(0, len(ends) - 1, 2)]
        made.append((draw(st.lists(st.integers(0, 999), min_size=ends[-1], max_size=ends[-1])), spans))
    return made


def documents(batch: PackedBatch) -> list[tuple[str, list[tuple[int, bool]]]]:
    """A batch taken apart by its start and end columns alone, which must agree everywhere."""
    found, at = [], 0
    for row_id in batch.row_ids:
        end = int(batch.end_N[at])
        assert batch.start_N[at:end].tolist() == [at] * (end - at)
        assert batch.end_N[at:end].tolist() == [end] * (end - at)
        assert batch.position_N[at:end].tolist() == list(range(end - at))
        found.append(
            (row_id, list(zip(batch.token_ids_N[at:end].tolist(), batch.loss_mask_N[at:end].tolist(), strict=True)))
        )
        at = end
    assert at == len(batch)
    return found


def cut(ids: list[int], spans: list[list[int]], most: int) -> list[tuple[int, bool]]:
    """Token by token: the front goes while it is prompt, then the end."""
    marked = [(token, any(s <= i < e for s, e in spans)) for i, token in enumerate(ids)]
    while len(marked) > most and not marked[0][1]:
        marked = marked[1:]
    return marked[:most]


@many(150)
@given(
    made=conversations(),
    budget=st.integers(1, 60),
    max_seq_len=st.none() | st.integers(1, 40),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 5),
)
def test_packing_against_an_obvious_oracle(
    tmp_path_factory: pytest.TempPathFactory,
    made: list[tuple[list[int], list[list[int]]]],
    budget: int,
    max_seq_len: int | None,
    seed: int,
    epoch: int,
) -> None:
    found = as_examples(tmp_path_factory.mktemp("pack") / "r.jsonl", made)
    most = min(budget, max_seq_len or budget)
    packing = pack(found, budget, seed, epoch, max_seq_len)
    packed = dict[str, list[tuple[int, bool]]]()
    for batch in packing:
        assert 0 < len(batch) <= budget
        for row_id, marked in documents(batch):
            assert row_id not in packed
            packed[row_id] = marked
    expected = {f"{i}#0": cut(ids, spans, most) for i, (ids, spans) in enumerate(made)}
    assert packed == expected
    assert all(any(is_response for _, is_response in marked) for marked in packed.values()), "a response was lost"
    again = pack(found, budget, seed, epoch, max_seq_len)
    assert [b.row_ids for b in again] == [b.row_ids for b in packing]
    if len(made) <= OPEN_BATCHES:  # none was closed early: no two of them would fit into one
        lengths = sorted(len(b) for b in packing)
        assert len(lengths) < 2 or lengths[0] + lengths[1] > budget


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> ResponseDataset:
    rng = np.random.default_rng(0)
    made = [([int(t) for t in rng.integers(0, 99, n)], [[2, int(n)]]) for n in rng.integers(3, 40, 100)]
    return as_examples(tmp_path_factory.mktemp("hundred") / "r.jsonl", made)


def test_epochs_and_seeds_differ_in_order(hundred: ResponseDataset) -> None:
    orders = {tuple(b.row_ids for b in pack(hundred, 128, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    packing = pack(hundred, 128)
    assert hundred.num_tokens / (128 * len(packing)) > 0.9
    places = []  # of the emptiest batch, which is made last
    for epoch in range(30):
        sizes = [len(b) for b in pack(hundred, 128, 0, epoch)]
        places.append(sizes.index(min(sizes)) / (len(sizes) - 1))
    assert 0.3 < np.mean(places) < 0.7


def in_epochs(epochs: int, steps: Iterable[tuple[PackedBatch, BatchCursor]]) -> list[tuple[PackedBatch, BatchCursor]]:
    """The steps that take batches from the first epochs only."""
    return list(takewhile(lambda step: step[1].epoch < epochs, steps))


def test_a_cursor_goes_on_exactly(hundred: ResponseDataset) -> None:
    whole = in_epochs(3, batches(hundred, 128, seed=4))
    assert {r for b, _ in whole[: len(pack(hundred, 128, 4))] for r in b.row_ids} == set(hundred.row_ids)
    for i, (_, cursor) in enumerate(whole):
        rest = [b.row_ids for b, _ in in_epochs(3, batches(hundred, 128, seed=4, start=cursor))]
        assert rest == [b.row_ids for b, _ in whole[i + 1 :]]
    endless = islice(batches(hundred, 128, seed=4, start=whole[5][1]), len(whole))
    assert [b.row_ids for b, _ in endless][: len(whole) - 6] == [b.row_ids for b, _ in whole[6:]]
    with pytest.raises(UserError, match="data changed"):
        next(batches(hundred, 128, start=BatchCursor(0, 10_000)))


@pytest.mark.parametrize("world", [2, 3, 7])
def test_processes_share_the_batches_of_one(hundred: ResponseDataset, world: int) -> None:
    alone = [b.row_ids for b, _ in in_epochs(2, batches(hundred, 128, seed=2))]
    ranks = [in_epochs(2, batches(hundred, 128, seed=2, rank=r, world_size=world)) for r in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    together = [b.row_ids for step in zip(*ranks, strict=True) for b, _ in step]
    assert together == alone[: len(together)] and len(alone) - len(together) < world
    assert all(len({c for _, c in step}) == 1 for step in zip(*ranks, strict=True)), "one cursor for all"
    later = in_epochs(2, batches(hundred, 128, seed=2, rank=1, world_size=world, start=ranks[0][0][1]))
    assert [b.row_ids for b, _ in later] == [b.row_ids for b, _ in ranks[1][1:]]


def test_held_out_prompts_are_on_one_side(tmp_path: Path) -> None:
    rows = [{"id": f"p{i // 3}", "sample": i % 3, "token_ids": [1, 2], "spans": [[1, 2]]} for i in range(30)]
    found = load_responses(write(tmp_path / "r.jsonl", *rows))
    rest, aside = found.split_validation(7, seed=1)
    assert len(aside) == 9 and len(rest) == 21
    names = [{e.row_id.split("#")[0] for e in part} for part in (rest, aside)]
    assert not names[0] & names[1] and len(names[1]) == 3
    assert {b for batch in pack(aside, 8) for b in batch.row_ids} == {e.row_id for e in aside}
    assert len(found.split_validation(0)[0]) == 30 and len(found.split_validation(99)[0]) == 3


# Reading and checking


def test_several_files_and_the_arrays_kept_beside_them(chat: ChatFormat, tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", {"id": "ü", "token_ids": [5, 6, 7], "spans": [[1, 2], [2, 3]]})
    write(
        tmp_path / "a.jsonl",
        {"id": "a", "token_ids": [1, 2], "spans": [[1, 2]]},
        {"id": "a2", "token_ids": [3, 4], "spans": [[1, 2]]},
    )
    for paths in (
        tmp_path,
        str(tmp_path / "*.jsonl"),
        [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "a.jsonl"],
    ):
        found = load_responses(paths)
        assert [e.row_id for e in found] == ["a#0", "a2#0", "ü#0"]
        assert found[2] == TrainingExample((5, 6, 7), ((1, 2), (2, 3)), "ü#0") and found.num_tokens == 7
        assert [b.loss_mask_N.sum().item() for b in pack(found.select(found.selected[2:]), 9)] == [2]
    kept = tmp_path / "a.jsonl.npz"
    stamp = os.stat(tmp_path / "a.jsonl").st_mtime_ns
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("[1, 2]", "[8, 2]", 1))
    os.utime(tmp_path / "a.jsonl", ns=(stamp, stamp))
    assert load_responses(tmp_path / "a.jsonl")[0].token_ids == (1, 2), "the kept arrays are used"
    assert load_responses(tmp_path / "a.jsonl", vocab_size=100)[0].token_ids == (8, 2), "for this question alone"
    kept.write_bytes(kept.read_bytes()[:300])
    assert load_responses(tmp_path / "a.jsonl")[0].token_ids == (8, 2), "damaged ones are not"
    write(tmp_path / "a.jsonl", {"id": "new", "token_ids": [1, 2], "spans": [[1, 2]]})
    assert [e.row_id for e in load_responses(tmp_path / "a.jsonl")] == ["new#0"]


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
IDS = [*b"hi\nyes", EOS]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"token_ids": IDS, "spans": []}, "no response token.*all 0"),
        ({"token_ids": IDS, "spans": [[0, 7]]}, "no prompt.*all 1"),
        ({"token_ids": IDS, "spans": [[3, 8]]}, r"span \[3, 8\] is not within 7 tokens"),
        ({"token_ids": IDS, "spans": [[3, 5], [4, 7]]}, r"span \[4, 7\] is not within 7 tokens"),
        ({"token_ids": IDS, "spans": [[3, 3]]}, r"span \[3, 3\]"),
        ({"token_ids": [*IDS[:-1], 160], "spans": [[3, 7]]}, r"token id 160 is outside the vocabulary \(0 to 159\)"),
        ({"token_ids": [-1, 5], "spans": [[1, 2]]}, "token id -1"),
        ({"token_ids": [1.5, 5], "spans": [[1, 2]]}, "token_ids must be a list"),
        ({"token_ids": [1, "x"], "spans": [[1, 2]]}, "token_ids must be a list"),
        ({"token_ids": [1, 2], "spans": [1, 2]}, "token_ids must be a list"),
        ({"token_ids": [1, 2]}, "token_ids must be a list"),
        ({"token_ids": [], "spans": []}, "no token"),
        ({"messages": MESSAGES[:1]}, "no response"),
        ({"messages": "hi"}, "neither token_ids nor messages"),
        ({"prompt": "hi"}, "neither token_ids nor messages"),
        (
            {"messages": [{"role": "user", "content": "ho"}, MESSAGES[1]], "token_ids": IDS, "spans": [[3, 7]]},
            "prompt does not round-trip: .*'hi.n'.*'ho.n'",
        ),
    ],
)
def test_a_bad_row_is_named_and_shown(chat: ChatFormat, tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    good = {"messages": MESSAGES, "token_ids": IDS, "spans": [[3, 7]]}
    with pytest.raises(UserError, match=expected) as caught:
        load_responses(write(tmp_path / "r.jsonl", good, row), chat, vocab_size=160)
    assert f"{tmp_path / 'r.jsonl'}:2:" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "torn.jsonl").write_text('{"id": "a", "tok')
    (tmp_path / "none").mkdir()
    for name, expected in (
        ("empty.jsonl", "no row"),
        ("torn.jsonl", "torn.jsonl:1: not a JSON object"),
        ("none", "no such response file"),
        ("absent*.jsonl", "no such response file"),
    ):
        with pytest.raises(UserError, match=expected):
            load_responses(tmp_path / name)
    with pytest.raises(UserError, match="no token_ids, and there is no tokenizer"):
        load_responses(write(tmp_path / "r.jsonl", {"messages": MESSAGES}))


def test_conversations_of_others(chat: ChatFormat, tmp_path: Path) -> None:
    """What the template adds for an answer is its span, up to the end of turn that the target generates."""
    two = [*MESSAGES, {"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]
    found = load_responses(write(tmp_path / "r.jsonl", {"messages": MESSAGES}, {"id": "two", "messages": two}), chat)
    assert found[0] == TrainingExample(tuple(IDS), ((3, 7),), "r.jsonl:1#0")
    assert found[1] == TrainingExample((*IDS, *b"more\nno", EOS), ((3, 7), (12, 15)), "two#0")


def _chat(tokenizer: Any, tmp_path: Path, template: str) -> ChatFormat:
    (tmp_path / "t.jinja").write_text(template)
    return ChatFormat(tokenizer, {EOS}, tmp_path / "t.jinja")


def test_a_template_that_marks_its_answers(chat: ChatFormat, tmp_path: Path) -> None:
    marked = _chat(
        chat.tokenizer,
        tmp_path,
        "{% for m in messages %}{% if m['role'] == 'assistant' %}[{% generation %}{{ m['content'] }}d"
        "{% endgeneration %}]{% else %}{{ m['content'] }}{% endif %}{% endfor %}",
    )
    found = load_responses(write(tmp_path / "r.jsonl", {"messages": [*MESSAGES, *MESSAGES]}), marked)
    assert bytes(found[0].token_ids) == b"hi[yesd]hi[yesd]"
    assert found[0].spans == ((3, 7), (11, 15))


def test_text_behind_the_end_of_turn_is_not_the_targets(chat: ChatFormat, tmp_path: Path) -> None:
    ends = _chat(
        chat.tokenizer,
        tmp_path,
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}d!{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}",
    )
    found = load_responses(write(tmp_path / "r.jsonl", {"messages": MESSAGES}), ends)
    assert bytes(found[0].token_ids) == b"u:hid!a:yesd!" and found[0].spans == ((8, 12),)


def test_a_template_that_does_not_round_trip_shows_where(chat: ChatFormat, tmp_path: Path) -> None:
    forgets = _chat(
        chat.tokenizer,
        tmp_path,
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}|"
        "{% else %}...|{% endif %}{% endfor %}",
    )
    row = {"messages": [*MESSAGES, {"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]}
    with pytest.raises(
        UserError, match=r"r.jsonl:1: the chat template does not round-trip.*'hi\|yes\|'.*'hi\|...\|more"
    ):
        load_responses(write(tmp_path / "r.jsonl", row), forgets)
