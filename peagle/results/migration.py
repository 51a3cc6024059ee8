"""Converts result files of schema version 1, written by peagle 0.1, to version 2."""

from __future__ import annotations

from typing import Any

K = {"k": "num_speculative_tokens"}
# By kind of document: version 1's name of a field, in rows or settings, to version 2's. None: the field is dropped.
RENAMED: dict[str, dict[str, str | None]] = {
    "eval": {
        **K,
        "context": "context_range",
        "loops": "looping_responses",
        "answers": "num_responses",
        "tokens": "num_output_tokens",
        "rounds": "num_drafts",
        "accepted": "num_accepted_tokens_per_pos",
        "ci95": "acceptance_length_ci95",
        "unconditional": "per_position_acceptance_rates",
        "conditional": "per_position_conditional_rates",
        "context_edges": "context_bounds",
        "resamples": "bootstrap_samples",
        "rows": "num_prompts",
        "sha": "sha256",
    },
    "bench": {
        **K,
        "name": "label",
        "load": None,
        "rate": "request_rate",
        "prompts": "workload_sha256",
        "seconds": "duration",
        "input_tokens": "total_input_tokens",
        "output_tokens": "total_output_tokens",
        "e2e_ms": "e2el_ms",
        "p50": "median",
        "output_tokens_per_second": "output_throughput",
        "ci95": "output_throughput_ci95",
    },
    "tune": {
        **K,
        "batch": "batch_size",
        "round_ms": "step_ms",
        "expected_tokens_per_second": "expected_output_throughput",
    },
    "plan": {
        **K,
        "round_ms": "step_ms",
        "tokens_per_second": "output_throughput",
        "gpus": "num_gpus",
        "cost_per_million": "cost_per_million_tokens",
    },
}
# Fields whose name means different things in rows and in settings.
RENAMED_IN_ROWS = {"bench": {"requests": "completed"}}
RENAMED_IN_SETTINGS = {
    "bench": {"requests": "num_prompts", "source": "data", "warmup": "num_warmups", "repeats": "num_repeats"}
}
RENAMED_IN_PROVENANCE = {"started": "started_at", "seconds": "duration"}


def migrate_version_1(document: dict[str, Any]) -> dict[str, Any]:
    """A version 1 document in the form of version 2. Values are not checked."""
    kind = document.get("kind")
    names = RENAMED.get(kind, {}) if isinstance(kind, str) else {}
    migrated = {name: value for name, value in document.items() if name not in ("schema", "stamp")}
    migrated["schema_version"] = 2
    if "stamp" in document:
        migrated["provenance"] = _rename(document["stamp"], RENAMED_IN_PROVENANCE)
    if "rows" in document:
        migrated["rows"] = _rename(document["rows"], names | RENAMED_IN_ROWS.get(str(kind), {}))
    if "settings" in document:
        migrated["settings"] = _rename(document["settings"], names | RENAMED_IN_SETTINGS.get(str(kind), {}))
    return migrated


def _rename(value: Any, names: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_rename(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {}
    for name, item in value.items():
        new_name = names.get(name, name)
        if name == "loops" and item == "all":
            item = "included"
        if new_name is not None:
            renamed[new_name] = _rename(item, names)
    return renamed
