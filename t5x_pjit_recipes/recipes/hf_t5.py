"""Hugging Face's T5, T5 1.1, ByT5, mT5, Flan-T5 and UL2: rules, and folders read into our T5 and written back.

`transformers` 5 has no Flax models any more; here is where their users go. `load` reads a folder, as `save_pretrained`
writes it, straight into the shards of our T5 (`examples.t5`, with T5X's parameter tree and axis names), `save` and
`export` write one that `transformers` loads, and gin/recipes/finetune_hf_t5.gin trains in between. What remains of the
Flax models are the names of their parameters, which `rules` knows: for parameters that you hold under them.

The rules split the dims inside attention and MLPs, and the words, over `model`; the width of the model over `data`.
Norms stay whole, and so do the relative position biases, (buckets, heads), which are small.
"""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.checkpoints import stored
from t5x_pjit_recipes.errors import CheckpointError, ConfigError, offenders, warn
from t5x_pjit_recipes.examples.t5.network import T5Config, Transformer
from t5x_pjit_recipes.initialization import TrainStateInitializer, make_train_state
from t5x_pjit_recipes.interop import hugging_face
from t5x_pjit_recipes.interop.hugging_face import Folder
from t5x_pjit_recipes.layout import Plan
from t5x_pjit_recipes.layout.paths import map_named, named_leaves
from t5x_pjit_recipes.recipes import hf_t5_names as names
from t5x_pjit_recipes.recipes.rule_sets import make_rules
from t5x_pjit_recipes.train_state import InferenceState

PathLike = str | os.PathLike[str]

RULES = (
    (r'(.*/)?(shared|embed_tokens)/embedding', P('model', 'data')),
    (r'(.*/)?lm_head/kernel', P('data', 'model')),
    (r'.*Attention/[qkv]/kernel', P('data', 'model')),
    (r'.*Attention/o/kernel', P('model', 'data')),
    (r'.*/DenseReluDense/wi(_[01])?/kernel', P('data', 'model')),
    (r'.*/DenseReluDense/wo/kernel', P('model', 'data')),
    (r'.*/relative_attention_bias/embedding', P()),
    (r'.*layer_norm/weight', P()),
)
rules = make_rules(RULES)

# Tables of embeddings are padded to multiples of 128 at most.
MAX_PADDING = 128
# What else a folder has and a model of the same kind wants.
COMPANIONS = ('*token*.json', '*.model', 'generation_config.json')


@dataclasses.dataclass(frozen=True)
class T5Folder:
    """A folder, and what our T5 makes of it.

    Attributes:
      folder: the folder.
      config: our T5's configuration, in float32.
      sources: for each parameter the tensor that it is.
      ignored: patterns of tensors that are not needed.
    """

    folder: Folder
    config: T5Config
    sources: Mapping[str, Any]
    ignored: tuple[str, ...]

    @classmethod
    def open(cls, path: PathLike) -> 'T5Folder':
        """Looks at a folder; of its tensors only those are read that may be copies of the embeddings.

        Raises:
          CheckpointError: if it cannot be read, or encoder and decoder have different embeddings.
          ConfigError: listing everything in its config.json that our T5 cannot do.
        """
        folder = Folder(path)
        table, *others = [name for name in names.TABLES if name in folder.shapes] or names.TABLES[:1]
        if differ := [name for name in others if not folder.are_equal(name, table)]:
            raise CheckpointError(
                f'Cannot read {str(folder.path)!r} into our T5, which has one table of embeddings: these differ from '
                f'{table}. Use a model that shares it:\n{offenders(differ)}'
            )
        has_head = names.HEAD in folder.shapes and not folder.are_equal(names.HEAD, table)
        config = names.network_config(folder.config, has_head=has_head)
        ignored = (names.UNUSED, *others) if has_head else (names.UNUSED, *others, names.HEAD)
        return cls(folder, config, names.sources(config, table=table), ignored)

    def shapes(self) -> Any:
        """Returns the shapes of the parameters, once all tensors are accounted for; see `folder_shapes`."""
        return hugging_face.folder_shapes(self.folder, self.sources, ignored=self.ignored)

    def load(self, plan: Plan) -> Any:
        """Reads the parameters as planned; see `hugging_face.load_params`."""
        return hugging_face.load_params(self.folder, self.sources, plan)


def load_network(
    path: PathLike, *, dtype: Any = jnp.float32, dropout_rate: float | None = None, vocabulary: Any = None
) -> Transformer:
    """Makes the network that a folder's config.json describes.

    Args:
      path: the folder.
      dtype: what its layers compute in.
      dropout_rate: the share of activations that training drops; None for the folder's.
      vocabulary: what its ids are to be made by, to be compared with the number that it knows; None compares nothing.

    Raises:
      ConfigError: if the vocabulary has more ids than the network.
    """
    config = dataclasses.replace(T5Folder.open(path).config, dtype=dtype)
    if vocabulary is not None:
        _check_vocabulary(path, config.vocab_size, vocabulary)
    return Transformer(config if dropout_rate is None else dataclasses.replace(config, dropout_rate=dropout_rate))


def _check_vocabulary(path: PathLike, vocab_size: int, vocabulary: Any) -> None:
    ids = vocabulary.vocab_size
    if ids > vocab_size:
        raise ConfigError(
            f'Cannot use {vocabulary} with {str(path)!r}: it has {ids} ids, and the table of embeddings {vocab_size}. '
            'Use the vocabulary that the model was trained with.'
        )
    if vocab_size - ids >= MAX_PADDING:
        warn(
            f'{vocabulary} has {ids} ids, and {str(path)!r} knows {vocab_size}: the model was probably trained with '
            'another vocabulary. Where the folder has a tokenizer.json, add gin/recipes/hf_vocabulary.gin.'
        )


def load(path: PathLike, partitioner: Any, *, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Reads a folder's parameters straight into their places.

    Args:
      path: the folder.
      partitioner: lays the parameters out.
      dtype: what they are to be.

    Returns:
      What `load_network(path).apply` and `TrainState.create` take: 'params' and 'params_axes'.

    Raises:
      CheckpointError: listing every tensor that is missing, superfluous or of another shape.
      ConfigError: listing everything in its config.json that our T5 cannot do.
    """
    source = T5Folder.open(path)
    source.shapes()
    variables = variable_shapes(source.config)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), variables['params'])
    specs = partitioner.get_mesh_axes(InferenceState.create(variables)).params
    return {**variables, 'params': source.load(Plan(shapes, specs, partitioner.mesh))}


def load_params(path: PathLike, partitioner: Any, *, dtype: Any = jnp.float32) -> Any:
    """Reads a folder's parameters straight into their places; see `load`."""
    return load(path, partitioner, dtype=dtype)['params']


def variable_shapes(config: T5Config) -> Mapping[str, Any]:
    """Returns the variables of our T5, with a ShapeDtypeStruct for each parameter."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    init = Transformer(config).init
    return jax.eval_shape(lambda rng, x: init(rng, x, x, x, enable_dropout=False), jax.random.PRNGKey(0), tokens)


class FolderInitializer(TrainStateInitializer):
    """Makes train states that start from a folder: `train.train_state_initializer_cls` of a fine-tuning run.

    Attributes:
      origin: the folder.
    """

    def __init__(
        self,
        optimizer_def: Any,
        init_fn: Any,
        input_shapes: Any,
        partitioner: Any,
        input_types: Any = None,
        *,
        folder: PathLike,
    ):
        """Plans a state as `TrainStateInitializer` does.

        Args:
          optimizer_def: the optimizer; None makes states for inference.
          init_fn: the initialisation of a model whose network is that of `load_network(folder)`.
          input_shapes: name of an input to its global shape.
          partitioner: lays the state out.
          input_types: name of an input to its dtype.
          folder: where the parameters are.

        Raises:
          CheckpointError: listing tensors that do not fit config.json, or parameters that the model has otherwise.
        """
        super().__init__(optimizer_def, init_fn, input_shapes, partitioner, input_types)
        self.origin = str(folder)
        self._folder = T5Folder.open(folder)
        _check_same(
            self._folder.shapes(),
            self.global_train_state_shape.params,
            f'the folder {self.origin!r}',
            remedy='Make its network of the folder, with hf_t5.load_network',
        )

        def make(params: Any, rng: jax.Array) -> Any:
            # What the model would start from is not used, and so never computed.
            init = lambda **kwargs: {**init_fn(**kwargs), 'params': params}  # noqa: E731
            return make_train_state(optimizer_def, init, input_shapes, input_types, rng)

        self._make_from = make

    def from_scratch(self, init_rng: jax.Array) -> Any:
        """Reads the parameters into their places, and initialises what else there is beside them."""
        specs = self.train_state_axes.params
        params = self._folder.load(Plan(self.global_train_state_shape.params, specs, self._partitioner.mesh))
        make = self._partitioner.partition(self._make_from, (specs, None), self.train_state_axes, donate_argnums=(0,))
        return make(params, init_rng)


def _check_same(shapes: Any, wanted: Any, where: str, *, remedy: str) -> None:
    theirs = {name: leaf.shape for name, leaf in named_leaves(shapes).items()}
    ours = {name: leaf.shape for name, leaf in named_leaves(wanted).items()}
    faults = [
        f'{name}: {ours.get(name, "none")} in the model, {theirs.get(name, "none")} in {where}'
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    if faults:
        raise CheckpointError(
            f'Cannot use the parameters of {where}: {len(faults)} are not those of the model. {remedy}:\n'
            f'{offenders(faults)}'
        )


def save(path: PathLike, config: T5Config, params: Any, *, like: Mapping[str, Any] | None = None) -> None:
    """Writes a folder that `transformers` loads.

    Args:
      path: the folder; it must not hold weights already.
      config: our T5's configuration; its `dtype` does not matter.
      params: its parameters, wherever they lie; they are written in the dtype that they have.
      like: entries of another config.json, kept where `config` does not decide them.

    Raises:
      CheckpointError: if the parameters are not those of `config`, or there are weights in the folder.
      ConfigError: if `transformers` has no such model.
    """
    entries = names.folder_config(config, like)
    remedy = 'Give the parameters alone, and the config or folder (LIKE) of the model that they are of'
    _check_same(params, variable_shapes(config)['params'], 'what is to be saved', remedy=remedy)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    # Version 4 and version 5 have a name of their own for it.
    dtype = dict.fromkeys(('dtype', 'torch_dtype'), dtypes.pop() if len(dtypes) == 1 else 'float32')
    hugging_face.save_folder(path, {**entries, **dtype}, names.sources(config), params)


def export(checkpoint: PathLike, folder: PathLike, *, like: PathLike | None = None, model: Any = None) -> None:
    """Writes the parameters of a checkpoint as a folder that `transformers` loads.

    Args:
      checkpoint: the directory of one step, `checkpoint_<step>`.
      folder: where to write.
      like: a folder with the config.json of such a model, the one that training started from, say; the files of its
        tokenizer are copied.
      model: in place of `like`, the model that was trained, whose network is our T5.

    Raises:
      CheckpointError: if there is no such checkpoint, or it is of another model.
      ConfigError: if not just one of `like` and `model` is given.
    """
    if (like is None) == (model is None):
        raise ConfigError(
            f'Cannot export with like={like!r} and model={model!r}: one of them says which T5 this is. Give LIKE, a '
            'folder with such a config.json, or a model file, which sets MODEL.'
        )
    params = read_params(checkpoint)
    entries = None if like is None else hugging_face.read_config(like)
    has_head = 'logits_dense' in params.get('decoder', {})
    config = names.network_config(entries, has_head=has_head) if model is None else model.module.config
    save(folder, config, params, like=entries)
    if like is not None and not os.path.samefile(like, folder):
        for pattern in COMPANIONS:
            for file in pathlib.Path(like).glob(pattern):
                shutil.copy(file, folder)
    print(f'wrote {str(folder)} from {str(checkpoint)}: {len(named_leaves(params))} arrays')


def read_params(checkpoint: PathLike) -> Any:
    """Reads the parameters of a checkpoint into the host's memory."""
    directory = epath.Path(checkpoint).absolute()
    tree = stored.read_tree(directory)
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend='cpu')[0])
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host)
        for name, leaf in named_leaves(tree).items()
        if name.startswith('target/')
    }
    read = stored.read_arrays(directory, tree, wanted)
    return map_named(lambda name, _: read[f'target/{name}'], tree['target'])


if __name__ == '__main__':
    from t5x_pjit_recipes.recipes import hf_t5 as script
    from t5x_pjit_recipes.recipes import scripts

    scripts.run(script.export)
