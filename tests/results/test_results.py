"""The document of results: it reads back as it was written, says what is wrong with one, and docs tell every field."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support import many

from peagle.errors import UserError
from peagle.results import schema as results
from peagle.results.schema import (
    ROWS,
    SCHEMA,
    AcceptanceRow,
    BenchRepeat,
    BenchRow,
    Percentiles,
    PlanRow,
    Results,
    Stamp,
    TuneRow,
    from_json,
    mean_ci95,
    read_results,
    to_json,
    write_results,
)

DOCS = Path(__file__).parents[2] / "docs" / "results.md"
STAMP = Stamp(
    "peagle eval", None, {"peagle": "1"}, {"cores": 2, "memory_gib": 7.5, "cpu": "x"}, "2026-01-01T00:00:00+00:00", 1.5
)


def acceptance(**changes: Any) -> AcceptanceRow:
    values: dict[str, Any] = {"drafter": "d", "method": "p-eagle", "engine": "embedded", "dataset": "mt_bench"}
    values |= {"category": None, "context": None, "temperature": 0.0, "k": 3, "loops": "all", "answers": 2}
    values |= {"tokens": 40, "rounds": 20, "accepted": [15, 6, 0], "ci95": (1.5, 2.5)}
    return AcceptanceRow(**{**values, **changes})


def bench(**changes: Any) -> BenchRow:
    spread = Percentiles(1.0, 1.0, 2.0, 3.0)
    repeats = [BenchRepeat(s, 8, {"timeout": 1}, 100, 400, spread, spread, None, spread, 2.5) for s in (2.0, 4.0, 5.0)]
    values: dict[str, Any] = {"name": "n", "engine": "embedded", "drafter": None, "method": "none", "k": None}
    values |= {"load": "closed", "concurrency": 8, "rate": None, "repeats": repeats, "prompts": "abc"}
    return BenchRow(**{**values, **changes})


EXAMPLES: dict[str, list[Any]] = {
    "eval": [
        acceptance(),
        acceptance(context=(0, 512), category="code", ci95=None),
        acceptance(rounds=0, accepted=[0] * 3),
    ],
    "bench": [bench(), bench(load="open", rate=2.5, concurrency=None, k="auto"), bench(k=7)],
    "tune": [TuneRow(1, 3, 2.5, 900.0, True)],
    "plan": [PlanRow(64, 7, "p-eagle", 12.0, 1e4, 2, None, False)],
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_document_reads_back_as_it_was_written(kind: Any, tmp_path: Path) -> None:
    document = Results(kind, STAMP, {"k": [1, 3], "nested": {"a": None}}, EXAMPLES[kind], False, ["careful"])
    path = tmp_path / "made" / "r.json"
    write_results(path, document)
    assert read_results(path) == document
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]
    plain = json.loads(path.read_text())
    assert plain["schema"] == SCHEMA and plain["kind"] == kind


def test_derived_numbers_are_written_for_everybody_and_not_believed() -> None:
    plain = to_json(Results("eval", STAMP, {}, [acceptance()]))
    row = plain["rows"][0]
    assert row["acceptance_length"] == 1 + 21 / 20
    assert row["unconditional"] == [0.75, 0.3, 0.0]
    assert row["conditional"] == [0.75, 0.4, 0.0]
    row["acceptance_length"] = 9.0
    assert from_json(plain).rows[0].acceptance_length == 1 + 21 / 20
    nothing = acceptance(rounds=0, accepted=[0, 0, 0])
    assert nothing.acceptance_length is None and nothing.conditional == [None] * 3


def test_intervals_are_students_and_percentiles_numpys() -> None:
    rng = random.Random(0)
    for count in (2, 3, 4, 10, 60):
        values = [rng.gauss(100, 15) for _ in range(count)]
        want = stats.t.interval(0.95, count - 1, np.mean(values), stats.sem(values))
        assert mean_ci95(values) == pytest.approx(want)
        spread = Percentiles.of(values)
        assert spread is not None
        assert [spread.p50, spread.p95, spread.p99] == pytest.approx(np.percentile(values, (50, 95, 99)).tolist())
    assert mean_ci95([3.0]) is None and Percentiles.of([]) is None
    rates = [400 / s for s in (2.0, 4.0, 5.0)]
    assert bench().output_tokens_per_second == pytest.approx(sum(rates) / 3)
    assert bench().ci95 == pytest.approx(stats.t.interval(0.95, 2, np.mean(rates), stats.sem(rates)))


def changed(kind: str, *path: Any, to: Any) -> dict[str, Any]:
    plain = json.loads(json.dumps(to_json(Results(kind, STAMP, {}, EXAMPLES[kind]))))  # type: ignore[arg-type]
    at = plain
    for step in path[:-1]:
        at = at[step]
    if to is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return plain


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "no document of results"),
        ({"kind": "eval"}, "no field 'schema'"),
        (changed("eval", "schema", to=SCHEMA + 1), f"schema: is {SCHEMA + 1}, and this peagle knows up to {SCHEMA}"),
        (changed("eval", "schema", to="1"), 'schema: is "1", must be a whole number'),
        (changed("eval", "kind", to="sing"), 'kind: is "sing", must be eval or bench or tune or plan'),
        (changed("eval", "kind", to="tune"), "rows[0]."),
        (changed("eval", "rows", to=KeyError), "rows: is missing, must be a list"),
        (changed("eval", "rows", 1, "k", to="3"), 'rows[1].k: is "3", must be a whole number'),
        (changed("eval", "rows", 0, "k", to=True), "rows[0].k: is true, must be a whole number"),
        (changed("eval", "rows", 0, "k", to=4), "rows[0].accepted: is [15, 6, 0], must be one count for each of the 4"),
        (
            changed("eval", "rows", 0, "accepted", 1, to=16),
            "rows[0].accepted: is [15, 16, 0], must be counts that never",
        ),
        (changed("eval", "rows", 0, "accepted", 1, to=1.5), "rows[0].accepted[1]: is 1.5, must be a whole number"),
        (changed("eval", "rows", 0, "context", to=[1]), "rows[0].context: is [1], must be a list of 2 or null"),
        (changed("eval", "rows", 0, "loops", to="some"), 'rows[0].loops: is "some", must be all or excluded'),
        (changed("eval", "rows", 0, "method", to=KeyError), "rows[0].method: is missing, must be there"),
        (changed("eval", "rows", 0, "speed", to=1), "rows[0].speed: is 1, must be left out"),
        (changed("eval", "stamp", "machine", "cpu", to=[]), "stamp.machine.cpu: is []"),
        (changed("bench", "rows", 0, "repeats", 2, "ttft_ms", "p50", to="x"), 'rows[0].repeats[2].ttft_ms.p50: is "x"'),
        (changed("bench", "rows", 0, "repeats", to=[]), "rows[0].repeats: is [], must be one at least"),
        (changed("bench", "rows", 0, "k", to="most"), 'rows[0].k: is "most"'),
        (changed("bench", "rows", 0, "concurrency", to=None), "rows[0].concurrency: is missing, must be given for"),
    ],
)
def test_what_is_wrong_is_named(document: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UserError) as caught:
        read_results(path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"schema": 1, "kind": "tune", "rows": [NaN]}', "holds NaN"),
        (None, "cannot be read"),
    ],
)
def test_files_that_hold_no_document(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_results(path)


def test_nothing_is_written_that_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    good = Results("tune", STAMP, {}, EXAMPLES["tune"])
    write_results(path, good)
    with pytest.raises(ValueError):
        write_results(path, Results("tune", STAMP, {}, [TuneRow(1, 3, math.nan, 1.0, True)]))
    assert read_results(path) == good


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@many(300)
@given(st.data())
def test_any_change_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    """Whatever somebody puts in some place of a document, it is a user's error or a document that reads back."""
    kind = data.draw(st.sampled_from(sorted(ROWS)))
    plain = json.loads(json.dumps(to_json(Results(kind, STAMP, {"a": 1}, EXAMPLES[kind]))))  # type: ignore[arg-type]
    at: Any = plain
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        key = data.draw(st.sampled_from(list(keys)))
        if not (isinstance(at[key], dict | list) and at[key]) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(JSON)
    try:
        found = from_json(plain)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert from_json(json.loads(json.dumps(to_json(found)))) == found


def test_a_stamp_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/peagle", "eval", "a b", "-k", "3"])
    monkeypatch.setenv("PEAGLE_COMMIT", "abc")
    stamp = Stamp.now()
    assert stamp.command == "peagle eval 'a b' -k 3" and stamp.commit == "abc"
    assert {"peagle", "python", "torch", "transformers"} <= stamp.versions.keys()
    assert stamp.machine["cores"] and stamp.machine["cpu"]
    more = Stamp.now(packages=("yaml", "nobody_has_this")).versions  # PyYAML, where it is installed
    assert more["yaml"] == metadata.version("PyYAML") and "nobody_has_this" not in more
    assert 5.0 <= stamp.done(before=5.0).seconds < 60.0
    assert from_json(to_json(Results("tune", stamp, {}, []))).stamp == stamp


def test_docs_tell_every_field_and_no_other() -> None:
    """A heading for every dataclass, a line `- name` for every field and derived number of it."""
    sections = re.split(r"^## ", DOCS.read_text(), flags=re.M)[1:]
    told = {s.split()[0]: set(re.findall(r"^- `(\w+)`", s, flags=re.M)) for s in sections if re.match(r"[A-Z]\w+\n", s)}
    known = {
        name: {f.name for f in fields(kind)} | set(getattr(kind, "derived", ()))
        for name, kind in vars(results).items()
        if isinstance(kind, type) and is_dataclass(kind)
    }
    known["Results"].add("schema")
    assert told == known
