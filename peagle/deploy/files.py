"""Files that start a vLLM service: shell script, systemd units, Compose file, Kubernetes manifest.

Each is rendered from a template, parsed again to check its quoting, and then written.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from peagle.config import DeploySettings
from peagle.deploy.service import API_KEY, HUB_TOKEN, VllmService
from peagle.errors import UserError

DeployFormat = Literal["command", "systemd", "compose", "kubernetes"]
FORMATS: tuple[DeployFormat, ...] = get_args(DeployFormat)
SCRIPT, COMPOSE, MANIFEST = "serve.sh", "compose.yaml", "kubernetes.yaml"
CONTAINER_PORT = 8000
PROXY_IMAGE = "nginx:1.29-alpine"
PROBE_PERIOD_S = 10
SYSTEMD_UNQUOTED = re.compile(r"[\w@+=:,./$-]+", re.ASCII)


def quote_yaml(text: str) -> str:
    """A YAML string scalar in single quotes, or in JSON's escapes if it has control characters."""
    if not text.isprintable():
        return json.dumps(text)
    return "'" + text.replace("'", "''") + "'"


def quote_compose(text: str) -> str:
    """Compose substitutes variables for $NAME; $$ is a literal dollar sign."""
    return quote_yaml(text.replace("$", "$$"))


def quote_kubernetes(text: str) -> str:
    """Kubernetes substitutes variables for $(NAME); $$( is literal."""
    return quote_yaml(text.replace("$(", "$$("))


def escape_percent(text: str) -> str:
    """In systemd units, % starts a specifier."""
    return text.replace("%", "%%")


def quote_systemd(word: str) -> str:
    """In Environment=, a dollar sign is literal."""
    escaped = escape_percent(word)
    if SYSTEMD_UNQUOTED.fullmatch(escaped):
        return escaped
    inner = escaped.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'


def quote_exec_start(word: str) -> str:
    """In ExecStart=, $NAME is a variable; $$ is a literal dollar sign."""
    return quote_systemd(word.replace("$", "$$"))


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {
    "shell": shlex.quote,
    "systemd": quote_systemd,
    "exec_start": quote_exec_start,
    "percent": escape_percent,
    "yaml": quote_yaml,
    "compose": quote_compose,
    "kubernetes": quote_kubernetes,
}


def _render(template: str, service: VllmService, **values: Any) -> str:
    shared = {
        "settings": service.settings,
        "environment": service.environment,
        "from_hub": service.from_hub,
        "api_key": API_KEY,
        "hub_token": HUB_TOKEN,
        "image": service.image,
        "mounts": service.mounts,
        "container_port": CONTAINER_PORT,
    }
    return TEMPLATES.get_template(template).render(shared | values)


def _replica_gpus(settings: DeploySettings, replica: int) -> list[str]:
    first = replica * settings.tensor_parallel
    return [str(first + i) for i in range(settings.tensor_parallel)]


def render_files(
    service: VllmService, formats: Sequence[DeployFormat], service_monitor: bool
) -> tuple[dict[str, str], list[str]]:
    """Returns the text of each file by name, and warnings."""
    settings = service.settings
    files: dict[str, str] = {}
    warnings: list[str] = []
    if "command" in formats:
        files[SCRIPT] = _render("serve.sh.j2", service, arguments=service.arguments())
        words = shlex.split(files[SCRIPT], comments=True)
        service.check_arguments(words[-len(service.arguments()) :], SCRIPT)
        if settings.replicas > 1:
            warnings.append(f"{SCRIPT}: starts one replica; start the others with their own ports and GPUs")
    if "systemd" in formats:
        units = render_units(service)
        warnings += check_units(units, service)
        files |= units
        if settings.replicas > 1:
            ports = f"{settings.port} to {settings.port + settings.replicas - 1}"
            warnings.append(f"systemd: the replicas listen on ports {ports}; put a proxy in front of them")
    if "compose" in formats:
        files[COMPOSE] = render_compose(service)
    if "kubernetes" in formats:
        files[MANIFEST] = render_manifest(service, service_monitor)
        warnings += [f"{MANIFEST}: {folder} must exist on every GPU node" for folder in service.mounts]
    return files, warnings


def unit_names(settings: DeploySettings) -> list[str]:
    if settings.replicas == 1:
        return [f"{settings.name}.service"]
    return [f"{settings.name}-{i}.service" for i in range(settings.replicas)]


def environment_file(service: VllmService) -> str:
    return f"/etc/{service.settings.name}.env"


def render_units(service: VllmService) -> dict[str, str]:
    """Returns one systemd unit per replica."""
    settings, pair = service.settings, service.pair
    return {
        name: _render(
            "systemd.service.j2",
            service,
            arguments=service.arguments(port=settings.port + i),
            target=pair.target.name,
            drafter=pair.drafter.name,
            gpus=_replica_gpus(settings, i),
            environment_file=environment_file(service),
        )
        for i, name in enumerate(unit_names(settings))
    }


def check_units(units: dict[str, str], service: VllmService) -> list[str]:
    """Parses the units, also with systemd-analyze if it is installed; returns its messages as warnings."""
    for name, text in units.items():
        if any("\n" in word for word in service.arguments()):
            raise UserError(f"{name}: an argument has a line break, which systemd cannot express")
        line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
        words = shlex.split(line.removeprefix("ExecStart=").replace("$$", "$").replace("%%", "%"))
        service.check_arguments(words[2:], name)
    program = shutil.which("systemd-analyze")
    if program is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in units]
        for path in paths:
            path.write_text(units[path.name])
        done = subprocess.run([program, "verify", "--man=no", *map(str, paths)], capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if any(name in line for name in units)]
    # vLLM need not be installed on this machine.
    relevant = [line for line in lines if service.settings.program not in line]
    return [f"systemd-analyze: {line.replace(folder + '/', '')}" for line in relevant]


def render_compose(service: VllmService) -> str:
    """Returns a Compose file: one vLLM, or several behind an nginx proxy that picks the least busy one."""
    settings = service.settings
    names = ["vllm"] if settings.replicas == 1 else [f"vllm-{i}" for i in range(settings.replicas)]
    address = "" if settings.host == DeploySettings.host else f"{settings.host}:"
    text = _render(
        "compose.yaml.j2",
        service,
        arguments=service.arguments(in_container=True, port=CONTAINER_PORT),
        replicas=[{"name": name, "gpus": _replica_gpus(settings, i)} for i, name in enumerate(names)],
        published_port=f"{address}{settings.port}:{CONTAINER_PORT}",
        proxy_image=PROXY_IMAGE,
    )
    services = yaml.safe_load(text)["services"]
    for name in names:
        words = [str(word).replace("$$", "$") for word in services[name]["command"]]
        service.check_arguments(words, COMPOSE, in_container=True)
    return text


def render_manifest(service: VllmService, service_monitor: bool) -> str:
    """Returns a Kubernetes manifest: Deployment, Service, disruption budget and optionally a ServiceMonitor."""
    text = _render(
        "kubernetes.yaml.j2",
        service,
        arguments=service.arguments(in_container=True, port=CONTAINER_PORT),
        secret_command=secret_command(service),
        service_monitor=service_monitor,
        probe_period_s=PROBE_PERIOD_S,
        start_probe_failures=-(-service.settings.start_s // PROBE_PERIOD_S),
    )
    deployment = next(yaml.safe_load_all(text))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    words = [str(word).replace("$$(", "$(") for word in container["args"]]
    service.check_arguments(words, MANIFEST, in_container=True)
    return text


def secret_command(service: VllmService) -> str:
    token = f' --from-literal=hf-token="${HUB_TOKEN}"' if service.from_hub else ""
    return f'kubectl create secret generic {service.settings.name} --from-literal=api-key="${API_KEY}"{token}'


def start_instructions(service: VllmService, formats: Sequence[DeployFormat]) -> list[str]:
    commands: dict[DeployFormat, str] = {
        "command": f"{API_KEY}=... sh {SCRIPT}",
        "systemd": f"write {API_KEY}=... to {environment_file(service)}, copy the units to /etc/systemd/system, "
        f"systemctl enable --now {' '.join(unit_names(service.settings))}",
        "compose": f"{API_KEY}=... docker compose -f {COMPOSE} up -d",
        "kubernetes": f"{secret_command(service)} && kubectl apply -f {MANIFEST}",
    }
    return [commands[format_] for format_ in formats]


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
