"""Text and conversations to token ids, and token ids to text.

The engine process has no text: all of it is made here.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from peagle.checkpoints.target import load_tokenizer
from peagle.config import SamplingParams
from peagle.engine.detokenizer import Detokenizer
from peagle.errors import UserError, first_line
from peagle.server.errors import ApiError, invalid_value

# Normalizers and pre-tokenizers that drop no text.
LOSSLESS_STEPS = frozenset("Sequence ByteLevel Split Digits Metaspace Prepend NFC".split())
METASPACE = "\u2581"  # a space in SentencePiece vocabularies
SPACE_TO_METASPACE = json.dumps({"type": "Replace", "pattern": {"String": " "}, "content": METASPACE})
# Template variables that the server sets and a client may not.
RESERVED_VARIABLES = frozenset(
    "messages tools documents tokenize return_dict return_tensors chat_template conversation".split()
)


class ServerTokenizer:
    def __init__(self, target_folder: Path) -> None:
        self.tokenizer = load_tokenizer(target_folder)
        self.token_text = lru_cache(1 << 16)(lambda token_id: self.tokenizer.decode([token_id]))
        self.token_bytes = lru_cache(1 << 16)(self._token_bytes)
        self._normalizes = False
        self._token_shares = self._find_token_shares()
        self.chat_template = str(self.tokenizer.chat_template or "")  # all of them if there are several
        added_tokens = getattr(self.tokenizer, "added_tokens_decoder", {})
        self.special_tokens = frozenset(token.content for token in added_tokens.values() if token.special)

    def check_chat_template(self) -> None:
        """Raises UserError if the chat template is broken. It may refuse the conversation, though."""
        if not self.chat_template:
            return
        try:
            messages = [{"role": "user", "content": "a"}]
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            if type(error) is not TemplateError:  # raised by a template's own checks
                template = f"the chat template of {self.tokenizer.name_or_path}"
                problem = f"{type(error).__name__}: {first_line(error)}"
                raise UserError(f"{template} is broken ({problem}): correct or remove it") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, return_attention_mask=False)
        return list(encoded["input_ids"])

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Renders the chat template. Every error of the template is the client's: the messages are its only input."""
        template_kwargs = template_kwargs or {}
        if not self.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", code="no_chat_template")
        if tools and "tools" not in self.chat_template:
            raise invalid_value("tools", "this model's chat template supports no tools", "unsupported_parameter")
        for name in template_kwargs:
            if name in RESERVED_VARIABLES or name not in self.chat_template:
                message = f"this model's chat template has no {name[:40]!r}"
                raise invalid_value("chat_template_kwargs", message, "unsupported_parameter")
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_kwargs,
            )
        except Exception as error:
            message = f"messages: the chat template refuses them ({first_line(error)[:160]})"
            raise ApiError(400, message, "messages") from None
        return str(rendered)

    def count_min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of a text, without tokenizing it. 0 if none is known.

        Every byte of the text is part of one token. If each byte of a token with n bytes counts as 1/n token, a byte
        counts at least as much as in the longest token that has it.
        """
        if self._token_shares is None:
            return 0
        text = unicodedata.normalize("NFC", text) if self._normalizes else text
        counts = np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256)
        return int(counts @ self._token_shares)

    def _find_token_shares(self) -> NDArray[np.float64] | None:
        """Returns, for every byte, 1 / the length of the longest token that has it; 0 if the byte alone is no token.

        None if a step before the tokens may drop text, or if there may be unknown characters.
        """
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            return None
        spec = json.loads(self.tokenizer.backend_tokenizer.to_str())
        model, added_tokens = spec["model"], spec["added_tokens"]
        steps = json.dumps([spec["normalizer"], spec["pre_tokenizer"]]).replace(SPACE_TO_METASPACE, "")
        kinds = set(re.findall(r'"type": "(\w+)"', steps))
        self._normalizes = "NFC" in kinds
        drops_text = (
            kinds - LOSSLESS_STEPS or '"Removed"' in steps or any(t["lstrip"] or t["rstrip"] for t in added_tokens)
        )
        if model["type"] != "BPE" or drops_text:
            return None
        if "ByteLevel" in kinds:
            tokens = {bytes(self._byte_values.get(c, 0) for c in token) for token in model["vocab"]}
            single = {token[0] for token in tokens if len(token) == 1}
        elif model["byte_fallback"] and all(f"<0x{b:02X}>" in model["vocab"] for b in range(256)):
            tokens, single = {token.replace(METASPACE, " ").encode() for token in model["vocab"]}, set(range(256))
        else:
            return None
        longest = dict.fromkeys(range(256), 1)
        for token in tokens | {token["content"].encode() for token in added_tokens}:
            longest |= {b: len(token) for b in token if len(token) > longest[b]}
        return np.array([1 / longest[b] if b in single else 0.0 for b in range(256)])

    @cached_property
    def _byte_values(self) -> dict[str, int]:
        """The byte that each character stands for in a byte-level vocabulary."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {character: byte for byte, character in bytes_to_unicode().items()}

    @cached_property
    def _decode(self) -> Callable[..., str]:
        """`decode` without transformers' Python code per token, unless a tokenizer's own class needs it."""
        from transformers import PreTrainedTokenizerFast as Fast

        tokenizer: Any = self.tokenizer
        is_plain = isinstance(tokenizer, Fast) and not tokenizer.clean_up_tokenization_spaces
        if is_plain and (type(tokenizer).decode, type(tokenizer)._decode) == (Fast.decode, Fast._decode):
            return tokenizer.backend_tokenizer.decode
        return tokenizer.decode

    def new_detokenizer(self, params: SamplingParams) -> Detokenizer:
        decode = partial(self._decode, skip_special_tokens=params.skip_special_tokens)
        return Detokenizer(decode, params.stop, params.min_tokens)

    def _token_bytes(self, token_id: int) -> list[int]:
        """Returns the bytes of a token. They are exact also for a token that holds part of a character."""
        text = self.token_text(token_id)
        if "\ufffd" in text:
            name = self.tokenizer.convert_ids_to_tokens(token_id)
            if isinstance(name, str):
                if name.startswith("<0x") and name.endswith(">") and len(name) == 6:
                    return [int(name[3:5], 16)]
                if all(c in self._byte_values for c in name):
                    return [self._byte_values[c] for c in name]
        return list(text.encode())
