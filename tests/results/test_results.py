"""Result files: round trip, error messages, documentation of every field."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime, timedelta
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
from peagle.results import schema
from peagle.results.files import from_json, read_results, to_json, write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import (
    ROW_CLASSES,
    SCHEMA_VERSION,
    AcceptanceRow,
    BenchRepeat,
    BenchRow,
    Percentiles,
    PlanRow,
    Results,
    TuneRow,
    mean_ci95,
)

DOCS = Path(__file__).parents[2] / "docs" / "results.md"
PROVENANCE = Provenance(
    "peagle eval", None, {"peagle": "1"}, {"cores": 2, "memory_gib": 7.5, "cpu": "x"}, "2026-01-01T00:00:00+00:00", 1.5
)

K, PER_POS = "num_speculative_tokens", "num_accepted_tokens_per_pos"


def acceptance(**changes: Any) -> AcceptanceRow:
    values: dict[str, Any] = {"drafter": "d", "method": "p-eagle", "engine": "embedded", "dataset": "mt_bench"}
    values |= {"category": None, "context_range": None, "temperature": 0.0, "num_speculative_tokens": 3}
    values |= {"looping_responses": "included", "num_responses": 2, "acceptance_length_ci95": (1.5, 2.5)}
    values |= {"num_output_tokens": 40, "num_drafts": 20, "num_accepted_tokens_per_pos": [15, 6, 0]}
    return AcceptanceRow(**{**values, **changes})


def bench(**changes: Any) -> BenchRow:
    spread = Percentiles(1.0, 1.0, 2.0, 3.0)
    repeats = [BenchRepeat(s, 8, {"timeout": 1}, 100, 400, spread, spread, None, spread, 2.5) for s in (2.0, 4.0, 5.0)]
    values: dict[str, Any] = {"label": "n", "engine": "embedded", "drafter": None, "method": "none"}
    values |= {"num_speculative_tokens": None, "concurrency": 8, "request_rate": None}
    values |= {"repeats": repeats, "workload_sha256": "abc"}
    return BenchRow(**{**values, **changes})


EXAMPLES: dict[str, list[Any]] = {
    "eval": [
        acceptance(),
        acceptance(context_range=(0, 512), category="code", acceptance_length_ci95=None),
        acceptance(num_drafts=0, num_accepted_tokens_per_pos=[0] * 3),
    ],
    "bench": [
        bench(),
        bench(request_rate=2.5, concurrency=None, num_speculative_tokens="auto"),
        bench(num_speculative_tokens=7),
    ],
    "tune": [TuneRow(1, 3, 2.5, 900.0, True)],
    "plan": [PlanRow(64, 7, "p-eagle", 12.0, 1e4, 2, None, False)],
}


@pytest.mark.parametrize("kind", ROW_CLASSES)
def test_round_trip(kind: Any, tmp_path: Path) -> None:
    document = Results(kind, PROVENANCE, {"k": [1, 3], "nested": {"a": None}}, EXAMPLES[kind], False, ["a warning"])
    path = tmp_path / "made" / "r.json"
    write_results(path, document)
    assert read_results(path) == document
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]
    plain = json.loads(path.read_text())
    assert plain["schema_version"] == SCHEMA_VERSION and plain["kind"] == kind


def test_derived_fields_are_written_and_ignored_on_reading() -> None:
    plain = to_json(Results("eval", PROVENANCE, {}, [acceptance()]))
    row = plain["rows"][0]
    assert row["acceptance_length"] == 1 + 21 / 20
    assert row["per_position_acceptance_rates"] == [0.75, 0.3, 0.0]
    assert row["per_position_conditional_rates"] == [0.75, 0.4, 0.0]
    row["acceptance_length"] = 9.0
    assert from_json(plain).rows[0].acceptance_length == 1 + 21 / 20
    nothing = acceptance(num_drafts=0, num_accepted_tokens_per_pos=[0, 0, 0])
    assert nothing.acceptance_length is None and nothing.per_position_conditional_rates == [None] * 3


def test_intervals_and_percentiles_match_scipy_and_numpy() -> None:
    rng = random.Random(0)
    for count in (2, 3, 4, 10, 60):
        values = [rng.gauss(100, 15) for _ in range(count)]
        want = stats.t.interval(0.95, count - 1, np.mean(values), stats.sem(values))
        assert mean_ci95(values) == pytest.approx(want)
        spread = Percentiles.of(values)
        assert spread is not None
        assert [spread.median, spread.p95, spread.p99] == pytest.approx(np.percentile(values, (50, 95, 99)).tolist())
    assert mean_ci95([3.0]) is None and Percentiles.of([]) is None
    rates = [400 / s for s in (2.0, 4.0, 5.0)]
    assert bench().output_throughput == pytest.approx(sum(rates) / 3)
    assert bench().output_throughput_ci95 == pytest.approx(stats.t.interval(0.95, 2, np.mean(rates), stats.sem(rates)))


def changed(kind: str, *path: Any, to: Any) -> dict[str, Any]:
    plain = json.loads(json.dumps(to_json(Results(kind, PROVENANCE, {}, EXAMPLES[kind]))))  # type: ignore[arg-type]
    at = plain
    for step in path[:-1]:
        at = at[step]
    if to is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return plain


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([], "is not a result file"),
        ({"kind": "eval"}, "no field 'schema_version'"),
        (changed("eval", "schema_version", to=SCHEMA_VERSION + 1), f"schema_version: is {SCHEMA_VERSION + 1}"),
        (changed("eval", "schema_version", to="1"), 'schema_version: is "1"'),
        (changed("eval", "kind", to="sing"), 'kind: is "sing", must be eval or bench or tune or plan'),
        (changed("eval", "kind", to="tune"), "rows[0]."),
        (changed("eval", "rows", to=KeyError), "rows: is missing"),
        (changed("eval", "rows", 1, K, to="3"), f'rows[1].{K}: is "3"'),
        (changed("eval", "rows", 0, K, to=True), f"rows[0].{K}: is true"),
        (changed("eval", "rows", 0, K, to=4), f"rows[0].{PER_POS}: must be one count for each of 4"),
        (changed("eval", "rows", 0, PER_POS, 1, to=16), f"rows[0].{PER_POS}: must be non-increasing"),
        (changed("eval", "rows", 0, PER_POS, 1, to=1.5), f"rows[0].{PER_POS}[1]: is 1.5, must be of type int"),
        (changed("eval", "rows", 0, "context_range", to=[1]), "rows[0].context_range: is [1], must be a list of 2"),
        (changed("eval", "rows", 0, "looping_responses", to="some"), 'rows[0].looping_responses: is "some"'),
        (changed("eval", "rows", 0, "method", to=KeyError), "rows[0].method: is missing"),
        (changed("eval", "rows", 0, "speed", to=1), "rows[0].speed: AcceptanceRow has no such field"),
        (changed("eval", "provenance", "machine", "cpu", to=[]), "provenance.machine.cpu: is []"),
        (changed("bench", "rows", 0, "repeats", 2, "ttft_ms", "p95", to="x"), 'rows[0].repeats[2].ttft_ms.p95: is "x"'),
        (changed("bench", "rows", 0, "repeats", to=[]), "rows[0].repeats: must be a list of at least one"),
        (changed("bench", "rows", 0, K, to="most"), f'rows[0].{K}: is "most"'),
        (changed("bench", "rows", 0, "concurrency", to=None), "rows[0].concurrency: must be set"),
        (changed("bench", "rows", 0, "request_rate", to=2.0), "rows[0].concurrency: must be set if"),
    ],
)
def test_errors_name_the_field_and_value(document: Any, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UserError) as caught:
        read_results(path)
    assert expected in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "cannot be read as JSON .*line 1"),
        (b"\xff\xfe{}", "cannot be read as JSON .*utf-8"),
        (b'{"schema_version": 2, "kind": "tune", "rows": [NaN]}', "NaN"),
        (None, "cannot be read"),
    ],
)
def test_files_without_a_document_are_rejected(content: bytes | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=expected):
        read_results(path)


def test_nan_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    valid = Results("tune", PROVENANCE, {}, EXAMPLES["tune"])
    write_results(path, valid)
    with pytest.raises(ValueError):
        write_results(path, Results("tune", PROVENANCE, {}, [TuneRow(1, 3, math.nan, 1.0, True)]))
    assert read_results(path) == valid


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@many(300)
@given(st.data())
def test_any_change_is_read_or_rejected_in_one_line(data: st.DataObject) -> None:
    """A document with one value replaced by any JSON either raises UserError or reads back equal."""
    kind = data.draw(st.sampled_from(sorted(ROW_CLASSES)))
    document = json.loads(json.dumps(to_json(Results(kind, PROVENANCE, {"a": 1}, EXAMPLES[kind]))))  # type: ignore[arg-type]
    node: Any = document
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(list(keys)))
        if not (isinstance(node[key], dict | list) and node[key]) or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(JSON_VALUES)
    try:
        results = from_json(document)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert from_json(json.loads(json.dumps(to_json(results)))) == results


def test_provenance_describes_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/peagle", "eval", "a b", "-k", "3"])
    monkeypatch.setenv("PEAGLE_COMMIT", "abc")
    provenance = Provenance.collect()
    assert provenance.command == "peagle eval 'a b' -k 3" and provenance.commit == "abc"
    assert {"peagle", "python", "torch", "transformers"} <= provenance.versions.keys()
    assert provenance.machine["cores"] and provenance.machine["cpu"]
    versions = Provenance.collect(packages=("yaml", "not_installed")).versions
    assert versions["yaml"] == metadata.version("PyYAML") and "not_installed" not in versions
    started = (datetime.now(UTC) - timedelta(seconds=10)).isoformat()
    assert replace(provenance, started_at=started).with_duration(earlier=5.0).duration >= 15.0
    assert from_json(to_json(Results("tune", provenance, {}, []))).provenance == provenance


def test_docs_list_every_field() -> None:
    """docs/results.md has a heading for every dataclass and a list item for every field and derived property of it."""
    sections = re.split(r"^## ", DOCS.read_text(), flags=re.M)[1:]
    documented = {
        section.split()[0]: set(re.findall(r"^- `(\w+)`", section, flags=re.M))
        for section in sections
        if re.match(r"[A-Z]\w+\n", section)
    }
    known = {
        name: {f.name for f in fields(kind)} | set(getattr(kind, "derived", ()))
        for name, kind in vars(schema).items()
        if isinstance(kind, type) and is_dataclass(kind)
    }
    known["Results"].add("schema_version")
    assert documented == known
