"""BLOOM's folders as `transformers` has them: what config.json says, and which tensor is which parameter."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_pjit_recipes.errors import CheckpointError, ConfigError, did_you_mean, offenders
from t5x_pjit_recipes.examples.bloom.network import Bloom, BloomConfig
from t5x_pjit_recipes.interop.hugging_face import Folder, Weight, stack
from t5x_pjit_recipes.layout.paths import map_named

MODEL_TYPE = 'bloom'
# Each field of BloomConfig, and the names that it has in config.json, those of old files last.
NAMES = {
    'vocab_size': ('vocab_size',),
    'emb_dim': ('hidden_size', 'n_embed'),
    'num_heads': ('n_head', 'num_attention_heads'),
    'num_layers': ('n_layer', 'num_hidden_layers'),
    'layer_norm_epsilon': ('layer_norm_epsilon',),
    'residual_post_layernorm': ('apply_residual_connection_post_layernorm',),
}
OPTIONAL = ('layer_norm_epsilon', 'residual_post_layernorm')
# The table of embeddings once more, as some folders have it.
HEAD = 'lm_head.weight'
IGNORED = (HEAD,)


def read_config(content: Mapping[str, Any], dtype: Any) -> BloomConfig:
    """Turns what config.json says into our configuration.

    Args:
      content: of config.json.
      dtype: what is to be computed in.

    Raises:
      ConfigError: if it speaks of another kind of model, of a head of its own, or lacks sizes that make one.
    """
    kind = content.get('model_type')
    if kind != MODEL_TYPE:
        raise ConfigError(
            f'Cannot read a model of model_type={kind!r} as BLOOM{did_you_mean(kind, [MODEL_TYPE])}: this recipe reads '
            f'{MODEL_TYPE!r} only. Name a folder of a BLOOM or BLOOMZ.'
        )
    if not content.get('tie_word_embeddings', True):
        raise ConfigError(
            'Cannot read a BLOOM with tie_word_embeddings=False: its head is not the table of embeddings, as it is '
            'here and in all published ones. Tie them, and save the model again.'
        )
    said = {field: [content[n] for n in names if content.get(n) is not None] for field, names in NAMES.items()}
    if missing := [' or '.join(NAMES[field]) for field in NAMES if not said[field] and field not in OPTIONAL]:
        raise ConfigError(
            f'Cannot tell the sizes of a BLOOM: its config.json lacks {len(missing)} entries. Copy the file again:\n'
            f'{offenders(missing)}'
        )
    sizes = {field: values[0] for field, values in said.items() if values and field not in OPTIONAL}
    if faults := [f'{NAMES[field][0]}={size!r}' for field, size in sizes.items() if not _is_count(size)]:
        raise ConfigError(
            f'Cannot make a BLOOM of {len(faults)} sizes in config.json that are no counts from 1 on. Copy the file '
            f'again:\n{offenders(faults)}'
        )
    return BloomConfig(**{field: values[0] for field, values in said.items() if values}, dtype=dtype)


def _is_count(size: Any) -> bool:
    return isinstance(size, int) and size >= 1


def write_config(config: BloomConfig) -> dict[str, Any]:
    """Returns what config.json is to say."""
    sizes = {names[0]: getattr(config, field) for field, names in NAMES.items()}
    tokens = {'bos_token_id': 1, 'eos_token_id': 2, 'pad_token_id': 3}
    return {'model_type': MODEL_TYPE, 'architectures': ['BloomForCausalLM'], **sizes, **tokens}


def variable_shapes(config: BloomConfig) -> Any:
    """Returns the shapes of the model's variables: 'params', and 'params_axes' as they are."""
    return jax.eval_shape(Bloom(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))


def param_sources(params_shapes: Any, prefix: str = 'transformer.') -> Any:
    """Says which tensors make which parameter.

    Args:
      params_shapes: our parameters, of shapes; the tensors' shapes follow from them.
      prefix: what all names of tensors begin with.

    Returns:
      A tree like the parameters, of Weight and Stack.
    """

    def source(name: str, leaf: Any) -> Any:
        *path, kind = name.split('/')
        stacked, is_kernel = path[0] == 'h', kind == 'kernel'
        shape = leaf.shape[1:] if stacked else leaf.shape
        suffix = 'bias' if kind == 'bias' else 'weight'

        def weight(*above: str) -> Weight:
            tensor = prefix + '.'.join([*above, suffix])
            return Weight(tensor, shape[::-1], (1, 0)) if is_kernel else Weight(tensor, shape)

        return stack(lambda i: weight('h', str(i), *path[1:]), leaf.shape[0]) if stacked else weight(*path)

    return map_named(source, params_shapes)


def check_head(folder: Folder) -> None:
    """Raises CheckpointError if a folder has a head that is not the table of embeddings; both are read for it."""
    table = f'{find_prefix(folder.shapes)}word_embeddings.weight'
    if HEAD in folder.shapes and not folder.are_equal(HEAD, table):
        raise CheckpointError(
            f'Cannot read {str(folder.path)!r} as a BLOOM: its {HEAD} {folder.shapes[HEAD].shape} is not {table} '
            f'{folder.shapes[table].shape}, which serves as the head here and in all published ones. Tie them, and '
            'save the model again.'
        )


def find_prefix(names: Mapping[str, Any]) -> str:
    """Tells whether names begin with 'transformer.', as BloomForCausalLM's do, or are BloomModel's.

    >>> find_prefix({'transformer.ln_f.bias': 0}), find_prefix({'ln_f.bias': 0})
    ('transformer.', '')
    """
    return 'transformer.' if any(name.startswith('transformer.') for name in names) else ''
