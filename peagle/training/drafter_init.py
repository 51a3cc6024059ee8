"""New drafters for a target: their shape, their mask token, the weights they start from.

Knows nothing about training. A mask token is one that the target's chats never hold: the drafter must never meet it
as a real token, so the data is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from peagle.checkpoints.drafter import check_drafter_fits, load_unshared_drafter, read_drafter_config
from peagle.config import DecoderConfig, DrafterConfig, TrainConfig
from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESERVED = re.compile(r"reserved|unused|empty|placeholder|extra_id|mask", re.IGNORECASE)
NOISE = 0.02  # of random matrices
FRESH = ("target", "target-first", "random")  # what `--init` may be, beside a folder
# Layer 0 reads two things where the target's layer reads one: the embedding through the same weights, the target's
# state quietly, so that what fc makes of it at first does not drown the token. Found by trying on a small target.
STATE_SHARE = 0.1
# How far logits of random states may spread. Gemma's last norm is large (45 for the 270m; 4.4 for SmolLM2): a drafter
# that began with it would be certain of nonsense, and the optimizer's small steps would take long to tell it so.
LOGIT_SPREAD = 5.0


@dataclass(frozen=True)
class TokenCounts:
    """How often the data holds each token, prompts and all."""

    count_V: Tensor

    @classmethod
    def of(cls, examples: ResponseDataset, vocab: int) -> TokenCounts:
        """Of all rows of the files, also those that are kept aside."""
        return cls(torch.from_numpy(np.bincount(examples.token_T, minlength=vocab)))

    def holds(self, token: int) -> bool:
        return bool(self.count_V[token])


def choose_mask_id(
    given: str,
    target: DecoderConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    eos_ids: Iterable[int],
    data: TokenCounts,
) -> int:
    """The id of `--mask-token`: a text, an id, or for auto a reserved token that the data does not hold."""
    if given != "auto":
        return _named_mask_id(given, target, tokenizer, eos_ids, data)
    if tokenizer is None:
        raise UserError("--mask-token auto: the target's folder has no tokenizer to choose from; give an id")
    last = max(tokenizer.get_vocab().values(), default=-1)  # not their number: some leave ids out
    template = str(tokenizer.chat_template or "")
    meant = {*eos_ids, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    special = [(i, str(t)) for i, t in sorted(tokenizer.added_tokens_decoder.items()) if t.special]
    spare = [i for i, text in special if i not in meant and text not in template]
    reserved = [i for i, text in special if i in spare and RESERVED.search(text)]
    # rows of the embedding table that no token has come first: nothing can ever make them but the target, whose end
    # tokens stand in a file of their own and need not be its tokenizer's
    unnamed = [i for i in range(last + 1, target.vocab_size) if i not in meant]
    for token in [*unnamed, *reserved, *reversed(spare)]:
        if token < target.vocab_size and not data.holds(token):
            return token
    raise UserError("--mask-token auto: every special token of the target is in use; name one that chats never hold")


def _named_mask_id(
    given: str,
    target: DecoderConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    eos_ids: Iterable[int],
    data: TokenCounts,
) -> int:
    asked = f"--mask-token {given}"
    if given.isdecimal():
        token = int(given)
    else:
        vocab = tokenizer.get_vocab() if tokenizer is not None else {}
        if given not in vocab:
            raise UserError(f"{asked}: the tokenizer has no such token; give a token's exact text, its id, or auto")
        token = vocab[given]
    if not 0 <= token < target.vocab_size:
        raise UserError(f"{asked}: not in the vocabulary (0 to {target.vocab_size - 1})")
    if token in set(eos_ids):
        raise UserError(f"{asked}: token {token} ends texts; choose one that chats never hold, or auto")
    if data.holds(token):
        times = int(data.count_V[token])
        raise UserError(f"{asked}: the data holds token {token} {times} times; choose one it never holds, or auto")
    return token


def drafter_config(cfg: TrainConfig, target: DecoderConfig, mask_id: int | None) -> DrafterConfig:
    """A drafter as wide as its target (its MLPs may be wider), reading and saying what the target reads and says."""
    aux_layer_ids = (
        cfg.aux_layer_ids if cfg.aux_layer_ids is not None else tuple(t for t in target.default_aux_layer_ids if t >= 0)
    )
    if max(aux_layer_ids) > target.num_layers or min(aux_layer_ids) < 0:
        raise UserError(
            f"--aux-layer-ids {','.join(map(str, aux_layer_ids))}: this target has layers 0 to {target.num_layers}"
        )
    vocab = target.vocab_size if cfg.draft_vocab is None else cfg.draft_vocab
    if vocab > target.vocab_size:
        raise UserError(f"--draft-vocab {vocab}: the target has only {target.vocab_size} tokens")
    # the plain format has one flag for all biases of attention, so a target's q/k/v biases could not be written
    layer = replace(target.layer.as_llama, qkv_bias=False, out_bias=False, mlp_bias=False)
    if (experts := target.layer.experts) is not None:  # as wide as what a token goes to there
        layer = replace(
            layer,
            intermediate_size=experts.num_experts_per_tok * experts.intermediate_size
            + experts.shared_intermediate_size,
        )
    layer = replace(layer, intermediate_size=cfg.mlp_width or layer.intermediate_size)
    return DrafterConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=vocab,
        num_layers=cfg.num_layers,
        layer=layer,
        rope=target.rope.as_llama,
        max_positions=target.max_positions,
        target_hidden_size=target.layer.hidden_size,
        aux_layer_ids=aux_layer_ids,
        mask_token_id=mask_id,
        fc_norm=cfg.fc_norm,
        own_embeddings=cfg.own_embeddings,
        own_head=cfg.own_head or vocab != target.vocab_size,
    )


def config_from_folder(cfg: TrainConfig, target: DecoderConfig) -> DrafterConfig:
    """Of the drafter that `--init` names, which decides its own shape; it may be given more layers, and wider ones."""
    folder = Path(cfg.init)
    if not folder.is_dir():
        raise UserError(f"--init {cfg.init}: must be {', '.join(FRESH)}, or the folder of a drafter")
    found = read_drafter_config(folder, target)
    check_drafter_fits(found, target, folder)
    layers, width = found.num_layers, found.layer.intermediate_size
    for flag, more, has in (("layers", cfg.layers, layers), ("mlp-width", cfg.mlp_width, width)):
        if more is not None and more < has:
            raise UserError(f"--{flag} {more}: the drafter in {folder} has {has}; give as many, more, or none")
    layers, width = cfg.layers or layers, cfg.mlp_width or width
    for flag, asked, fixed in (
        ("aux_layer_ids", cfg.aux_layer_ids, found.aux_layer_ids),
        ("draft-vocab", cfg.draft_vocab, found.draft_vocab_size),
    ):
        if asked is not None and asked != fixed:
            raise UserError(f"--{flag} {asked}: the drafter in {folder} has {fixed}; leave the flag out")
    return replace(
        found,
        num_layers=layers,
        layer=replace(found.layer, intermediate_size=width),
        windows=found.windows and found.windows + (None,) * (layers - found.num_layers),
        own_embeddings=found.own_embeddings or cfg.own_embeddings,
        own_head=found.own_head or cfg.own_head,
    )


def create_drafter(
    cfg: TrainConfig,
    target: Decoder,
    tokenizer: PreTrainedTokenizerBase | None,
    eos_ids: Iterable[int],
    data: TokenCounts,
) -> Drafter:
    """In the target's dtype, on its device, ready to be trained."""
    from_folder = cfg.init not in FRESH
    shape = config_from_folder(cfg, target.cfg) if from_folder else drafter_config(cfg, target.cfg, None)
    if cfg.method == "p-eagle":
        given = cfg.mask_token
        if shape.mask_token_id is not None and given == "auto":
            given = str(shape.mask_token_id)
        shape = replace(shape, mask_token_id=choose_mask_id(given, target.cfg, tokenizer, eos_ids, data))
    else:
        shape = replace(shape, mask_token_id=None)
    drafter = Drafter(shape)
    _start_random(drafter, target, cfg.seed)
    if drafter.d2t is not None:
        _use_frequent(drafter, target, data)
    if cfg.init in ("target", "target-first"):
        init_from_target(drafter, target, first=cfg.init == "target-first")
    if from_folder:
        _start_from_folder(drafter, Path(cfg.init), target.cfg)
    weight = target.embed_tokens.weight
    return drafter.to(weight.device, weight.dtype).share_weights(target).train().requires_grad_()


@torch.no_grad()
def _start_random(drafter: Drafter, target: Decoder, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.0 if name == "mask_hidden" else NOISE, generator=rng)
    if drafter.cfg.layer.hidden_size != target.cfg.layer.hidden_size:
        return  # a folder's own width, so its own tables too
    # the target's, since it feeds the target's own head
    spread = float((target.norm.weight * _spread(target.lm_head.weight)).norm())
    drafter.norm.weight.copy_(target.norm.weight * (LOGIT_SPREAD / max(spread, LOGIT_SPREAD)))
    if drafter.embed_tokens is not None:
        drafter.embed_tokens.weight.copy_(target.embed_tokens.weight)
    if drafter.lm_head is not None and drafter.d2t is None:  # of a reduced vocabulary it waits for the data
        drafter.lm_head.weight.copy_(target.lm_head.weight)


def _spread(table_VD: Tensor) -> Tensor:
    """How far the rows are from their mean, which would move all logits alike: the deviation of each column."""
    exact = torch.promote_types(table_VD.dtype, torch.float32)
    square_D = torch.linalg.vector_norm(table_VD, dim=0, dtype=exact).square() / len(table_VD)
    return (square_D - table_VD.mean(0, dtype=exact).square()).clamp(min=0).sqrt()


@torch.no_grad()
def _use_frequent(drafter: Drafter, target: Decoder, data: TokenCounts) -> None:
    """The head's rows of the tokens the data holds most; of equals the lowest ids."""
    assert drafter.d2t is not None and drafter.lm_head is not None
    order_V = data.count_V.argsort(descending=True, stable=True)
    ids = order_V[: len(drafter.d2t)].sort().values
    drafter.d2t.copy_(ids - torch.arange(len(ids)))
    drafter.lm_head.weight.copy_(target.lm_head.weight[ids.to(target.lm_head.weight.device)])


@torch.no_grad()
def init_from_target(drafter: Drafter, target: Decoder, first: bool) -> None:
    """The target's own layers, one after another: its last ones, or its first."""
    missing = target.cfg.num_layers - len(drafter.layers)
    if missing < 0:
        raise UserError(f"--layers {len(drafter.layers)}: the target has {target.cfg.num_layers}; use --init random")
    own, theirs = drafter.state_dict(), target.state_dict()
    for name, tensor in own.items():
        number, _, part = name.removeprefix("layers.").partition(".")
        if not name.startswith("layers."):
            continue
        source = theirs.get(f"layers.{int(number) + (0 if first else missing)}.{part}")
        if source is not None and source.shape == tensor.shape:
            tensor.copy_(source)
        elif source is not None and len(source) != len(tensor):  # layers of this target differ among themselves
            raise UserError(f"--init {'target-first' if first else 'target'}: {part} has another shape; use random")
        elif source is not None:  # layer 0's q/k/v
            tensor.copy_(torch.cat([source, source * STATE_SHARE], 1))
    own["layers.0.hidden_norm.weight"].copy_(own["layers.0.input_layernorm.weight"])


@torch.no_grad()
def _start_from_folder(drafter: Drafter, folder: Path, target: DecoderConfig) -> None:
    """What the folder has. Layers behind its own say nothing yet, nor do new parts of a wider MLP, so that all of it
    says what it said; of an EAGLE-3 drafter that becomes P-EAGLE the mask's hidden state stays new."""
    cfg = read_drafter_config(folder, target)
    found = load_unshared_drafter(folder, cfg, torch.float32).state_dict()
    own = drafter.state_dict()
    for number in range(len(drafter.layers)):
        own[f"layers.{number}.mlp.down_proj.weight"].zero_()
        if number >= cfg.num_layers:
            own[f"layers.{number}.self_attn.o_proj.weight"].zero_()
    for name, tensor in found.items():
        if name not in own:
            continue
        into, theirs = [own[name]], [tensor]
        if ".mlp.gate_up_proj." in name:
            into, theirs = list(own[name].chunk(2)), list(tensor.chunk(2))
        for part, given in zip(into, theirs, strict=True):
            part[tuple(map(slice, given.shape))] = given
