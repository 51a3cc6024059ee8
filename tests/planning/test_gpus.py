"""GPU names, suggestions and overrides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peagle.errors import UserError
from peagle.planning.roofline import GPUS, describe_gpu, find_gpu


@pytest.mark.parametrize(
    ("name", "suggestion"), [("h20", "h200"), ("H100-SXM", "h100"), ("a100-80gb", "a100-40gb"), ("b2000", "b200")]
)
def test_unknown_gpu_gets_a_suggestion(name: str, suggestion: str) -> None:
    with pytest.raises(UserError, match=f"--gpu {name}: .*did you mean {suggestion}"):
        find_gpu(name)


def test_gpu_is_found_by_its_full_name() -> None:
    assert find_gpu("NVIDIA H200") is GPUS["h200"]


def test_overrides_replace_single_figures() -> None:
    assert describe_gpu("h200", 2.0, price=1.0) == replace(GPUS["h200"], memory_bandwidth=2e12, price_per_hour=1.0)
    own = describe_gpu(None, 1.8, 400, 96)
    assert (own.memory_bandwidth, own.matrix_flops, own.memory_bytes) == (1.8e12, 400e12, 96e9)


def test_incomplete_or_invalid_figures_are_refused() -> None:
    with pytest.raises(UserError, match="--tflops, --gpu-memory: required without --gpu"):
        describe_gpu(None, 1.0)
    with pytest.raises(UserError, match="--memory-bandwidth 0: must be above 0"):
        describe_gpu("h200", 0.0)
    with pytest.raises(UserError, match="--price -1: must be 0 or more"):
        describe_gpu("h200", price=-1.0)
