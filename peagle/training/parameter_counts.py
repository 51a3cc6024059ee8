"""Parameter counts of targets and drafters, from their configs."""

from __future__ import annotations

from dataclasses import replace

from peagle.config import DecoderConfig, DrafterConfig, LayerConfig


def count_layer_parameters(layer: LayerConfig, input_size: int) -> int:
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    attention = input_size * (q + 2 * kv) + q * layer.hidden_size + layer.attention_sinks * layer.num_heads
    biases = layer.qkv_bias * (q + 2 * kv) + layer.out_bias * layer.hidden_size
    biases += layer.mlp_bias * (2 * layer.intermediate_size + layer.hidden_size)
    norms = (2 + 2 * layer.output_norms) * layer.hidden_size + layer.qk_norm * 2 * layer.head_dim
    return attention + _count_mlp_parameters(layer) + norms + biases + layer.layer_scalar


def _count_mlp_parameters(layer: LayerConfig) -> int:
    experts, width = layer.experts, layer.hidden_size
    if experts is None:
        return 3 * width * layer.intermediate_size
    biases = experts.bias * (2 * experts.intermediate_size + width + 1)
    expert = 3 * width * experts.intermediate_size + width + biases
    return experts.num_experts * expert + 3 * width * experts.shared_intermediate_size


def active_layer(layer: LayerConfig) -> LayerConfig:
    """The layer with only the experts that one token activates."""
    experts = layer.experts
    if experts is None:
        return layer
    return replace(layer, experts=replace(experts, num_experts=experts.num_experts_per_tok))


def count_decoder_parameters(cfg: DecoderConfig) -> int:
    return count_decoder_layers(cfg) + count_decoder_head(cfg)


def count_decoder_layers(cfg: DecoderConfig) -> int:
    return sum(count_layer_parameters(cfg.layer_at(i), cfg.layer.hidden_size) for i in range(cfg.num_layers))


def count_decoder_head(cfg: DecoderConfig) -> int:
    """Embeddings, LM head and final norm: all that training needs if hidden states are on disk."""
    return (1 if cfg.tie_word_embeddings else 2) * cfg.vocab_size * cfg.layer.hidden_size + cfg.layer.hidden_size


def count_trainable_parameters(cfg: DrafterConfig) -> int:
    width = cfg.layer.hidden_size
    layers = count_layer_parameters(cfg.layer, 2 * width) + width  # layer 0 has one more norm
    layers += (cfg.num_layers - 1) * count_layer_parameters(cfg.layer, width)
    small = width + (cfg.aux_hidden_size if cfg.parallel else 0)
    small += cfg.aux_hidden_size * (cfg.fc_norm + cfg.norm_before_fc)
    embeddings = cfg.own_embeddings * cfg.vocab_size * width + cfg.own_head * cfg.draft_vocab_size * width
    return layers + cfg.aux_hidden_size * width + small + embeddings


def count_muon_parameters(cfg: DrafterConfig) -> int:
    """Parameters of the matrices that Muon updates."""
    width, heads = cfg.layer.hidden_size, cfg.layer.num_heads * cfg.layer.head_dim
    qkv = heads + 2 * cfg.layer.num_kv_heads * cfg.layer.head_dim
    per_layer = width * (heads + 3 * cfg.layer.intermediate_size)
    # the qkv weight of layer 0 is twice as wide
    return cfg.aux_hidden_size * width + cfg.num_layers * per_layer + (cfg.num_layers + 1) * width * qkv


def count_shared_parameters(cfg: DrafterConfig, target: DecoderConfig) -> int:
    """Embeddings and LM head that the drafter shares with the target."""
    shared = (not cfg.own_embeddings) + (not cfg.own_head)
    return (1 if target.tie_word_embeddings and shared else shared) * cfg.vocab_size * cfg.layer.hidden_size


def largest_trainable_matrix(cfg: DrafterConfig) -> int:
    rows = max(cfg.own_embeddings * cfg.vocab_size, cfg.own_head * cfg.draft_vocab_size)
    return cfg.layer.hidden_size * max(rows, 2 * cfg.layer.intermediate_size, cfg.aux_hidden_size)
