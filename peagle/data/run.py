"""`peagle data`: reads prompts, generates the target's responses and writes them. Finds user errors before it loads a
model."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

from peagle.checkpoints.target import read_target_config
from peagle.config import EndpointSettings, ResponseEngineSettings, ResponseSettings
from peagle.data.chat_format import ChatFormat, load_chat_format
from peagle.data.endpoint import EndpointGenerator
from peagle.data.generators import (
    GenerationRequest,
    GenerationResult,
    ResponseGenerator,
    load_engine_generator,
    release_engine_memory,
)
from peagle.data.progress import DataSummary
from peagle.data.prompts import PromptSet, read_excluded_ids, read_prompts
from peagle.data.response_file import ResponseFile, replace_lines, sidecar_path
from peagle.data.responses import ResponseWriter
from peagle.errors import UserError
from peagle.hub.resolve import resolve_target
from peagle.versions import installed_versions


class _NoGenerator:
    """Used when every row is written already, so no model has to be loaded."""

    max_model_len: int | None = None
    num_free_slots = 0

    def submit(self, request: GenerationRequest) -> None:
        raise AssertionError("all rows are written")

    def poll(self) -> list[GenerationResult]:
        return []

    def close(self) -> None:
        pass


def write_responses(
    prompts: str,
    out: Path,
    target: str,
    settings: ResponseSettings,
    engine: ResponseEngineSettings | None = None,
    endpoint: EndpointSettings | None = None,
    chat_template: Path | None = None,
    split: str = "train",
    show_progress: bool = True,
    raw: bool = False,
    exclude_ids: Path | None = None,
) -> DataSummary:
    """Writes the target's responses to all prompts as rows of `out`; rows of earlier runs are kept."""
    prompt_set = read_prompts(prompts, split)
    if exclude_ids is not None:
        prompt_set = prompt_set.exclude(read_excluded_ids(exclude_ids))
    folder = resolve_target(target)
    chat = load_chat_format(folder, chat_template, raw)
    _check_options(settings, endpoint, chat, raw)
    if endpoint is None:
        read_target_config(folder)
    server = EndpointGenerator(endpoint) if endpoint is not None else None
    engine = engine or ResponseEngineSettings()
    # settings that every run of a file must share; None where older files lack a key
    shared = {
        "target": target_fingerprint(folder),
        "chat template": hashlib.sha256(chat.template.encode()).hexdigest()[:16],
        "prompts": prompt_set.fingerprint,
        "writer": f"server with {server.model}" if server is not None else "engine",
        "--temperature": settings.temperature,
        "--top-p": settings.top_p,
        "--top-k": settings.top_k,
        "--max-tokens": settings.max_tokens,
        "--seed": settings.seed,
        "--lead": settings.lead or None,
        "--loop-tokens": settings.loop_tokens or None,
        "--vary": settings.vary or None,
        "--max-model-len": engine.max_model_len,
    }
    file = ResponseFile(out, _describe_run(prompt_set, target, settings, endpoint), shared, chat.decode_responses)
    try:
        rejected = [{"where": r.where, "reason": r.reason, "detail": r.detail} for r in prompt_set.rejected]
        replace_lines(sidecar_path(out, "rejected"), rejected)
        requested = {(p.id, sample) for p in prompt_set.rows[: settings.limit] for sample in range(settings.samples)}
        generator: ResponseGenerator
        if requested <= file.done:
            generator = _NoGenerator()
        else:
            generator = server if server is not None else load_engine_generator(folder, engine)
    except BaseException:
        file.close()
        raise
    try:
        summary = ResponseWriter(prompt_set, settings, chat, generator, file, show_progress).run()
    finally:
        del generator
        release_engine_memory()
    if not summary.num_rows and not summary.interrupted:
        reasons = ", ".join(f"{count} {reason}" for reason, count in summary.dropped.items())
        reasons = reasons or f"{summary.num_failed} failed"
        raise UserError(f"{prompts}: no response was kept ({reasons}); see {out}.dropped")
    return summary


def _check_options(settings: ResponseSettings, endpoint: EndpointSettings | None, chat: ChatFormat, raw: bool) -> None:
    if raw and endpoint is not None:
        raise UserError(
            f"--raw: only the embedded engine generates without a template; remove --endpoint {endpoint.url}"
        )
    if settings.lead and endpoint is not None:
        raise UserError(
            f"--lead {settings.lead}: a server cannot continue a partial response; remove --endpoint {endpoint.url}"
        )
    if settings.vary and (raw or endpoint is not None):
        option = "--raw" if endpoint is None else f"--endpoint {endpoint.url}"
        raise UserError(f"--vary {settings.vary}: needs the embedded engine and a chat template; remove {option}")
    if settings.vary and chat.user_turn(None) is None:
        raise UserError(
            f"--vary {settings.vary}: this chat template adds nothing after a user turn, so the target cannot end a "
            "prompt"
        )


def target_fingerprint(folder: Path) -> str:
    """A hash of a model's config, tokenizer and weight file sizes; equal for copies in other folders."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _describe_run(
    prompts: PromptSet, target: str, settings: ResponseSettings, endpoint: EndpointSettings | None
) -> dict[str, Any]:
    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": installed_versions("tokenizers"),
        "target": target,
        "endpoint": endpoint.url if endpoint is not None else None,
        "settings": vars(settings),
        "prompts": {"from": prompts.name, "rows": len(prompts.rows), "rejected": len(prompts.rejected)},
    }
