"""BLOOM and BLOOMZ of every size: weights from a folder straight into shards, text from several devices, and rules.

`load`, `make_generate` and `generate_text` run our own BLOOM (`examples.bloom`), laid out by its axis names. `rules`
are for parameters under the names of Hugging Face's models. There the dims inside attention and MLPs, and the words
(250880 of them, which 512 divides), are split over `model`; the width of the model over `data`. Biases are split where
what they are added to is; norms and the other biases stay whole.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import ConfigError, did_you_mean
from t5x_pjit_recipes.examples.bloom.network import Bloom
from t5x_pjit_recipes.interop import hugging_face
from t5x_pjit_recipes.interop.tokenizer_files import TOKENIZER_FILE, read_tokenizer
from t5x_pjit_recipes.layout import Plan, check_placement, describe_placement
from t5x_pjit_recipes.recipes import bloom_folders
from t5x_pjit_recipes.recipes.generation import (
    Sampling,
    Tokens,
    check_heads,
    check_prompts,
    make_generate,
    pad_prompts,
    plan_cache,
)
from t5x_pjit_recipes.recipes.rule_sets import make_rules
from t5x_pjit_recipes.reports import describe_parts
from t5x_pjit_recipes.train_state import InferenceState

__all__ = [
    'RULES',
    'Bloom',
    'Sampling',
    'Tokenizer',
    'complete',
    'generate_text',
    'load',
    'load_tokenizer',
    'make_generate',
    'plan_cache',
    'plan_folder',
    'plan_model',
    'rules',
    'save',
]

Path = str | os.PathLike[str]
DTYPES = ('bfloat16', 'float16', 'float32')

RULES = (
    (r'(.*/)?word_embeddings/embedding', P('model', 'data')),
    (r'(.*/)?lm_head/kernel', P('data', 'model')),
    (r'.*/self_attention/query_key_value/kernel', P('data', 'model')),
    (r'.*/self_attention/query_key_value/bias', P('model')),
    (r'.*/self_attention/dense/kernel', P('model', 'data')),
    (r'.*/mlp/dense_h_to_4h/kernel', P('data', 'model')),
    (r'.*/mlp/dense_h_to_4h/bias', P('model')),
    (r'.*/mlp/dense_4h_to_h/kernel', P('model', 'data')),
    (r'.*/(dense|dense_4h_to_h)/bias', P()),
    (r'.*layernorm/(scale|bias)', P()),
    (r'(.*/)?ln_f/(scale|bias)', P()),
)
rules = make_rules(RULES)


def plan_model(module: Bloom, partitioner: Any) -> tuple[InferenceState, Plan]:
    """Plans a BLOOM whose parameters are of the dtype that it computes in; the mesh may be abstract.

    Returns:
      Its state, of shapes, with logical axes; and the plan of its parameters.

    Raises:
      MeshError: if the heads do not divide.
    """
    config = module.config
    check_heads(config.num_heads, partitioner)
    variables = bloom_folders.variable_shapes(config)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, config.dtype), variables['params'])
    state = InferenceState.create({**variables, 'params': shapes})
    specs, rules = partitioner.get_mesh_axes(state).params, partitioner.get_derivation(state)
    return state, Plan(shapes, specs, partitioner.mesh, rules=rules)


def plan_folder(folder: Path, partitioner: Any, *, dtype: Any = jnp.bfloat16) -> tuple[Bloom, InferenceState, Plan]:
    """Plans what `load` would place; no weight is read.

    Args:
      folder: a BLOOM as `transformers` saves it.
      partitioner: lays it out.
      dtype: what parameters are to be and the model computes in.

    Returns:
      The model; its state, of shapes; and the plan of its parameters.

    Raises:
      CheckpointError: listing all tensors that are missing, of another shape, or not wanted.
      ConfigError: if the folder holds another kind of model.
      MeshError: if the heads do not divide.
    """
    module, state, plan, _ = _plan_opened(hugging_face.Folder(folder), partitioner, dtype)
    return module, state, plan


def _plan_opened(folder: hugging_face.Folder, partitioner: Any, dtype: Any) -> tuple[Bloom, InferenceState, Plan, Any]:
    """Plans as `plan_folder`, and says which tensors make which parameter."""
    module = Bloom(bloom_folders.read_config(folder.config, dtype))
    state, plan = plan_model(module, partitioner)
    sources = bloom_folders.param_sources(state.params, bloom_folders.find_prefix(folder.shapes))
    hugging_face.folder_shapes(folder, sources, ignored=bloom_folders.IGNORED)
    return module, state, plan, sources


def load(folder: Path, partitioner: Any, *, dtype: Any = jnp.bfloat16) -> tuple[Bloom, InferenceState]:
    """Reads a BLOOM straight into shards: each device's part by itself, nothing whole anywhere.

    Args:
      folder: a BLOOM as `transformers` saves it.
      partitioner: lays it out.
      dtype: what parameters are to be and the model computes in: bfloat16 as published, or float32.

    Returns:
      The model, and its state with logical axes, placed.

    Raises:
      CheckpointError, ConfigError, MeshError: as `plan_folder`.
      PlanError: if parameters do not divide.
    """
    opened = hugging_face.Folder(folder)
    module, state, plan, sources = _plan_opened(opened, partitioner, dtype)
    bloom_folders.check_head(opened)
    params = hugging_face.load_params(opened, sources, plan)
    return module, state.replace(params=params)


def save(folder: Path, module: Bloom, params: Any) -> None:
    """Writes a folder that `load` and `transformers` read.

    Args:
      folder: the folder; it must not hold weights already.
      module: the model.
      params: its parameters, in the dtype that is to be written.
    """
    sources = bloom_folders.param_sources(params)
    hugging_face.save_folder(folder, bloom_folders.write_config(module.config), sources, params)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of the library `tokenizers`, with the methods that those of `transformers` have."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Turns a text into ids."""
        return self.tokenizer.encode(text).ids

    def decode(self, ids: Tokens, skip_special_tokens: bool = True) -> str:
        """Turns ids into a text."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Loads the tokenizer.json that lies in the folder, or returns None where there is none.

    Raises:
      ConfigError, DataError: as `tokenizer_files.read_tokenizer`.
    """
    tokenizer = read_tokenizer(folder)
    return None if tokenizer is None else Tokenizer(tokenizer)


def generate_text(
    generate: Callable[..., list[list[int]]],
    state: InferenceState,
    *,
    prompts: Sequence[str | Tokens],
    tokenizer: Any = None,
    rng: jax.Array | None = None,
) -> list[str | list[int]]:
    """Continues texts.

    Args:
      generate: what `make_generate` returned.
      state: the state.
      prompts: texts, or lists of ids.
      tokenizer: what `load_tokenizer` returned, or one of `transformers`; None if prompts are ids.
      rng: the key to draw with, unless sampling is greedy.

    Returns:
      What follows each prompt: a text for a text, ids for ids.

    Raises:
      ConfigError: if there are texts and no tokenizer.
    """
    found = generate(state, encode_prompts(prompts, tokenizer), rng)
    return [
        tokenizer.decode(new, skip_special_tokens=True) if isinstance(prompt, str) else new
        for prompt, new in zip(prompts, found, strict=True)
    ]


def encode_prompts(prompts: Sequence[str | Tokens], tokenizer: Any) -> list[Tokens]:
    """Turns texts into ids; ids stay.

    Raises:
      ConfigError: if there are texts and no tokenizer, or one text that is in no list.
    """
    if isinstance(prompts, str):
        raise ConfigError(f'Cannot read prompts={prompts!r}: they are one text. Put it in a list: {[prompts]}.')
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts and tokenizer is None:
        raise ConfigError(
            f'Cannot read {len(texts)} of {len(prompts)} prompts, such as {texts[0]!r}: they are texts, and the folder '
            f'has no {TOKENIZER_FILE}. Put it there, or give lists of ids.'
        )
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def complete(
    folder: Path,
    prompts: Sequence[str | Tokens],
    *,
    partitioner: Any,
    sampling: Sampling,
    dtype: str = 'bfloat16',
    random_seed: int = 0,
) -> list[str | list[int]]:
    """Continues prompts by the BLOOM in a folder, and prints all of it: mesh, plan, placement and text.

    Args:
      folder: a BLOOM as `transformers` saves it.
      prompts: texts if the folder has a tokenizer, or lists of ids.
      partitioner: lays it out.
      sampling: how tokens are drawn.
      dtype: one of `DTYPES`, for parameters and computing.
      random_seed: seeds the drawing.

    Returns:
      As `generate_text`.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            f'Cannot read weights as dtype={dtype!r}{did_you_mean(dtype, DTYPES)}: it is none of '
            f'{", ".join(DTYPES)}. Use one of these.'
        )
    tokenizer = load_tokenizer(folder)
    module, shapes, plan = plan_folder(folder, partitioner, dtype=jnp.dtype(dtype))
    cache = _plan_cache_for(encode_prompts(prompts, tokenizer), module, partitioner, sampling)
    params = Plan(plan.shapes, plan.specs, plan.mesh)  # Without the rules: the table has room for one line each.
    print(describe_parts({'params': params, 'key/value cache': cache}))
    module, state = load(folder, partitioner, dtype=jnp.dtype(dtype))
    check_placement(state.params, plan)
    print(f'\nplaced as planned:\n{describe_placement(state.params)}')
    generate = make_generate(module, partitioner, state=shapes, sampling=sampling)
    rng = jax.random.key(random_seed)
    found = generate_text(generate, state, prompts=prompts, tokenizer=tokenizer, rng=rng)
    for prompt, new in zip(prompts, found, strict=True):
        print(f'\n{prompt} -> {new}')
    return found


def _plan_cache_for(prompts: Sequence[Tokens], module: Bloom, partitioner: Any, sampling: Sampling) -> Plan:
    check_prompts(prompts, module.config.vocab_size)
    tokens, *_ = pad_prompts(prompts, sampling.max_new_tokens, partitioner.data_mesh_size)
    rows, length = tokens.shape
    return plan_cache(module, partitioner, rows=rows, length=length + sampling.max_new_tokens - 1)


if __name__ == '__main__':
    from t5x_pjit_recipes.recipes import bloom as script
    from t5x_pjit_recipes.recipes import scripts

    scripts.run(script.complete)
