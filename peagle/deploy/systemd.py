"""A systemd unit for each replica on one machine, and whether systemd would take it.

Knows systemd's quoting. The key is read from a file of root's that the unit only names.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from peagle.deploy.service import API_KEY, HUB_TOKEN, Service, arguments, check_words, environment
from peagle.errors import UserError

PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)


def units(service: Service) -> dict[str, str]:
    settings = service.settings
    names = [settings.name] if settings.replicas == 1 else [f"{settings.name}-{i}" for i in range(settings.replicas)]
    return {f"{name}.service": _unit(service, i) for i, name in enumerate(names)}


def _unit(service: Service, replica: int) -> str:
    settings, pair = service.settings, service.pair
    first = replica * settings.tensor_parallel
    gpus = ",".join(map(str, range(first, first + settings.tensor_parallel)))
    given = {**environment(service), "CUDA_VISIBLE_DEVICES": gpus, "HF_HOME": f"/var/lib/{settings.name}/huggingface"}
    words = [settings.program, "serve", *arguments(service, port=settings.port + replica)]
    secrets = f"{API_KEY}, {HUB_TOKEN}" if service.from_hub else API_KEY
    lines = [
        "# Written by `peagle deploy vllm`.",
        "[Unit]",
        f"Description=vLLM: {_plain(pair.target.name)} with the drafter {_plain(pair.drafter.name)}",
        "After=network-online.target",
        "Wants=network-online.target",
        "StartLimitIntervalSec=1h",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=exec",
        f"User={settings.user}",
        f"# {secrets}, as NAME=value lines; root's, mode 600.",
        f"EnvironmentFile={environment_file(service)}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in given.items()),
        f"StateDirectory={settings.name}",
        f"ExecStart={' '.join(map(_quoted, words))}",
        "Restart=on-failure",
        "RestartSec=10s",
        "# One signal to vLLM itself, which ends its workers; what is left at the end is killed.",
        "KillMode=mixed",
        f"TimeoutStopSec={settings.drain_s}s",
        "LimitNOFILE=65536",
        "LimitMEMLOCK=infinity",
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "ProtectSystem=full",
        "ProtectKernelTunables=yes",
        "ProtectControlGroups=yes",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def environment_file(service: Service) -> str:
    return f"/etc/{service.settings.name}.env"


def _plain(text: str) -> str:
    """For the description, where % begins a specifier."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    escaped = word.replace("%", "%%").replace("$", "$$")
    if PLAIN.fullmatch(escaped):
        return escaped
    inner = escaped.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'


def check_units(texts: dict[str, str], service: Service) -> list[str]:
    """Reads them back, and has systemd read them where it is installed; what it says, as warnings."""
    for name, text in texts.items():
        if any("\n" in word for word in arguments(service)):
            raise UserError(f"{name}: a line break in a word; systemd has no way to write it")
        line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
        words = shlex.split(line.removeprefix("ExecStart=").replace("$$", "$").replace("%%", "%"))
        check_words(words[2:], service, name)
    program = shutil.which("systemd-analyze")
    return _verified(program, texts, service) if program is not None else []


def _verified(program: str, texts: dict[str, str], service: Service) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_text(text)
        paths = [str(Path(folder) / name) for name in texts]
        done = subprocess.run([program, "verify", "--man=no", *paths], capture_output=True, text=True)
    own = [line for line in done.stderr.splitlines() if any(name in line for name in texts)]
    found = []
    for line in own:
        if service.settings.program in line:  # not installed here, which it need not be
            continue
        found.append(f"systemd-analyze: {line.replace(folder + '/', '')}")
    return found
