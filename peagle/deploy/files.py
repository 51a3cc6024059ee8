"""Files that start a vLLM service with a drafter: shell script, systemd units, Compose file, Kubernetes manifest.

Secrets (VLLM_API_KEY, HF_TOKEN) are in no file; each format reads them from elsewhere.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from peagle.checkpoints.validate import build_speculative_config, build_vllm_flags
from peagle.config import DeploySettings
from peagle.deploy.checks import MODEL_RUNNER_V2
from peagle.deploy.models import DeployedPair
from peagle.errors import UserError

DeployFormat = Literal["command", "systemd", "compose", "kubernetes"]
SCRIPT = "serve.sh"
# Names of the files, and with the suffix .j2 of their templates; there is a systemd unit per replica.
FILES: dict[DeployFormat, str] = {
    "command": SCRIPT,
    "systemd": "systemd.service",
    "compose": "compose.yaml",
    "kubernetes": "kubernetes.yaml",
}
API_KEY, HUB_TOKEN = "VLLM_API_KEY", "HF_TOKEN"
CONTAINER_PORT = 8000
SYSTEMD_UNQUOTED = re.compile(r"[\w@+=:,./$-]+", re.ASCII)


@dataclass(frozen=True)
class VllmService:
    settings: DeploySettings
    pair: DeployedPair

    @property
    def from_hub(self) -> bool:
        return self.pair.target.on_hub or self.pair.drafter.on_hub

    @property
    def image(self) -> str:
        version = self.settings.vllm_version.removeprefix("v")
        default = f"vllm/vllm-openai:v{version if version.count('.') > 1 else version + '.0'}"
        return default if self.settings.image is None else self.settings.image

    @property
    def mounts(self) -> dict[str, str]:
        """Local folders -> their paths in a container."""
        models = {"target": self.pair.target, "drafter": self.pair.drafter}
        return {model.name: f"/models/{role}" for role, model in models.items() if not model.on_hub}

    @property
    def environment(self) -> dict[str, str]:
        return vllm_environment(self.pair, self.settings.env)

    def gpus(self, replica: int) -> list[str]:
        first = replica * self.settings.tensor_parallel
        return [str(first + i) for i in range(self.settings.tensor_parallel)]

    def arguments(self, *, in_container: bool = False, replica: int = 0) -> list[str]:
        """The arguments of `vllm serve`. In a container, folders are at their mount paths, and the address is fixed."""
        settings, pair = self.settings, self.pair
        paths = self.mounts if in_container else {}
        target, drafter = (paths.get(model.name, model.name) for model in (pair.target, pair.drafter))
        # the model name in the API: the hub id, or the last part of a folder's path
        name = settings.served_model_name or (target if pair.target.on_hub else PurePath(pair.target.name).name)
        flags = build_vllm_flags(
            host=DeploySettings.host if in_container else settings.host,
            port=CONTAINER_PORT if in_container else settings.port + replica,
            served_model_name=name if name != target else None,
            tensor_parallel_size=settings.tensor_parallel,
            speculative_config=build_speculative_config(drafter, pair.num_speculative_tokens, pair.parallel),
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            gpu_memory_utilization=settings.gpu_memory_utilization,
        )
        return [target, *(word for flag in flags.items() for word in flag), *settings.extra]

    def command_line(self) -> str:
        """A shell command. It expects the API key in the environment."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(["vllm", "serve", *self.arguments()])])


def vllm_environment(pair: DeployedPair, env: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Disables Model Runner V2 for P-EAGLE: it does not support parallel drafting."""
    return {MODEL_RUNNER_V2: "0", **dict(env)} if pair.parallel else dict(env)


def quote_yaml(text: str) -> str:
    """A YAML string scalar in single quotes, or in JSON's escapes if it has control characters."""
    if not text.isprintable():
        return json.dumps(text)
    return "'" + text.replace("'", "''") + "'"


def quote_systemd(word: str) -> str:
    """In systemd units % starts a specifier; in Environment=, a dollar sign is literal."""
    if "\n" in word:
        raise UserError(f"{word!r}: has a line break, which systemd cannot express")
    escaped = word.replace("%", "%%")
    if SYSTEMD_UNQUOTED.fullmatch(escaped):
        return escaped
    inner = escaped.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.globals |= {"api_key": API_KEY, "hub_token": HUB_TOKEN, "container_port": CONTAINER_PORT}
TEMPLATES.filters |= {
    "shell": shlex.quote,
    "systemd": quote_systemd,
    "exec_start": lambda word: quote_systemd(word.replace("$", "$$")),  # in ExecStart=, $NAME is a variable
    "percent": lambda text: text.replace("%", "%%"),
    "yaml": quote_yaml,
    "compose": lambda text: quote_yaml(text.replace("$", "$$")),  # Compose substitutes variables for $NAME
    "kubernetes": lambda text: quote_yaml(text.replace("$(", "$$(")),  # Kubernetes substitutes them for $(NAME)
}


def render_files(
    service: VllmService, formats: Sequence[DeployFormat], service_monitor: bool
) -> tuple[dict[str, str], list[str]]:
    """Returns the text of each file by name, and warnings."""
    settings, files, warnings = service.settings, {}, []
    name, replicas = settings.name, settings.replicas
    units = [f"{name}.service"] if replicas == 1 else [f"{name}-{i}.service" for i in range(replicas)]
    for format_ in formats:
        names = units if format_ == "systemd" else [FILES[format_]]
        template = TEMPLATES.get_template(f"{FILES[format_]}.j2")
        for replica, name in enumerate(names):
            values = {"replica": replica, "service_monitor": service_monitor}
            files[name] = template.render(values, service=service, settings=settings)
    if replicas > 1 and "command" in formats:
        warnings.append(f"{SCRIPT}: starts one replica; start the others with their own ports and GPUs")
    if replicas > 1 and "systemd" in formats:
        ports = f"{settings.port} to {settings.port + replicas - 1}"
        warnings.append(f"systemd: the replicas listen on ports {ports}; put a proxy in front of them")
    if "kubernetes" in formats:
        warnings += [f"kubernetes: {folder} must exist on every GPU node" for folder in service.mounts]
    return files, warnings


def write_files(files: dict[str, str], out: Path, overwrite: bool) -> None:
    """Writes the files; an existing file with other content is an error without `overwrite`."""
    try:
        for name, text in files.items():
            path = out / name
            if path.exists() and path.read_text() != text and not overwrite:
                raise UserError(f"--out {out}: {name} exists and differs; give another folder, or --overwrite")
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text)
            if name == SCRIPT:
                (out / name).chmod(0o755)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"--out {out}: cannot be written ({reason})") from None
