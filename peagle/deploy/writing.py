"""The files of a deployment: made, read back, and only then written.

Knows which file each format is. Nothing that is there already is overwritten unless it is asked for.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from peagle.deploy.compose import check_compose, compose_file
from peagle.deploy.kubernetes import check_manifest, manifest, secret_command
from peagle.deploy.service import API_KEY, Service, arguments, check_words, script
from peagle.deploy.systemd import check_units, environment_file, units
from peagle.errors import UserError

Format = Literal["command", "systemd", "compose", "kubernetes"]
FORMATS: tuple[Format, ...] = get_args(Format)
SCRIPT, COMPOSE, MANIFEST = "serve.sh", "compose.yaml", "kubernetes.yaml"


def files_of(service: Service, formats: Sequence[Format], service_monitor: bool) -> tuple[dict[str, str], list[str]]:
    """Name -> text, each read back; and what is worth knowing about them."""
    files: dict[str, str] = {}
    doubts: list[str] = []
    if "command" in formats:
        files[SCRIPT] = script(service)
        check_words(shlex.split(files[SCRIPT], comments=True)[-len(arguments(service)) :], service, SCRIPT)
        if service.settings.replicas > 1:
            doubts.append(f"{SCRIPT}: one replica; start the others with ports and GPUs of their own")
    if "systemd" in formats:
        own = units(service)
        doubts += check_units(own, service)
        files |= own
        if service.settings.replicas > 1:
            ports = f"{service.settings.port} to {service.settings.port + service.settings.replicas - 1}"
            doubts.append(f"systemd: the replicas listen on ports {ports}; put a proxy in front of them")
    if "compose" in formats:
        files[COMPOSE] = compose_file(service)
        check_compose(files[COMPOSE], service)
    if "kubernetes" in formats:
        files[MANIFEST] = manifest(service, service_monitor)
        check_manifest(files[MANIFEST], service)
        doubts += [f"{MANIFEST}: {folder} must be on every node with GPUs" for folder in service.mounts()]
    return files, doubts


def how_to_start(service: Service, formats: Sequence[Format]) -> list[str]:
    own = " ".join(units(service))
    told: dict[Format, str] = {
        "command": f"{API_KEY}=... sh {SCRIPT}",
        "systemd": f"write {API_KEY}=... to {environment_file(service)}, copy to /etc/systemd/system, "
        f"systemctl enable --now {own}",
        "compose": f"{API_KEY}=... docker compose -f {COMPOSE} up -d",
        "kubernetes": f"{secret_command(service)} && kubectl apply -f {MANIFEST}",
    }
    return [told[kind] for kind in formats]


def write_files(files: dict[str, str], out: Path, overwrite: bool) -> None:
    try:
        for name, text in files.items():
            path = out / name
            if path.exists() and path.read_text() != text and not overwrite:
                raise UserError(f"--out {out}: {name} is there and differs; name another folder, or --overwrite")
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text)
            if name == SCRIPT:
                (out / name).chmod(0o755)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"--out {out}: cannot be written ({reason})") from None
