"""Random weights under which tokens stay apart, for both sides of a benchmark.

With plain noise (and vLLM's dummy weights are that) a deep model's rows grow alike: a text repeats a few tokens, masked
drafts are all the same one, and the rows of a round choose the same experts. 8 rows of GPT-OSS's shape then read 5 of
32 experts a layer, where 8 different tokens read 21, and a round looks three times cheaper than it is. Here a row's
state is its token's embedding and little else, so different tokens choose experts as if by lot; and the drafter's
attention is sharp, so that masked rows, which differ by position alone, draft different tokens.

Knows parameters by name and shape, as peagle and vLLM both call them. Weights are changed in place, so recorded CUDA
graphs stay valid.
"""

from __future__ import annotations

from typing import Any

# Of a matrix's spread, in units of one over the root of its width.
TARGET = {"o_proj": 0.05}  # what attention adds is what rows have in common
DRAFTER = {"qkv_proj": 5.0}
PACKED_EXPONENT = 120  # of MXFP4: uniformly drawn four-bit numbers times 2**-7 have a spread of 0.023
PACKED = ("w13_weight", "w2_weight")  # vLLM's, with their exponents beside them
EMBEDDINGS = ("embed_tokens.weight", "embedding.weight", "mask_hidden")  # the second is what vLLM calls GPT-OSS's


def spread_model(model: Any, drafter: bool = False) -> dict[str, int]:
    """How many parameters were set, and how many were left as they are because they are packed in an unknown way."""
    import torch

    scales = DRAFTER if drafter else TARGET
    chance = torch.Generator(next(model.parameters()).device).manual_seed(int(drafter))
    done = left = embeddings = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.element_size() == 1 or not parameter.is_floating_point():
                set_one = _set_packed(name, parameter, chance)
                done, left = done + set_one, left + (not set_one)
                continue
            done += 1
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith(EMBEDDINGS):
                embeddings += 1
                parameter.normal_(0, 1, generator=chance)
            elif parameter.dim() < 2 or name.endswith("bias"):
                parameter.zero_()
            else:
                part = name.split(".")[-2] if "." in name else name
                parameter.normal_(0, scales.get(part, 1.0) * parameter.shape[-1] ** -0.5, generator=chance)
    if not embeddings and not drafter:
        raise ValueError(
            f"no embeddings among {[name for name, _ in model.named_parameters()]}: tokens would grow alike"
        )
    return {"set": done, "left": left}


def _set_packed(name: str, parameter: Any, chance: Any) -> bool:
    import torch

    last = name.rsplit(".", 1)[-1]
    if last in PACKED:
        parameter.view(torch.uint8).random_(0, 256, generator=chance)
    elif last in [f"{one}_scale" for one in PACKED] and parameter.element_size() == 1:
        parameter.view(torch.uint8).fill_(PACKED_EXPONENT)
    else:
        return False
    return True


def spread_peagle(llm: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"target": spread_model(llm.target.model)}
    if llm.drafter is not None:
        found["drafter"] = spread_model(llm.drafter, drafter=True)
    return found


class SpreadWorker:
    """What vLLM's worker class learns beside its own (`worker_extension_cls`)."""

    model_runner: Any

    def spread_weights(self) -> dict[str, Any]:
        runner = self.model_runner
        target = runner.get_model()
        # the drafter first: where it has no tables of its own it holds the target's
        proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        found: dict[str, Any] = {}
        if proposer is not None:
            found["drafter"] = spread_model(proposer.model, drafter=True)
        found["target"] = spread_model(target)
        methods = (getattr(module, "quant_method", None) for module in target.modules())
        kernels = {str(getattr(m, "mxfp4_backend", "") or getattr(m, "unquantized_backend", "")) for m in methods}
        found["experts"] = sorted(kernels - {""})
        return found
