"""One vLLM with a drafter, as a command and its environment.

Knows vLLM's flags. What is secret (VLLM_API_KEY, HF_TOKEN) is in neither: each kind of file says where it comes from.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from peagle.checkpoints.validate import build_speculative_config
from peagle.config import DeploySettings
from peagle.deploy.checks import RUNNER
from peagle.deploy.models import Pair
from peagle.errors import UserError

IN_CONTAINER = {"target": "/models/target", "drafter": "/models/drafter"}
API_KEY, HUB_TOKEN = "VLLM_API_KEY", "HF_TOKEN"
SPECULATIVE = "--speculative-config"


@dataclass(frozen=True)
class Service:
    settings: DeploySettings
    pair: Pair

    @property
    def from_hub(self) -> bool:
        return self.pair.target.on_hub or self.pair.drafter.on_hub

    @property
    def model_name(self) -> str:
        """A folder's own name, wherever a machine keeps it."""
        target = self.pair.target
        return self.settings.served_model_name or (target.name if target.on_hub else PurePath(target.name).name)

    def mounts(self) -> dict[str, str]:
        """Folders of this machine -> where a container sees them."""
        models = {"target": self.pair.target, "drafter": self.pair.drafter}
        return {model.name: IN_CONTAINER[role] for role, model in models.items() if not model.on_hub}


def speculative(pair: Pair, drafter: str) -> str:
    config = build_speculative_config(drafter, pair.draft_tokens, pair.parallel)
    return json.dumps(config, separators=(",", ":"))


def arguments(service: Service, *, contained: bool = False, port: int | None = None) -> list[str]:
    """What follows `vllm serve`; in a container folders are where they are mounted."""
    settings, pair = service.settings, service.pair
    seen = service.mounts() if contained else {}
    target, drafter = (seen.get(model.name, model.name) for model in (pair.target, pair.drafter))
    host = DeploySettings.host if contained else settings.host  # a container's own loopback reaches nobody
    words = [target, "--host", host, "--port", str(settings.port if port is None else port)]
    if service.model_name != target:
        words += ["--served-model-name", service.model_name]
    words += ["--tensor-parallel-size", str(settings.tensor_parallel)]
    words += [SPECULATIVE, speculative(pair, drafter)]
    for flag, value in (
        ("--max-model-len", settings.max_model_len),
        ("--max-num-seqs", settings.max_num_seqs),
        ("--gpu-memory-utilization", settings.gpu_memory_utilization),
    ):
        if value is not None:
            words += [flag, str(value)]
    return [*words, *settings.extra]


def environment(service: Service) -> dict[str, str]:
    """Model Runner V2 cannot draft in parallel; newer versions fall back by themselves, older ones where asked."""
    given = dict(service.settings.env)
    return {RUNNER: "0", **given} if service.pair.parallel else given


def command_line(service: Service) -> str:
    """For a shell. The key comes from whoever starts it."""
    before = [f"{name}={shlex.quote(value)}" for name, value in environment(service).items()]
    return " ".join([*before, shlex.join(["vllm", "serve", *arguments(service)])])


def script(service: Service) -> str:
    lines = [
        "#!/bin/sh",
        "# Written by `peagle deploy vllm`. Clients must send the key that VLLM_API_KEY holds.",
        f': "${{{API_KEY}:?set it to the key that clients must send}}"',
        f"export {API_KEY}",
    ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment(service).items()]
    return "\n".join([*lines, f"exec {shlex.join(['vllm', 'serve', *arguments(service)])}", ""])


def check_words(words: Sequence[str], service: Service, where: str, contained: bool = False) -> None:
    """Words read back from a file: the same target, drafter and K, whatever the quoting did."""
    wanted = arguments(service, contained=contained)
    read = dict(zip(words, words[1:], strict=False)).get(SPECULATIVE, "null")
    written = wanted[wanted.index(SPECULATIVE) + 1]
    if words[0] != wanted[0] or json.loads(read) != json.loads(written):
        raise UserError(f"{where}: does not read back as it was written; names with such characters are not supported")
