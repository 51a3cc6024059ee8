"""Creates the drafter of a run: its config, its mask token and its initial weights.

The drafter must never see the mask token as a real token, so the mask token is one that the target's chats and the data
do not contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from peagle.checkpoints.drafter import check_drafter_fits, load_unshared_drafter, read_drafter_config
from peagle.config import DEFAULT_NUM_LAYERS, DecoderConfig, DrafterConfig, TrainConfig
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESERVED_TOKEN = re.compile(r"reserved|unused|empty|placeholder|extra_id|mask", re.IGNORECASE)
INIT_STD = 0.02  # of random matrices
INIT_MODES = ("target", "random")  # values of --init besides a folder
# Layer 0 reads two inputs where the target's layer reads one. The embedding gets the target's weights, the hidden state
# a tenth of them, so that the untrained fc output does not drown the token. Found on a small target.
HIDDEN_STATE_SCALE = 0.1
# Upper bound of the standard deviation of logits of random states. Gemma's final norm is large (45 for the 270m, 4.4
# for SmolLM2): a drafter that starts with it would be certain of wrong tokens and unlearn that slowly.
MAX_LOGIT_STD = 5.0


def choose_mask_id(
    mask_token: str,
    target: DecoderConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    eos_ids: Iterable[int],
    token_counts_V: Tensor,
) -> int:
    """The id of `--mask-token`: a token's text, an id, or for auto an unused token."""
    if mask_token == "auto":
        return _find_unused_token(target, tokenizer, eos_ids, token_counts_V)
    flag = f"--mask-token {mask_token}"
    vocab = tokenizer.get_vocab() if tokenizer is not None else {}
    if not mask_token.isdecimal() and mask_token not in vocab:
        raise UserError(f"{flag}: the tokenizer has no such token; give a token's exact text, its id, or auto")
    token_id = int(mask_token) if mask_token.isdecimal() else vocab[mask_token]
    if not 0 <= token_id < target.vocab_size:
        raise UserError(f"{flag}: not in the vocabulary (0 to {target.vocab_size - 1})")
    if token_id in set(eos_ids):
        raise UserError(f"{flag}: token {token_id} ends responses; choose a token that chats lack, or auto")
    if count := int(token_counts_V[token_id]):
        raise UserError(f"{flag}: token {token_id} occurs {count} times in the data; choose an unused one, or auto")
    return token_id


def _find_unused_token(
    target: DecoderConfig, tokenizer: PreTrainedTokenizerBase | None, eos_ids: Iterable[int], token_counts_V: Tensor
) -> int:
    if tokenizer is None:
        raise UserError("--mask-token auto: the target's folder has no tokenizer to choose from; give an id")
    last = max(tokenizer.get_vocab().values(), default=-1)  # not the vocabulary's size: some tokenizers skip ids
    template = str(tokenizer.chat_template or "")
    used = {*eos_ids, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    special = [(i, str(t)) for i, t in sorted(tokenizer.added_tokens_decoder.items()) if t.special]
    unused = [i for i, text in special if i not in used and text not in template]
    reserved = [i for i, text in special if i in unused and RESERVED_TOKEN.search(text)]
    # first choice: rows of the embedding table without a token, which no tokenizer can produce. The target's end
    # tokens are excluded, because its config may name ids that its tokenizer lacks
    unnamed = [i for i in range(last + 1, target.vocab_size) if i not in used]
    for token_id in [*unnamed, *reserved, *reversed(unused)]:
        if token_id < target.vocab_size and not token_counts_V[token_id]:
            return token_id
    raise UserError("--mask-token auto: every special token of the target is in use; name a token that chats lack")


def new_drafter_config(cfg: TrainConfig, target: DecoderConfig) -> DrafterConfig:
    """The config of a drafter with the target's width and vocabulary, still without a mask token."""
    aux_layer_ids = cfg.aux_layer_ids
    if aux_layer_ids is None:
        aux_layer_ids = tuple(i for i in target.default_aux_layer_ids if i >= 0)
    if max(aux_layer_ids) > target.num_layers or min(aux_layer_ids) < 0:
        raise UserError(
            f"--aux-layer-ids {','.join(map(str, aux_layer_ids))}: this target has layers 0 to {target.num_layers}"
        )
    vocab_size = target.vocab_size if cfg.draft_vocab_size is None else cfg.draft_vocab_size
    if vocab_size > target.vocab_size:
        raise UserError(f"--draft-vocab-size {vocab_size}: the target has only {target.vocab_size} tokens")
    # the plain format has one flag for all attention biases, so the target's q/k/v biases cannot be written
    layer = replace(target.layer.as_llama, qkv_bias=False, out_bias=False, mlp_bias=False)
    if (experts := target.layer.experts) is not None:  # the active width of the target's MLP
        active = experts.num_experts_per_tok * experts.intermediate_size + experts.shared_intermediate_size
        layer = replace(layer, intermediate_size=active)
    layer = replace(layer, intermediate_size=cfg.intermediate_size or layer.intermediate_size)
    return DrafterConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=vocab_size,
        num_layers=cfg.num_layers or DEFAULT_NUM_LAYERS[cfg.method],
        layer=layer,
        rope=target.rope.as_llama,
        max_positions=target.max_positions,
        target_hidden_size=target.layer.hidden_size,
        aux_layer_ids=aux_layer_ids,
        fc_norm=cfg.fc_norm,
        own_embeddings=cfg.train_embeddings,
        own_head=cfg.train_lm_head or vocab_size != target.vocab_size,
    )


def config_from_folder(cfg: TrainConfig, target: DecoderConfig) -> DrafterConfig:
    """The config of the drafter in `--init FOLDER`, with more or wider layers if the flags ask for them."""
    folder = Path(cfg.init)
    if not folder.is_dir():
        raise UserError(f"--init {cfg.init}: must be {', '.join(INIT_MODES)}, or the folder of a drafter")
    found = read_drafter_config(folder, target)
    check_drafter_fits(found, target, folder)
    num_layers, width = found.num_layers, found.layer.intermediate_size
    for flag, given, has, may_grow in (
        ("num-layers", cfg.num_layers, num_layers, True),
        ("intermediate-size", cfg.intermediate_size, width, True),
        ("aux-layer-ids", cfg.aux_layer_ids, found.aux_layer_ids, False),
        ("draft-vocab-size", cfg.draft_vocab_size, found.draft_vocab_size, False),
    ):
        if given is not None and (given < has if may_grow else given != has):  # type: ignore[operator]
            more = " or more" if may_grow else ""
            raise UserError(f"--{flag} {given}: the drafter in {folder} has {has}; give that{more}, or no flag")
    num_layers, width = cfg.num_layers or num_layers, cfg.intermediate_size or width
    return replace(
        found,
        num_layers=num_layers,
        layer=replace(found.layer, intermediate_size=width),
        windows=found.windows and found.windows + (None,) * (num_layers - found.num_layers),
        own_embeddings=found.own_embeddings or cfg.train_embeddings,
        own_head=found.own_head or cfg.train_lm_head,
    )


def plan_drafter_config(cfg: TrainConfig, target: DecoderConfig) -> DrafterConfig:
    """The config of a run's drafter; `create_drafter` chooses the mask token."""
    return new_drafter_config(cfg, target) if cfg.init in INIT_MODES else config_from_folder(cfg, target)


def create_drafter(
    cfg: TrainConfig,
    target: Decoder,
    tokenizer: PreTrainedTokenizerBase | None,
    eos_ids: Iterable[int],
    token_counts_V: Tensor,
) -> Drafter:
    """Creates the drafter in the target's dtype and on its device, ready for training."""
    drafter_cfg = plan_drafter_config(cfg, target.cfg)
    mask_token_id = None
    if cfg.method == "p-eagle":
        mask_token = cfg.mask_token
        if drafter_cfg.mask_token_id is not None and mask_token == "auto":
            mask_token = str(drafter_cfg.mask_token_id)
        mask_token_id = choose_mask_id(mask_token, target.cfg, tokenizer, eos_ids, token_counts_V)
    drafter = Drafter(replace(drafter_cfg, mask_token_id=mask_token_id))
    _init_random(drafter, target, cfg.seed)
    if drafter.d2t is not None:
        _select_draft_vocabulary(drafter, target, token_counts_V)
    if cfg.init == "target":
        init_from_target(drafter, target)
    elif cfg.init != "random":
        _init_from_folder(drafter, Path(cfg.init), target.cfg)
    weight = target.embed_tokens.weight
    return drafter.to(weight.device, weight.dtype).share_weights(target).train().requires_grad_()


@torch.no_grad()
def _init_random(drafter: Drafter, target: Decoder, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.0 if name == "mask_hidden" else INIT_STD, generator=rng)
    if drafter.cfg.layer.hidden_size != target.cfg.layer.hidden_size:
        return  # a folder's own width, so its own embeddings and head
    logit_std = float((target.norm.weight * _column_std(target.lm_head.weight)).norm())
    drafter.norm.weight.copy_(target.norm.weight * (MAX_LOGIT_STD / max(logit_std, MAX_LOGIT_STD)))
    if drafter.embed_tokens is not None:
        drafter.embed_tokens.weight.copy_(target.embed_tokens.weight)
    if drafter.lm_head is not None and drafter.d2t is None:
        drafter.lm_head.weight.copy_(target.lm_head.weight)


def _column_std(table_VD: Tensor) -> Tensor:
    """Standard deviation of each column. The mean row moves all logits alike, so it does not count."""
    exact = torch.promote_types(table_VD.dtype, torch.float32)
    square_D = torch.linalg.vector_norm(table_VD, dim=0, dtype=exact).square() / len(table_VD)
    return (square_D - table_VD.mean(0, dtype=exact).square()).clamp(min=0).sqrt()


@torch.no_grad()
def _select_draft_vocabulary(drafter: Drafter, target: Decoder, token_counts_V: Tensor) -> None:
    """Keeps the most frequent tokens of the data; the lowest ids win ties."""
    assert drafter.d2t is not None and drafter.lm_head is not None
    order_V = token_counts_V.argsort(descending=True, stable=True)
    ids = order_V[: len(drafter.d2t)].sort().values
    drafter.d2t.copy_(ids - torch.arange(len(ids)))
    drafter.lm_head.weight.copy_(target.lm_head.weight[ids.to(target.lm_head.weight.device)])


@torch.no_grad()
def init_from_target(drafter: Drafter, target: Decoder) -> None:
    """Copies the target's last layers."""
    offset = target.cfg.num_layers - len(drafter.layers)
    if offset < 0:
        raise UserError(
            f"--num-layers {len(drafter.layers)}: the target has {target.cfg.num_layers}; use --init random"
        )
    own, theirs = drafter.state_dict(), target.state_dict()
    for name, tensor in own.items():
        if not name.startswith("layers."):
            continue
        index, _, part = name.removeprefix("layers.").partition(".")
        layer = int(index) + offset
        source = theirs.get(f"layers.{layer}.{part}", tensor)
        if source.shape == tensor.shape:
            tensor.copy_(source)
        elif len(source) != len(tensor):  # the target's layers differ in shape
            raise UserError(f"--init target: {part} has another shape in layer {layer}; use --init random")
        else:  # qkv of layer 0
            tensor.copy_(torch.cat([source, source * HIDDEN_STATE_SCALE], 1))
    own["layers.0.hidden_norm.weight"].copy_(own["layers.0.input_layernorm.weight"])


@torch.no_grad()
def _init_from_folder(drafter: Drafter, folder: Path, target: DecoderConfig) -> None:
    """Copies the folder's weights. Added layers and MLP columns output zero, so the drafter's output is unchanged. An
    EAGLE-3 drafter that becomes P-EAGLE keeps a random mask_hidden."""
    cfg = read_drafter_config(folder, target)
    found = load_unshared_drafter(folder, cfg, torch.float32).state_dict()
    own = drafter.state_dict()
    for index in range(len(drafter.layers)):
        own[f"layers.{index}.mlp.down_proj.weight"].zero_()
        if index >= cfg.num_layers:
            own[f"layers.{index}.self_attn.o_proj.weight"].zero_()
    for name, tensor in found.items():
        num_merged = 2 if ".mlp.gate_up_proj." in name else 1
        if name in own:
            for part, given in zip(own[name].chunk(num_merged), tensor.chunk(num_merged), strict=True):
                part[tuple(map(slice, given.shape))] = given
