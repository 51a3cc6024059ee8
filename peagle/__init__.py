"""peagle: faster answers from large language models with parallel speculative decoding.

from peagle import LLM
llm = LLM("smollm2-135m", drafter="smollm2-135m-p-eagle")
print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}])[0].outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from peagle.checkpoints.drafter import load_drafter, save_drafter
    from peagle.checkpoints.target import load_target, load_tokenizer
    from peagle.config import SamplingParams
    from peagle.engine.llm import LLM
    from peagle.errors import UserError
    from peagle.hub.resolve import resolve_drafter, resolve_target
    from peagle.models.decoder import Decoder
    from peagle.models.drafter import Drafter
    from peagle.speculative.reference import generate

# Imported on first use, so that `import peagle` and `peagle --help` do not wait for torch.
_HOME = {
    "load_drafter": "peagle.checkpoints.drafter",
    "save_drafter": "peagle.checkpoints.drafter",
    "load_target": "peagle.checkpoints.target",
    "load_tokenizer": "peagle.checkpoints.target",
    "SamplingParams": "peagle.config",
    "LLM": "peagle.engine.llm",
    "UserError": "peagle.errors",
    "resolve_drafter": "peagle.hub.resolve",
    "resolve_target": "peagle.hub.resolve",
    "Decoder": "peagle.models.decoder",
    "Drafter": "peagle.models.drafter",
    "generate": "peagle.speculative.reference",
}
__all__ = [
    "LLM",
    "Decoder",
    "Drafter",
    "SamplingParams",
    "UserError",
    "generate",
    "load_drafter",
    "load_target",
    "load_tokenizer",
    "resolve_drafter",
    "resolve_target",
    "save_drafter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'peagle' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
