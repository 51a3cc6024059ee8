"""A Kubernetes manifest: replicas behind a service, probes, metrics, GPUs.

Knows Kubernetes' objects. Keys are in a Secret that the manifest only names.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import yaml

from peagle.deploy.compose import INSIDE, image
from peagle.deploy.documents import dump
from peagle.deploy.service import API_KEY, HUB_TOKEN, Service, arguments, check_words, environment

PROBE_S = 10


def manifest(service: Service, service_monitor: bool) -> str:
    settings = service.settings
    labels = {"app.kubernetes.io/name": settings.name, "app.kubernetes.io/component": "vllm"}
    documents = [_deployment(service, labels), _service(service, labels)]
    if settings.replicas > 1:
        documents.append(
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": settings.name, "labels": labels},
                "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
            }
        )
    if service_monitor:
        documents.append(
            {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "ServiceMonitor",
                "metadata": {"name": settings.name, "labels": labels},
                "spec": {
                    "selector": {"matchLabels": labels},
                    "endpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
                },
            }
        )
    text = dump(documents)
    return f"# Written by `peagle deploy vllm`. First make the Secret:\n#   {secret_command(service)}\n{text}"


def secret_command(service: Service) -> str:
    more = f' --from-literal=hf-token="${HUB_TOKEN}"' if service.from_hub else ""
    return f'kubectl create secret generic {service.settings.name} --from-literal=api-key="${API_KEY}"{more}'


def _service(service: Service, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": service.settings.name, "labels": labels},
        "spec": {
            "selector": labels,
            "ports": [{"name": "http", "port": service.settings.port, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def _deployment(service: Service, labels: dict[str, str]) -> dict[str, Any]:
    settings = service.settings
    scrape = {"scrape": "true", "port": str(INSIDE), "path": "/metrics"}
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{settings.shared_memory_gib}Gi"}},
        {"name": "cache", "emptyDir": {}},
    ]
    for source, inside in service.mounts().items():
        name = PurePosixPath(inside).name
        volumes.append({"name": name, "hostPath": {"path": source, "type": "Directory"}})
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": settings.name, "labels": labels},
        "spec": {
            "replicas": settings.replicas,
            # GPUs are seldom there twice: an old pod leaves before a new one comes
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "progressDeadlineSeconds": settings.start_s + 10 * PROBE_S,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {
                    "labels": labels,
                    "annotations": {f"prometheus.io/{name}": value for name, value in scrape.items()},
                },
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,  # a service named vllm would set VLLM_PORT, which vLLM reads
                    "terminationGracePeriodSeconds": settings.drain_s,
                    "containers": [_container(service)],
                    "volumes": volumes,
                },
            },
        },
    }


def _container(service: Service) -> dict[str, Any]:
    settings = service.settings
    gpus = {"nvidia.com/gpu": settings.tensor_parallel}
    mounts: list[dict[str, Any]] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": "/root/.cache"},
    ]
    for inside in service.mounts().values():
        mounts.append({"name": PurePosixPath(inside).name, "mountPath": inside, "readOnly": True})
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_S, "timeoutSeconds": 5}
    return {
        "name": "vllm",
        "image": image(settings),
        "command": ["vllm", "serve"],
        "args": [word.replace("$(", "$$(") for word in arguments(service, contained=True, port=INSIDE)],
        "env": _env(service),
        "ports": [{"name": "http", "containerPort": INSIDE, "protocol": "TCP"}],
        "resources": {"limits": gpus, "requests": gpus},
        "startupProbe": {**probe, "failureThreshold": -(-settings.start_s // PROBE_S)},
        "readinessProbe": {**probe, "failureThreshold": 2},
        "livenessProbe": {**probe, "failureThreshold": 6},
        # requests that are on their way still arrive, and are answered
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }


def _env(service: Service) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "value": value.replace("$(", "$$(")} for name, value in environment(service).items()
    ]
    found.append(_secret(service, API_KEY, "api-key"))
    if service.from_hub:
        found.append(_secret(service, HUB_TOKEN, "hf-token", optional=True))
    return found


def _secret(service: Service, name: str, key: str, optional: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": service.settings.name, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def check_manifest(text: str, service: Service) -> None:
    deployment = next(yaml.safe_load_all(text))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    words = [str(word).replace("$$(", "$(") for word in container["args"]]
    check_words(words, service, "kubernetes.yaml", contained=True)
