"""The fused CPU passes against the modules they replace, and the CPU GEMMs against F.linear."""

from __future__ import annotations

import pytest
import torch
from pairs import load_pair

from peagle.kernels.attention.dense import causal_attention
from peagle.kernels.norm.rms_norm import rms_norm, rms_norm_torch
from peagle.models.fused_cpu import FusedCpuDecoder, FusedCpuDrafter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_fused_passes_have_the_modules_bits(dtype, rows):
    tokens, positions = torch.arange(rows) % 7, torch.arange(rows) + 5
    for name in ("p-eagle-1", "p-eagle-4", "eagle3-1", "eagle3-4-reduced"):
        target, drafter = load_pair(name)
        target.to(dtype), drafter.to(dtype)
        hidden = torch.randn(rows, drafter.cfg.layer.hidden_size).to(dtype)
        aux_layer_ids = (1, target.cfg.num_layers)
        with torch.inference_mode():
            ours = FusedCpuDecoder(target)(tokens, positions, causal_attention, aux_layer_ids)
            ours += FusedCpuDrafter(drafter)(tokens, hidden, positions, causal_attention)
            theirs = target(tokens, positions, causal_attention, aux_layer_ids)
            theirs += drafter(tokens, hidden, positions, causal_attention)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_f_rms_norm_equals_the_reference():
    x, weight = torch.randn(5, 24), torch.randn(24)
    for scale in (1e-4, 1.0, 1e4):
        with torch.inference_mode():
            ours = rms_norm(x * scale, weight, 1e-5)
        torch.testing.assert_close(ours, rms_norm_torch(x * scale, weight, 1e-5), rtol=1e-6, atol=1e-7)
