"""Prompts from files, folders and the hub: every form, and every bad row named by file and line."""

from __future__ import annotations

import gzip
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.data.prompts import Prompt, read_excluded_ids, read_prompts
from peagle.errors import UserError


def write(path: Path, *rows: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    text = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_every_form_of_a_row(tmp_path: Path) -> None:
    file = write(
        tmp_path / "some.jsonl",
        {"id": "one", "source": "mine", "prompt": "Hi"},
        {"id": 7, "turns": ["First?", "Second?"]},
        {
            "messages": [
                message("system", "Be brief."),
                message("user", "Q1"),
                message("assistant", "A1"),
                message("user", "Q2"),
            ]
        },
        {"messages": [message("user", [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}])]},
        {"conversations": [{"from": "human", "value": "Old words"}, {"from": "gpt", "value": "dropped"}]},
        {"turns": None, "prompt": "A field without a value is none"},
    )
    rows = read_prompts(file).rows
    assert rows[:2] == (Prompt("one", "mine", ("Hi",)), Prompt("7", "some", ("First?", "Second?")))
    assert [(r.system, r.turns) for r in rows[2:]] == [
        ("Be brief.", ("Q1", "Q2")),
        (None, ("in parts",)),
        (None, ("Old words",)),
        (None, ("A field without a value is none",)),
    ]
    assert len({r.id for r in rows}) == 6 and all(len(r.id) == 16 for r in rows[2:])


def test_ids_follow_from_the_content_and_equal_prompts_are_taken_once(tmp_path: Path) -> None:
    one = read_prompts(write(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y"}, {"id": "z", "turns": ["x"]}))
    two = read_prompts(write(tmp_path / "b.jsonl.gz", {"prompt": "y"}, {"prompt": "x"}))
    assert one.num_duplicates == 1 and {r.id for r in one.rows} == {r.id for r in two.rows}
    assert one.fingerprint != two.fingerprint  # another order: --limit would mean other rows
    assert one.fingerprint == read_prompts(write(tmp_path / "c.jsonl", {"prompt": "x"}, {"prompt": "y"})).fingerprint


def test_a_folder_whose_files_number_their_rows_alike(tmp_path: Path) -> None:
    write(tmp_path / "set" / "b.jsonl", {"id": 0, "prompt": "b"})
    write(tmp_path / "set" / "deep" / "c.jsonl.gz", {"id": 0, "prompt": "c"})
    write(tmp_path / "set" / "a.jsonl", {"id": 0, "prompt": "a"})
    write(tmp_path / "set" / "notes.txt", {"id": 0, "prompt": "no prompt"})
    rows = read_prompts(str(tmp_path / "set")).rows
    assert [(r.source, r.turns) for r in rows] == [("a", ("a",)), ("b", ("b",)), ("c", ("c",))]
    assert rows[0].id == "0" and len({r.id for r in rows}) == 3


BAD: list[tuple[Any, str, str]] = [
    (b'{"prompt": "half', "not valid JSON", "Unterminated"),
    (b'{"prompt": "\xff"}', "not valid JSON", "decode"),
    ([1, 2], "not a JSON object", "list"),
    ({"question": "?", "answer": "!"}, "no user turn", "question, answer"),
    ({"messages": [message("assistant", "nobody asked")]}, "no user turn", ""),
    ({"turns": []}, "no user turn", ""),
    ({"prompt": " \n"}, "empty text", "prompt"),
    ({"turns": ["fine", ""]}, "empty text", "turns[1]"),
    ({"prompt": 5}, "not a string", "int"),
    ({"turns": "one string"}, "not a list", "str"),
    ({"turns": ["ok", None]}, "not a string", "turns[1]"),
    ({"messages": ["hi"]}, "not a message", "messages[0]"),
    ({"messages": [message("user", "hi"), message("tool", "42")]}, "unknown role", "'tool'"),
    ({"messages": [message("user", "hi"), message("system", "late")]}, "system message in the middle", "messages[1]"),
    ({"messages": [message("user", [{"type": "image_url"}])]}, "not text", "parts"),
    (b'{"prompt": "\\ud800"}', "not text", "surrogate"),
    ({"id": ["x"], "prompt": "hi"}, "not a string", "id is list"),
]


def test_bad_rows_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    rows = [row for bad, _, _ in BAD for row in (bad, b"")]  # blank lines count as lines and as nothing else
    file = write(tmp_path / "p.jsonl", b'\xef\xbb\xbf{"prompt": "good, behind a byte order mark"}', *rows)
    found = read_prompts(file)
    assert [r.turns for r in found.rows] == [("good, behind a byte order mark",)]
    for i, (refused, (_, reason, detail)) in enumerate(zip(found.rejected, BAD, strict=True)):
        assert refused.where == f"{file}:{2 + 2 * i}"
        assert refused.reason == reason and detail in refused.detail, refused
    assert found.rejection_reasons["no user turn"] == 3 and sum(found.rejection_reasons.values()) == len(BAD)


def test_what_holds_no_prompt_at_all_is_an_error(tmp_path: Path) -> None:
    def complaint(name: str | Path) -> str:
        with pytest.raises(UserError) as caught:
            read_prompts(str(name))
        assert str(name) in str(caught.value) and "\n" not in str(caught.value)
        return str(caught.value)

    assert "no usable prompt" in complaint(write(tmp_path / "empty.jsonl"))
    assert f"{tmp_path / 'bad.jsonl'}:1: empty text" in complaint(write(tmp_path / "bad.jsonl", {"prompt": ""}, {}))
    assert "no such file" in complaint(tmp_path / "absent.jsonl")
    (tmp_path / "nothing").mkdir()
    assert "no usable prompt" in complaint(tmp_path / "nothing")
    whole = Path(write(tmp_path / "cut.jsonl.gz", *({"prompt": str(i) * 50} for i in range(3000)))).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert "cannot be read after line" in complaint(tmp_path / "cut.jsonl.gz")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert "no such file" in complaint(tmp_path / "loop.jsonl")


def test_a_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        read_prompts("org/name")
    calls = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        calls.append((name, split))
        if split == "absent":
            raise ValueError("Unknown split 'absent'.\nShould be one of ['train_sft'].")
        return [{"prompt": "from the hub", "messages": [message("user", "from the hub")]}, {"prompt": ""}]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    found = read_prompts("org/name", "train_sft")
    assert calls == [("org/name", "train_sft")] and found.rows[0].source == "org/name"
    assert found.rejected[0].where == "org/name[1]"
    with pytest.raises(UserError, match="train_sft"):
        read_prompts("org/name", "absent")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("user"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "a"]), inner),
    max_leaves=6,
)
rows_of_anything = st.dictionaries(
    st.sampled_from(["id", "source", "prompt", "turns", "messages", "conversations", "other"]), json_values
)


@many(200)
@given(st.lists(rows_of_anything | json_values, max_size=6))
def test_whatever_a_row_holds_it_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    file = write(tmp_path_factory.mktemp("any") / "p.jsonl", {"prompt": "a good one"}, *rows)
    found = read_prompts(file)
    assert len(found.rows) + len(found.rejected) + found.num_duplicates == 1 + len(rows)
    assert len({r.id for r in found.rows}) == len(found.rows)
    assert all(turn.strip() for r in found.rows for turn in r.turns)


def test_excluded_ids_remove_prompts_and_their_renamed_duplicates(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "one"}, {"id": "a", "prompt": "two"}, {"id": "b", "prompt": "three"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ids.txt").write_text("# validation set\na\n\nabsent\n")
    found = read_prompts(str(tmp_path / "p.jsonl"))
    kept = found.exclude(read_excluded_ids(tmp_path / "ids.txt"))
    assert [row.id for row in kept.rows] == ["b"] and kept.num_excluded == 2
    assert kept.fingerprint != found.fingerprint
    with pytest.raises(UserError, match="--exclude-ids"):
        found.exclude({"a", "b"})
