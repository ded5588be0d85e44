"""Hugging Face's T5 in the words of ours: config.json as a T5Config and back, tensors as parameters.

How logits come about has two sides. They use the table of embeddings (*tied*), or a head of their own; and the stream
is divided by sqrt(d_model) before them (*scaled*), or not. T5 is tied and scaled; T5 1.1, ByT5, mT5 and Flan-T5 are
neither. `transformers` 5 ties whenever a folder has no head of its own, whatever `tie_word_embeddings` says; that entry
(or `scale_decoder_outputs`, where it is there) only says whether T5 is scaled, and mT5 never is.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from t5x_pjit_recipes.errors import ConfigError, offenders
from t5x_pjit_recipes.examples.t5.network import T5Config
from t5x_pjit_recipes.interop.hugging_face import Weight

TABLES = ('shared.weight', 'encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
HEAD = 'lm_head.weight'
# In T5's first checkpoints, which do not use it.
UNUSED = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'

ARCHITECTURES = {'t5': 'T5ForConditionalGeneration', 'mt5': 'MT5ForConditionalGeneration'}
SIZES = {
    'vocab_size': 'vocab_size', 'emb_dim': 'd_model', 'num_heads': 'num_heads', 'num_encoder_layers': 'num_layers',
    'head_dim': 'd_kv', 'mlp_dim': 'd_ff',
}  # fmt: skip
ACTIVATIONS = {'relu': 'relu', 'gelu_new': 'gelu', 'silu': 'silu'}
FIXED = {
    'is_encoder_decoder': True,
    'layer_norm_epsilon': 1e-6,
    'relative_attention_max_distance': 128,
    'relative_attention_num_buckets': 32,
}
SPECIAL_IDS = {'decoder_start_token_id': 0, 'pad_token_id': 0, 'eos_token_id': 1}


def network_config(config: Mapping[str, Any], *, has_head: bool | None = None) -> T5Config:
    """Says which T5 of ours a config.json describes.

    Args:
      config: what config.json says.
      has_head: whether there is an `lm_head.weight` of its own; None takes `tie_word_embeddings` for it.

    Raises:
      ConfigError: listing everything that our T5 cannot do.

    >>> sizes = {'vocab_size': 384, 'd_model': 8, 'd_kv': 4, 'd_ff': 16, 'num_layers': 2, 'num_heads': 2}
    >>> network_config({'model_type': 't5', **sizes, 'feed_forward_proj': 'gated-gelu'}).mlp_activations
    ('gelu', 'linear')
    """
    if faults := list(_faults(config)):
        raise ConfigError(
            f'Cannot make a T5 of a config.json with {len(faults)} entries that our T5 has no counterpart for. Use a '
            f'folder of T5, T5 1.1, ByT5, mT5, Flan-T5 or UL2:\n{offenders(faults)}'
        )
    has_head = not config.get('tie_word_embeddings', True) if has_head is None else has_head
    scaled = config['model_type'] == 't5' and bool(
        config.get('scale_decoder_outputs', config.get('tie_word_embeddings', True))
    )
    activation, gated = _feed_forward(config)
    return T5Config(
        **{ours: config[theirs] for ours, theirs in SIZES.items()},
        num_decoder_layers=_decoder_layers(config),
        mlp_activations=(ACTIVATIONS[activation], 'linear') if gated else (ACTIVATIONS[activation],),
        dropout_rate=config.get('dropout_rate', 0.1),
        logits_via_embedding=not has_head,
        scale_logits=None if scaled != has_head else scaled,
    )


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    kind = config.get('model_type')
    if kind not in ARCHITECTURES:
        yield f'model_type={kind!r}: only {" and ".join(map(repr, ARCHITECTURES))} are known'
    for name, value in FIXED.items():
        if config.get(name, value) != value:
            yield f'{name}={config[name]!r}: it is {value!r} here'
    for name in SIZES.values():
        if not _is_count(config.get(name)):
            yield f'{name}={config.get(name)!r}: a number from 1 on is needed'
    if (layers := config.get('num_decoder_layers')) is not None and not _is_count(layers):
        yield f'num_decoder_layers={layers!r}: a number from 1 on is needed'
    if not isinstance(rate := config.get('dropout_rate', 0.0), int | float) or not 0 <= rate < 1:
        yield f'dropout_rate={rate!r}: a number from 0 to less than 1 is needed'
    activation, _ = _feed_forward(config)
    if activation not in ACTIVATIONS:
        yield f'feed_forward_proj: its activation is {activation!r}, and only {", ".join(ACTIVATIONS)} are known'


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _decoder_layers(config: Mapping[str, Any]) -> Any:
    layers = config.get('num_decoder_layers')
    return config.get('num_layers') if layers is None else layers


def _feed_forward(config: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the activation by the name that transformers has for it, and whether a linear branch gates it."""
    name = str(config.get('feed_forward_proj') or 'relu')
    activation, gated = name.removeprefix('gated-'), name.startswith('gated-')
    activation = 'gelu_new' if name == 'gated-gelu' else activation
    return config.get('dense_act_fn') or activation, bool(config.get('is_gated_act', gated))


def folder_config(config: T5Config, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Says what config.json is to say, for `transformers` 5 and, save for one kind, for 4 as well.

    `transformers` 4 scales just what is tied, so it cannot load a T5 that is one of the two only.

    Args:
      config: our T5.
      like: entries of another config.json, which stay where our T5 does not decide them.

    Raises:
      ConfigError: if `transformers` has no such feed-forward block.
    """
    like = like or {}
    scaled = config.logits_are_scaled
    kind = 'mt5' if like.get('model_type') == 'mt5' and not scaled else 't5'
    return {
        **SPECIAL_IDS,
        **like,
        **FIXED,
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        **_feed_forward_entries(config.mlp_activations),
        'num_decoder_layers': config.num_decoder_layers,
        'dropout_rate': config.dropout_rate,
        'tie_word_embeddings': scaled,
        'scale_decoder_outputs': scaled,
        'model_type': kind,
        'architectures': [ARCHITECTURES[kind]],
    }


def _feed_forward_entries(activations: tuple[str, ...]) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    activation, *gate = activations
    if activation not in names or gate not in ([], ['linear']):
        raise ConfigError(
            f'Cannot write a T5 with mlp_activations={activations} for transformers: it has none but '
            f"{', '.join(names)}, alone or followed by 'linear'. Train one of these."
        )
    theirs = names[activation]
    title = f'gated-{"gelu" if theirs == "gelu_new" else theirs}' if gate else theirs
    return {'feed_forward_proj': title, 'dense_act_fn': theirs, 'is_gated_act': bool(gate)}


def sources(config: T5Config, *, table: str = TABLES[0]) -> dict[str, Any]:
    """Says for each parameter of our T5 which tensor it is, and of what shape.

    Args:
      config: our T5.
      table: the tensor of the embeddings.

    Returns:
      A tree of Weight, with the names of T5X's parameters.
    """
    tree = {
        'token_embedder': {'embedding': Weight(table, split=(config.vocab_size, config.emb_dim))},
        'encoder': _stack(config, 'encoder', config.num_encoder_layers),
        'decoder': _stack(config, 'decoder', config.num_decoder_layers),
    }
    if not config.logits_via_embedding:
        tree['decoder']['logits_dense'] = _dense(HEAD.removesuffix('.weight'), config.emb_dim, config.vocab_size)
    return tree


def _stack(config: T5Config, side: str, layers: int) -> dict[str, Any]:
    layer = _encoder_layer if side == 'encoder' else _decoder_layer
    bias = f'{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
    buckets = FIXED['relative_attention_num_buckets']
    return {
        'relpos_bias': {'rel_embedding': Weight(bias, split=(buckets, config.num_heads), order=(1, 0))},
        **{f'layers_{i}': layer(config, f'{side}.block.{i}.layer') for i in range(layers)},
        f'{side}_norm': _norm(config, f'{side}.final_layer_norm'),
    }


def _encoder_layer(config: T5Config, name: str) -> dict[str, Any]:
    return {
        'pre_attention_layer_norm': _norm(config, f'{name}.0.layer_norm'),
        'attention': _attention(config, f'{name}.0.SelfAttention'),
        'pre_mlp_layer_norm': _norm(config, f'{name}.1.layer_norm'),
        'mlp': _mlp(config, f'{name}.1.DenseReluDense'),
    }


def _decoder_layer(config: T5Config, name: str) -> dict[str, Any]:
    return {
        'pre_self_attention_layer_norm': _norm(config, f'{name}.0.layer_norm'),
        'self_attention': _attention(config, f'{name}.0.SelfAttention'),
        'pre_cross_attention_layer_norm': _norm(config, f'{name}.1.layer_norm'),
        'encoder_decoder_attention': _attention(config, f'{name}.1.EncDecAttention'),
        'pre_mlp_layer_norm': _norm(config, f'{name}.2.layer_norm'),
        'mlp': _mlp(config, f'{name}.2.DenseReluDense'),
    }


def _attention(config: T5Config, name: str) -> dict[str, Any]:
    width, joined = config.emb_dim, config.num_heads * config.head_dim
    return {
        'query': _dense(f'{name}.q', width, joined),
        'key': _dense(f'{name}.k', width, joined),
        'value': _dense(f'{name}.v', width, joined),
        'out': _dense(f'{name}.o', joined, width),
    }


def _mlp(config: T5Config, name: str) -> dict[str, Any]:
    gated = len(config.mlp_activations) > 1
    inner = ('wi_0', 'wi_1') if gated else ('wi',)
    return {
        **{wi: _dense(f'{name}.{wi}', config.emb_dim, config.mlp_dim) for wi in inner},
        'wo': _dense(f'{name}.wo', config.mlp_dim, config.emb_dim),
    }


def _dense(name: str, inputs: int, outputs: int) -> dict[str, Weight]:
    return {'kernel': Weight(f'{name}.weight', split=(outputs, inputs), order=(1, 0))}


def _norm(config: T5Config, name: str) -> dict[str, Weight]:
    return {'scale': Weight(f'{name}.weight', split=(config.emb_dim,))}
