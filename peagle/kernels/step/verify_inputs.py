"""Builds the rows of a verification step from the state of the request slots, in one launch. Shapes as in types.py."""

from __future__ import annotations

from torch import Tensor

from peagle.kernels.step.step_torch import build_verify_inputs_torch
from peagle.kernels.step.step_triton import build_verify_inputs_triton
from peagle.kernels.step.types import SlotState, VerifyInputs
from peagle.kernels.triton_utils import runs_triton


def build_verify_inputs(state: SlotState, slots_B: Tensor, k: int, max_model_len: int) -> VerifyInputs:
    """Builds the rows that verify k draft tokens per request; slot -1 is the padding slot.

    Row j of a request has token j of its slot (the newest token, then the draft tokens) at position
    num_computed_tokens + j.

    Worked example: a slot whose newest token n is at position 5, with draft tokens x y, k = 2, max_model_len 7. Its
    rows are n x y at positions 5 6 6 (the last is outside the context), of which 2 are valid; the tokens sampled after
    them have positions 6 7 8, and 0 draft tokens are valid, since no step may end past the context.
    """
    build = build_verify_inputs_triton if runs_triton(slots_B) else build_verify_inputs_torch
    return build(state, slots_B, k, max_model_len)
