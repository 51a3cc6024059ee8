"""`peagle data` from names to a written file: prompts, target, who answers, where to.

Knows what belongs to what, and does none of it. What can be wrong is found before a model is loaded.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

from peagle.checkpoints.target import eos_ids, load_tokenizer, read_target_config
from peagle.config import EndpointSettings, ResponseEngineSettings, ResponseSettings
from peagle.data.chat_format import ChatFormat, RawFormat
from peagle.data.endpoint import EndpointGenerator
from peagle.data.generators import (
    GenerationRequest,
    GenerationResult,
    ResponseGenerator,
    load_engine_generator,
    release_engine_memory,
)
from peagle.data.progress import DataSummary
from peagle.data.prompts import PromptSet, read_prompts
from peagle.data.response_file import ResponseFile, beside, replace_lines
from peagle.data.responses import ResponseWriter
from peagle.errors import UserError
from peagle.hub.resolve import resolve_target
from peagle.versions import installed_versions


class _Nobody:
    """Answers when there is nothing left to ask, and no model needs to be loaded for that."""

    max_model_len: int | None = None
    num_free_slots = 0

    def submit(self, request: GenerationRequest) -> None:
        raise AssertionError("nothing is left to ask")

    def poll(self) -> list[GenerationResult]:
        return []

    def close(self) -> None:
        pass


def write_responses(
    prompts: str,
    out: Path,
    target: str,
    settings: ResponseSettings,
    writer: ResponseEngineSettings | None = None,
    endpoint: EndpointSettings | None = None,
    chat_template: Path | None = None,
    split: str = "train",
    shown: bool = True,
    raw: bool = False,
) -> DataSummary:
    """The target's responses to all prompts, as rows of `out`; what is there already is not asked again."""
    rows = read_prompts(prompts, split)
    folder = resolve_target(target)
    chat = load_chat_format(folder, chat_template, raw)
    if raw and endpoint is not None:
        raise UserError(f"--raw: only the engine here writes without a template; leave out --endpoint {endpoint.url}")
    if settings.lead and endpoint is not None:
        raise UserError(
            f"--lead {settings.lead}: a server cannot be given an answer's first tokens; leave out "
            f"--endpoint {endpoint.url}"
        )
    if settings.vary and (raw or endpoint is not None):
        given = "--raw" if endpoint is None else f"--endpoint {endpoint.url}"
        raise UserError(
            f"--vary {settings.vary}: prompts are made up by the engine, in a chat template; leave out {given}"
        )
    if settings.vary and chat.user_turn(None) is None:
        raise UserError(
            f"--vary {settings.vary}: this chat template puts nothing behind a user's turn, so the target could not "
            "say where a prompt of its own ends"
        )
    if endpoint is None:
        read_target_config(folder)
    server = EndpointGenerator(endpoint) if endpoint is not None else None
    writer = writer or ResponseEngineSettings()
    same = {
        "target": target_fingerprint(folder),
        "chat template": hashlib.sha256(chat.template.encode()).hexdigest()[:16],
        "prompts": rows.fingerprint,
        "writer": f"server with {server.model}" if server is not None else "engine",
        "--temperature": settings.temperature,
        "--top-p": settings.top_p,
        "--top-k": settings.top_k,
        "--max-tokens": settings.max_tokens,
        "--seed": settings.seed,
        "--lead": settings.lead or None,  # as in files from before there was one
        "--loop-tokens": settings.loop_tokens or None,
        "--vary": settings.vary or None,
        "--max-model-len": writer.max_model_len,
    }
    file = ResponseFile(out, _this_run(rows, target, settings, endpoint), same, chat.answers)
    try:
        refused = [{"where": r.where, "reason": r.reason, "detail": r.detail} for r in rows.refused]
        replace_lines(beside(out, "refused"), refused)
        wanted = {(p.id, sample) for p in rows.rows[: settings.limit] for sample in range(settings.samples)}
        source: ResponseGenerator
        if wanted <= file.done:
            source = _Nobody()
        else:
            source = server if server is not None else load_engine_generator(folder, writer)
    except BaseException:
        file.close()
        raise
    try:
        summary = ResponseWriter(rows, settings, chat, source, file, shown).run()
    finally:
        del source
        release_engine_memory()
    if not summary.rows and not summary.interrupted:
        why = ", ".join(f"{count} {reason}" for reason, count in summary.dropped.items()) or f"{summary.failed} failed"
        raise UserError(f"{prompts}: no response was kept ({why}); {out}.dropped has each of them")
    return summary


def load_chat_format(folder: Path, template: Path | None = None, raw: bool = False) -> ChatFormat:
    """A target's tokenizer and chat template (none of it for `raw`), and the ids that end its answers."""
    if raw and template is not None:
        raise UserError(f"--raw: prompts as they are need no --chat-template {template}; give one of the two")
    tokenizer = load_tokenizer(folder)
    ends = set(eos_ids(folder))
    if isinstance(tokenizer.eos_token_id, int):
        ends.add(tokenizer.eos_token_id)
    return RawFormat(tokenizer, ends) if raw else ChatFormat(tokenizer, ends, template, str(folder))


def target_fingerprint(folder: Path) -> str:
    """The same for the same model in another place: its small files, and the sizes of its weights."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _this_run(
    prompts: PromptSet, target: str, settings: ResponseSettings, endpoint: EndpointSettings | None
) -> dict[str, Any]:
    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": installed_versions("tokenizers"),
        "target": target,
        "endpoint": endpoint.url if endpoint is not None else None,
        "settings": vars(settings),
        "prompts": {"from": prompts.name, "rows": len(prompts.rows), "refused": len(prompts.refused)},
    }
