"""A vLLM service with a drafter: the `vllm serve` arguments and the environment.

Secrets (VLLM_API_KEY, HF_TOKEN) are in neither; each file format reads them from elsewhere.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from peagle.checkpoints.validate import build_speculative_config
from peagle.config import DeploySettings
from peagle.deploy.checks import MODEL_RUNNER_V2
from peagle.deploy.models import DeployedPair
from peagle.errors import UserError

MOUNT_PATHS = {"target": "/models/target", "drafter": "/models/drafter"}
API_KEY, HUB_TOKEN = "VLLM_API_KEY", "HF_TOKEN"
SPECULATIVE_FLAG = "--speculative-config"


@dataclass(frozen=True)
class VllmService:
    settings: DeploySettings
    pair: DeployedPair

    @property
    def from_hub(self) -> bool:
        return self.pair.target.on_hub or self.pair.drafter.on_hub

    @property
    def model_name(self) -> str:
        """The model name in the API: the hub id, or the last part of a folder's path."""
        target = self.pair.target
        return self.settings.served_model_name or (target.name if target.on_hub else PurePath(target.name).name)

    @property
    def image(self) -> str:
        if self.settings.image is not None:
            return self.settings.image
        version = self.settings.vllm_version.removeprefix("v")
        return f"vllm/vllm-openai:v{version if version.count('.') > 1 else version + '.0'}"

    @property
    def mounts(self) -> dict[str, str]:
        """Local folders -> their paths in a container."""
        models = {"target": self.pair.target, "drafter": self.pair.drafter}
        return {model.name: MOUNT_PATHS[role] for role, model in models.items() if not model.on_hub}

    @property
    def environment(self) -> dict[str, str]:
        """Disables Model Runner V2 for P-EAGLE: it does not support parallel drafting."""
        given = dict(self.settings.env)
        return {MODEL_RUNNER_V2: "0", **given} if self.pair.parallel else given

    def arguments(self, *, in_container: bool = False, port: int | None = None) -> list[str]:
        """The arguments of `vllm serve`. In a container, folders are at their mount paths, and the host is 0.0.0.0."""
        settings, pair = self.settings, self.pair
        paths = self.mounts if in_container else {}
        target, drafter = (paths.get(model.name, model.name) for model in (pair.target, pair.drafter))
        host = DeploySettings.host if in_container else settings.host
        words = [target, "--host", host, "--port", str(settings.port if port is None else port)]
        if self.model_name != target:
            words += ["--served-model-name", self.model_name]
        words += ["--tensor-parallel-size", str(settings.tensor_parallel)]
        words += [SPECULATIVE_FLAG, speculative_json(pair, drafter)]
        for flag, value in (
            ("--max-model-len", settings.max_model_len),
            ("--max-num-seqs", settings.max_num_seqs),
            ("--gpu-memory-utilization", settings.gpu_memory_utilization),
        ):
            if value is not None:
                words += [flag, str(value)]
        return [*words, *settings.extra]

    def command_line(self) -> str:
        """A shell command. It expects the API key in the environment."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(["vllm", "serve", *self.arguments()])])

    def check_arguments(self, words: Sequence[str], file: str, in_container: bool = False) -> None:
        """Checks arguments that were parsed from a generated file: quoting must preserve the models and K."""
        expected = self.arguments(in_container=in_container)
        found = dict(zip(words, words[1:], strict=False)).get(SPECULATIVE_FLAG, "null")
        written = expected[expected.index(SPECULATIVE_FLAG) + 1]
        if words[0] != expected[0] or json.loads(found) != json.loads(written):
            raise UserError(f"{file}: a model name has characters that this format cannot express; rename the folder")


def speculative_json(pair: DeployedPair, drafter: str) -> str:
    config = build_speculative_config(drafter, pair.num_speculative_tokens, pair.parallel)
    return json.dumps(config, separators=(",", ":"))
