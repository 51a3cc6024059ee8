"""A Docker Compose file: one vLLM, or several with a proxy that sends each request to the least busy.

Knows Compose's format. The key comes from the environment of whoever runs it; without one it does not start.
"""

from __future__ import annotations

from typing import Any

import yaml

from peagle.config import DeploySettings
from peagle.deploy.documents import dump
from peagle.deploy.service import API_KEY, HUB_TOKEN, Service, arguments, check_words, environment

PROXY_IMAGE = "nginx:1.29-alpine"
INSIDE = 8000  # the port in a container, whatever it is outside


def image(settings: DeploySettings) -> str:
    if settings.image is not None:
        return settings.image
    version = settings.vllm_version.removeprefix("v")
    return f"vllm/vllm-openai:v{version if version.count('.') > 1 else version + '.0'}"


def compose_file(service: Service) -> str:
    settings = service.settings
    names = ["vllm"] if settings.replicas == 1 else [f"vllm-{i}" for i in range(settings.replicas)]
    services: dict[str, Any] = {name: _vllm(service, i) for i, name in enumerate(names)}
    whole: dict[str, Any] = {"name": settings.name, "services": services, "volumes": {"huggingface": {}}}
    if settings.replicas > 1:
        services["proxy"] = {
            "image": PROXY_IMAGE,
            "depends_on": {name: {"condition": "service_healthy"} for name in names},
            "ports": [_published(settings)],
            "configs": [{"source": "proxy", "target": "/etc/nginx/conf.d/default.conf"}],
            "restart": "unless-stopped",
        }
        whole["configs"] = {"proxy": {"content": _escaped(_proxy(names))}}
    else:
        services["vllm"]["ports"] = [_published(settings)]
    text = dump([whole])
    return f"# Written by `peagle deploy vllm`. Needs {API_KEY} in the environment, the key of its clients.\n{text}"


def _published(settings: DeploySettings) -> str:
    on = "" if settings.host == DeploySettings.host else f"{settings.host}:"
    return f"{on}{settings.port}:{INSIDE}"


def _vllm(service: Service, replica: int) -> dict[str, Any]:
    settings = service.settings
    first = replica * settings.tensor_parallel
    gpus = [str(first + i) for i in range(settings.tensor_parallel)]
    given = {name: _escaped(value) for name, value in environment(service).items()}
    given[API_KEY] = f"${{{API_KEY}:?the key that clients must send}}"
    if service.from_hub:
        given[HUB_TOKEN] = f"${{{HUB_TOKEN}:-}}"
    volumes: list[Any] = ["huggingface:/root/.cache/huggingface"]
    for source, inside in service.mounts().items():
        volumes.append({"type": "bind", "source": _escaped(source), "target": inside, "read_only": True})
    health = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{INSIDE}/health', timeout=5)"
    return {
        "image": image(settings),
        "entrypoint": ["vllm", "serve"],
        "command": [_escaped(word) for word in arguments(service, contained=True, port=INSIDE)],
        "environment": given,
        "volumes": volumes,
        "shm_size": f"{settings.shared_memory_gib}gb",
        "deploy": {
            "resources": {
                "reservations": {"devices": [{"driver": "nvidia", "device_ids": gpus, "capabilities": ["gpu"]}]}
            }
        },
        "healthcheck": {
            "test": ["CMD", "python3", "-c", health],
            "interval": "15s",
            "timeout": "10s",
            "retries": 4,
            "start_period": f"{settings.start_s}s",
        },
        "stop_grace_period": f"{settings.drain_s}s",
        "restart": "unless-stopped",
    }


def _proxy(names: list[str]) -> str:
    """A long answer is one long response, and a stream must not be held back."""
    servers = "\n".join(f"  server {name}:{INSIDE};" for name in names)
    return f"""upstream vllm {{
  least_conn;
{servers}
}}
server {{
  listen {INSIDE};
  client_max_body_size 64m;
  location / {{
    proxy_pass http://vllm;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host $host;
    proxy_buffering off;
    proxy_read_timeout 3600s;
  }}
}}
"""


def _escaped(text: str) -> str:
    """Compose puts variables in place of $NAME; two of them are one."""
    return text.replace("$", "$$")


def check_compose(text: str, service: Service) -> None:
    for name, one in yaml.safe_load(text)["services"].items():
        if name != "proxy":
            words = [str(word).replace("$$", "$") for word in one["command"]]
            check_words(words, service, "compose.yaml", contained=True)
