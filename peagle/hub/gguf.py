"""Converts the GGUF of a supported architecture to a Hugging Face folder with bf16 weights.

`ARCHITECTURES` describes each architecture: names of tensors, changes of their values, config fields and tokenizer. The
caller checks the file's hash.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from peagle.errors import UserError

Metadata = Mapping[str, Any]
OnProgress = Callable[[int, int], None]  # done and total

# llama.cpp's types of tokens. The tokenizer must not split CONTROL and USER_DEFINED; UNUSED pads the vocabulary.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Not in the file, since equal in all Gemma 3 models: every sixth layer has full attention; the others use this theta.
GEMMA3_FULL_ATTENTION_EVERY, GEMMA3_LOCAL_THETA = 6, 10000.0

# The pre-tokenizer of Qwen 2, 2.5 and 3, from their tokenizer.json: contractions, words, digits, punctuation, space.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # Hugging Face name -> GGUF name
# GGUF name -> Hugging Face name
MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LLAMA_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_LAYER_TENSORS = LLAMA_LAYER_TENSORS | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class GgufArchitecture:
    pre_tokenizer: str  # GGUF's name
    model_class: str  # of transformers, like `model_type`
    model_type: str
    activation: dict[str, str]  # config field
    layer_tensors: dict[str, str]
    build_tokenizer: Callable[[Metadata], Tokenizer]
    tokenizer_options: dict[str, bool]
    permuted_rotary: bool = False  # rotary pairs are adjacent rows
    norm_offset: float = 0.0  # of GGUF's norm weights over Hugging Face's
    end_roles: tuple[str, ...] = ("eos",)  # special tokens that end an output
    extra_config: Callable[[Metadata, dict[str, Any]], dict[str, Any]] = lambda meta, config: {}


def convert_gguf(gguf: Path, out: Path, on_progress: OnProgress = lambda done, total: None) -> None:
    """Writes the folder `out`, for AutoModelForCausalLM and AutoTokenizer.

    `on_progress(done, total)` counts converted weights. A damaged or unsupported file raises a UserError, a write error
    an OSError.
    """
    try:
        architecture, meta, tensors = _read_gguf(gguf)
        config = _build_config(meta, architecture, tied="output.weight" not in tensors)
        tokenizer = _build_tokenizer(meta, architecture)
        weights = _convert_tensors(tensors, config, architecture, on_progress)
    except UserError:
        raise
    except Exception as err:  # the gguf package does not validate its input, so a damaged file raises various types
        why = " ".join(f"{type(err).__name__}: {err}".split())[:200]
        raise UserError(f"'{gguf}' is not a readable GGUF ({why}); fetch the file again") from err

    roles = [role for role in SPECIAL_TOKENS if _special_id(meta, role) is not None]
    special = {f"{role}_token": _special_token(meta, role) for role in roles}
    ends = [_special_id(meta, role) for role in architecture.end_roles]
    tokenizer_config = {
        # The generic class uses tokenizer.json unchanged; a specific one would rebuild the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **architecture.tokenizer_options,
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, value in {
        "config": config,
        "generation_config": {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        | {"eos_token_id": ends if len(ends) > 1 else ends[0]},
        "tokenizer_config": tokenizer_config,
        "special_tokens_map": special,
    }.items():
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (out / f"{name}.json").write_text(text, encoding="utf-8")
    (out / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    if template := meta.get("tokenizer.chat_template"):
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    try:
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as err:  # for example a full disk
        raise OSError(str(err)) from err
    shutil.copymode(out / "config.json", out / "model.safetensors")  # safetensors makes it readable by the owner only


def _read_gguf(path: Path) -> tuple[GgufArchitecture, Metadata, dict[str, Any]]:
    """Returns architecture, metadata and tensors."""

    class Reader(GGUFReader):
        """Slices the file as a plain array: memory maps take three times as long, seconds for a large vocabulary."""

        @property
        def data(self) -> Any:
            return self._plain_data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain_data = np.asarray(mapped)

    reader = Reader(path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    name, pre_tokenizer = meta.get("general.architecture"), meta.get("tokenizer.ggml.pre")
    architecture = ARCHITECTURES.get(str(name))
    if architecture is None or architecture.pre_tokenizer != pre_tokenizer:
        supported = ", ".join(f"{name!r} with {each.pre_tokenizer!r}" for name, each in ARCHITECTURES.items())
        raise UserError(f"'{path}' is a {name!r} model with a {pre_tokenizer!r} tokenizer; supported: {supported}")
    return architecture, meta, {tensor.name: tensor for tensor in reader.tensors}


def _build_config(meta: Metadata, architecture: GgufArchitecture, tied: bool) -> dict[str, Any]:
    prefix = meta["general.architecture"]

    def size(name: str) -> int:
        return int(meta[f"{prefix}.{name}"])

    hidden, heads = size("embedding_length"), size("attention.head_count")
    theta = float(meta[f"{prefix}.rope.freq_base"])
    head_dim = meta.get(f"{prefix}.attention.key_length", meta.get(f"{prefix}.rope.dimension_count", hidden // heads))
    config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _special_id(meta, "bos"),
        "eos_token_id": _special_id(meta, "eos"),
        "pad_token_id": _special_id(meta, "pad"),
        "head_dim": int(head_dim),
        **architecture.activation,
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "max_position_embeddings": size("context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": size("block_count"),
        "num_key_value_heads": size("attention.head_count_kv"),
        # Rounds the stored float32 9.9999997e-06 to 1e-05.
        "rms_norm_eps": float(f"{meta[f'{prefix}.attention.layer_norm_rms_epsilon']:.6g}"),
        # Older readers use the first, newer ones the second.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }
    return config | architecture.extra_config(meta, config)


def _gemma3_config(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    layers = range(1, config["num_hidden_layers"] + 1)
    sliding = {"rope_type": "default", "rope_theta": GEMMA3_LOCAL_THETA}
    return {
        "layer_types": ["sliding_attention" if i % GEMMA3_FULL_ATTENTION_EVERY else "full_attention" for i in layers],
        "query_pre_attn_scalar": config["head_dim"],
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": sliding},
        "rope_local_base_freq": GEMMA3_LOCAL_THETA,
        "sliding_window": int(meta["gemma3.attention.sliding_window"]),
    }


def _special_id(meta: Metadata, role: str) -> int | None:
    value = meta.get(f"tokenizer.ggml.{SPECIAL_TOKENS[role]}_token_id")
    return None if value is None else int(value)


def _special_token(meta: Metadata, role: str) -> str:
    return str(meta["tokenizer.ggml.tokens"][_special_id(meta, role)])


def _build_tokenizer(meta: Metadata, architecture: GgufArchitecture) -> Tokenizer:
    tokenizer = architecture.build_tokenizer(meta)
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    special = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in special])
    assert tokenizer.get_vocab_size() == len(_used_tokens(meta)), "every special token already has an id"
    return tokenizer


def _used_tokens(meta: Metadata) -> dict[str, int]:
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    return {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}


def _build_byte_level_bpe(meta: Metadata) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=_used_tokens(meta), merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_smollm_tokenizer(meta: Metadata) -> Tokenizer:
    """Every digit is its own token, then GPT-2's byte-level split."""
    tokenizer = _build_byte_level_bpe(meta)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return tokenizer


def _build_qwen2_tokenizer(meta: Metadata) -> Tokenizer:
    tokenizer = _build_byte_level_bpe(meta)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return tokenizer


def _build_sentencepiece_bpe(meta: Metadata) -> Tokenizer:
    bos, unk = _special_token(meta, "bos"), _special_token(meta, "unk")
    vocab = {token: index for index, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = find_merges(vocab, meta["tokenizer.ggml.scores"], meta["tokenizer.ggml.token_type"])
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    # The model was trained on texts that start with BOS, and its output is useless without it.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, _special_id(meta, "bos"))]
    )
    return tokenizer


def find_merges(ids: dict[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores best; a list of merges says the same in order.

    With pieces a, b, ab (score -1), abb (score -2): "a b" before "ab b", and no other way to make either.
    """
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score, kind in zip(ids, scores, kinds, strict=True):
        if kind != NORMAL:
            continue
        for at in range(1, len(token)):
            left, right = ids.get(token[:at]), ids.get(token[at:])
            if left is not None and right is not None:
                found.append((-score, left, right, (token[:at], token[at:])))
    return [pair for *_, pair in sorted(found)]


def _convert_tensors(
    tensors: dict[str, Any], config: dict[str, Any], architecture: GgufArchitecture, on_progress: OnProgress
) -> dict[str, torch.Tensor]:
    """Returns all tensors under their Hugging Face names, in bf16."""
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    total, done = sum(int(tensor.n_elements) for tensor in tensors.values()), 0
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        *layer, kind, suffix = name.split(".")  # blk.5.attn_q.weight or output_norm.weight
        if layer:
            new_name = f"model.layers.{layer[1]}.{architecture.layer_tensors[kind]}.{suffix}"
        else:
            new_name = f"{MODEL_TENSORS[kind]}.{suffix}"
        # A copy, since F32 tensors are read-only views of the file.
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if architecture.permuted_rotary and kind in num_heads:
            weight = unpermute_rotary(weight, num_heads[kind])
        elif kind.endswith("norm"):
            weight = weight - architecture.norm_offset
        weights[new_name] = weight.bfloat16().contiguous()
        done += weight.numel()
        on_progress(done, total)
    return weights


def unpermute_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders rotary pairs: adjacent rows (0, 1), (2, 3), ... in GGUF, half a head apart in Hugging Face."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


# GGUF's name of the architecture -> how to convert it
ARCHITECTURES = {
    "llama": GgufArchitecture(
        pre_tokenizer="smollm",
        model_class="LlamaForCausalLM",
        model_type="llama",
        activation={"hidden_act": "silu"},
        layer_tensors=LLAMA_LAYER_TENSORS,
        build_tokenizer=_build_smollm_tokenizer,
        tokenizer_options={"add_prefix_space": False, "add_bos_token": False},
        permuted_rotary=True,
    ),
    "qwen2": GgufArchitecture(
        pre_tokenizer="qwen2",
        model_class="Qwen2ForCausalLM",
        model_type="qwen2",
        activation={"hidden_act": "silu"},
        layer_tensors=LLAMA_LAYER_TENSORS,
        build_tokenizer=_build_qwen2_tokenizer,
        tokenizer_options={"add_prefix_space": False, "add_bos_token": False},
        end_roles=("eos", "bos"),  # <|im_end|> ends a turn, <|endoftext|> a text
    ),
    "gemma3": GgufArchitecture(
        pre_tokenizer="default",
        model_class="Gemma3ForCausalLM",
        model_type="gemma3_text",
        activation={"hidden_activation": "gelu_pytorch_tanh"},
        layer_tensors=GEMMA3_LAYER_TENSORS,
        build_tokenizer=_build_sentencepiece_bpe,
        tokenizer_options={"add_bos_token": True},
        norm_offset=1.0,
        extra_config=_gemma3_config,
    ),
}
