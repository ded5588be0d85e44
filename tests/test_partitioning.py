import gzip
import json
import pathlib
import re

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, freeze
from flax.linen.partitioning import AxisMetadata
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import optimizers, partitioning
from t5x_pjit_recipes.errors import DataError, MeshError, RuleError, StateError
from t5x_pjit_recipes.layout.axes import is_spec_leaf
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.partitioning import PjitPartitioner, standard_logical_axis_rules
from t5x_pjit_recipes.train_state import FlaxOptimTrainState, InferenceState
from tests import t5_models

GOLDENS = json.loads(gzip.decompress((pathlib.Path(__file__).parent / 'goldens' / 'mesh_axes.json.gz').read_bytes()))
OPTIMIZERS = {
    'adafactor': t5_models.make_adafactor,
    'adafactor_beta1': lambda: t5_models.make_adafactor(beta1=0.9),
    'adam': lambda: optimizers.adam(1e-3),
    'adamw': lambda: optimizers.adamw(1e-3),
    'lamb': lambda: optimizers.lamb(1e-3),
    'lion': lambda: optimizers.lion(1e-3),
    'sgd_momentum': lambda: optimizers.sgd(1e-3, momentum=0.9),
}
SIZES = {
    'tiny': {'emb_dim': 8, 'num_heads': 4, 'head_dim': 3, 'mlp_dim': 16},
    'small': {
        'emb_dim': 512, 'num_heads': 6, 'head_dim': 64, 'mlp_dim': 1024,
        'num_encoder_layers': 8, 'num_decoder_layers': 8,
    },
}  # fmt: skip
PRESETS = {f'a{a}p{p}': (a, p) for a in (1, 2) for p in (1, 2)}


@pytest.fixture(scope='module')
def variables():
    """The shapes of both sizes' variables; which optimizer follows changes nothing in them."""

    def shapes(config):
        model = t5_models.make_model(vocab_size=32128, **config)
        types = dict.fromkeys(t5_models.LENGTHS, jnp.int32)
        return jax.eval_shape(lambda: model.get_initial_variables(t5_models.key(), t5_models.input_shapes(8), types))

    return {size: shapes(config) for size, config in SIZES.items()}


def entries(leaf):
    return None if leaf is None else list(leaf)


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('size', SIZES)
def test_axes_are_the_golden_ones(size, optimizer, variables):
    golden = GOLDENS[size]['optimizers'][optimizer]
    state = jax.eval_shape(lambda v: FlaxOptimTrainState.create(OPTIMIZERS[optimizer](), v), variables[size])
    shapes = named_leaves(state.state_dict())
    assert {n: [list(x.shape), str(x.dtype)] for n, x in shapes.items()} == golden['shapes']
    for preset, dims in PRESETS.items():
        partitioner = PjitPartitioner(1, logical_axis_rules=standard_logical_axis_rules(*dims))
        if preset == 'a1p1':
            logical = named_leaves(partitioner.get_logical_axes(state).state_dict(), is_leaf=is_spec_leaf)
            assert {n: entries(x) for n, x in logical.items()} == golden['logical']
        specs = named_leaves(partitioner.get_mesh_axes(state).state_dict(), is_leaf=is_spec_leaf)
        assert {n: entries(x) for n, x in specs.items()} == golden['mesh'][preset]


HEADS = {
    (1, 1): 'batch>data vocab>model embed>None mlp>model heads>model kv>None joined_kv>model',
    (2, 1): 'batch>data vocab>model mlp>model heads>model kv>None joined_kv>model embed>model',
    (1, 2): 'batch>data vocab>model mlp>model heads>model kv>None joined_kv>model embed>data',
    (2, 2): 'batch>data vocab>model mlp>model heads>model kv>None joined_kv>model embed>model embed>data',
}
TAIL = 'relpos_buckets>None abspos_buckets>None length>None layers>None stack>None mlp_activations>None'


@pytest.mark.parametrize('dims', HEADS)
def test_standard_rules_are_these_lists(dims):
    expected = [tuple(rule.split('>')) for rule in f'{HEADS[dims]} {TAIL}'.split()]
    expected = [(name, None if axis == 'None' else axis) for name, axis in expected]
    assert standard_logical_axis_rules(*dims) == expected
    extra = (('expert', 'data'),)
    assert standard_logical_axis_rules(*dims, additional_rules=extra) == expected + list(extra)


def test_other_dims_are_refused():
    with pytest.raises(RuleError, match='activation_partitioning_dims=3'):
        standard_logical_axis_rules(3)


@pytest.mark.parametrize('partitions', [1, 2, 4, 8])
def test_num_partitions_is_the_size_of_model(partitions):
    partitioner = PjitPartitioner(num_partitions=partitions)
    assert dict(partitioner.mesh.shape) == {'data': 8 // partitions, 'model': partitions}
    assert partitioner.data_partition_spec == P('data')
    assert partitioner.data_mesh_size == 8 // partitions
    assert partitioner.data_shards == 1
    assert partitioner.data_shard_id == 0
    layout = partitioner.get_data_layout(16)
    assert (layout.batch_size, layout.shard_id, layout.num_shards) == (16, 0, 1)
    assert partitioner.get_data_layout().batch_size == 8 // partitions


def test_the_emulated_slices_carry_the_batch_on_two_axes():
    partitioner = PjitPartitioner(num_partitions=1, ici_mesh_shape=(1, 2, 2), dcn_mesh_shape=(2, 1, 1))
    assert dict(partitioner.mesh.shape) == {'replica': 2, 'data': 2, 'model': 2}
    assert partitioner.data_partition_spec == P(('replica', 'data'))
    assert partitioner.data_mesh_size == 4
    assert partitioner.get_data_layout(8).num_shards == 1
    assert dict(partitioner.logical_axis_rules)['batch'] == ('replica', 'data')
    out = partitioner.partition(lambda x: x * 2, (partitioner.data_partition_spec,), P(None, 'model'))(np.ones((8, 4)))
    assert out.sharding.is_equivalent_to(NamedSharding(partitioner.mesh, P(None, 'model')), 2)


def test_a_batch_that_does_not_divide_is_refused_with_numbers():
    with pytest.raises(DataError, match=r'batch of 6 over 4 devices.*batch size of 4 or 8'):
        PjitPartitioner(num_partitions=2).get_data_layout(6)


def test_rules_that_do_not_split_the_batch():
    partitioner = PjitPartitioner(1, logical_axis_rules=[('batch', None), ('mlp', 'model')])
    assert partitioner.data_partition_spec == P(None)
    layout = partitioner.get_data_layout(6)
    assert (layout.batch_size, layout.shard_id, layout.num_shards) == (6, 0, 1)
    assert layout.is_first_host_in_replica_set


AMBIGUOUS = {
    'both': (
        {'num_partitions': 1, 'model_parallel_submesh': (1, 1, 1, 2)},
        r'num_partitions=1 and .*=\(1, 1, 1, 2\): .*wins',
    ),
    'short submesh': ({'model_parallel_submesh': (1, 2)}, r'model_parallel_submesh=\(1, 2\) .*it has 2 numbers'),
    'no batch rule': ({'num_partitions': 1, 'logical_axis_rules': [('mlp', 'model')]}, "none for 'batch'"),
}


@pytest.mark.parametrize('case', AMBIGUOUS)
def test_what_t5x_lets_pass_is_told_or_refused(case):
    kwargs, says = AMBIGUOUS[case]
    with pytest.warns(UserWarning, match=says) as caught:
        PjitPartitioner(**kwargs)
    assert len(caught) == 1
    with pytest.raises((MeshError, RuleError), match=says):
        PjitPartitioner(**kwargs, strict=True)


@pytest.mark.filterwarnings('ignore:Cannot use both num_partitions:UserWarning')
def test_the_submesh_wins():
    assert PjitPartitioner(4, model_parallel_submesh=(1, 1, 1, 2)).mesh.shape['model'] == 2
    assert PjitPartitioner(num_partitions=4, model_parallel_submesh=()).mesh.shape['model'] == 4


@pytest.mark.parametrize(
    ('kwargs', 'says'),
    [
        ({}, 'num_partitions=None and model_parallel_submesh=None'),
        ({'num_partitions': 0}, 'num_partitions=0'),
        ({'num_partitions': 1, 'ici_mesh_shape': (1, 8, 1)}, 'dcn_mesh_shape=None: one of them is missing'),
        ({'num_partitions': 1, 'logical_axis_rules': [('batch', 'None')]}, "'None' is not a mesh axis"),
    ],
)
def test_what_cannot_be_meant_is_refused(kwargs, says):
    with pytest.raises((MeshError, RuleError), match=says):
        PjitPartitioner(**kwargs)


@pytest.mark.parametrize(('partitions', 'says'), [(3, r'does not divide 8\. Use one of \[1, 2, 4, 8\]'), (16, '16')])
def test_partitions_that_do_not_divide_the_devices_are_refused(partitions, says):
    with pytest.raises(MeshError, match=says):
        _ = PjitPartitioner(partitions).mesh


def test_rules_for_absent_mesh_axes_are_refused():
    partitioner = PjitPartitioner(1, logical_axis_rules=[('batch', 'dta'), ('mlp', 'model')])
    with pytest.raises(RuleError, match=r"rule 1 \('batch', 'dta'\): no mesh axis 'dta' \(did you mean 'data'\?\)"):
        partitioner.partition(lambda x: x, None, None)


def test_an_explicit_mesh_is_refused_and_a_given_mesh_is_used():
    grid = np.array(jax.devices()).reshape(2, 4)
    explicit = Mesh(grid, ('data', 'model'), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(MeshError, match='Explicit'):
        PjitPartitioner(mesh=explicit).partition(lambda x: x, None, None)
    mesh = Mesh(grid, ('data', 'model'))
    assert PjitPartitioner(mesh=mesh).mesh is mesh
    half = PjitPartitioner(2, devices=jax.devices()[4:])
    assert [d.id for d in half.mesh.devices.flat] == [4, 5, 6, 7]


PARAMS = {'mlp': {'wi': np.ones((4, 8), np.float32), 'scale': np.ones((4,), np.float32)}}
AXES = {'mlp': {'wi_axes': AxisMetadata(names=('embed', 'mlp')), 'scale_axes': AxisMetadata(names=('embed',))}}


def make_state(params=PARAMS, axes=AXES, optimizer=None):
    optimizer = optimizers.adam(1e-2) if optimizer is None else optimizer
    return FlaxOptimTrainState.create(optimizer, freeze({'params': params, 'params_axes': axes}))


def test_a_misspelt_axis_name_is_told_with_its_path_or_refused():
    axes = {'mlp': {**AXES['mlp'], 'wi_axes': AxisMetadata(names=('embed', 'mpl'))}}
    says = r"target/mlp/wi: 'mpl' \(did you mean 'mlp'\?\)"
    with pytest.warns(UserWarning, match=says) as caught:
        specs = PjitPartitioner(2).get_mesh_axes(make_state(axes=axes))
    assert len(caught) == 1
    assert specs.params['mlp']['wi'] == P(None, None)
    with pytest.raises(RuleError, match=says):
        PjitPartitioner(2, strict=True).get_mesh_axes(make_state(axes=axes))


def test_rules_extended_after_construction_count():
    partitioner = PjitPartitioner(2, logical_axis_rules=[('batch', 'data'), ('embed', None)])
    partitioner._logical_axis_rules += (('mlp', 'model'),)
    assert partitioner.get_mesh_axes(make_state()).params['mlp']['wi'] == P(None, 'model')


def test_an_inference_state_of_shapes_goes_through():
    shapes = freeze(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS))
    state = InferenceState(
        step=jnp.array(0), params=shapes, params_axes=freeze(AXES), flax_mutables=None, flax_mutables_axes=freeze(AXES)
    )
    specs = PjitPartitioner(2).get_mesh_axes(state)
    assert specs.params == freeze({'mlp': {'wi': P(None, 'model'), 'scale': P(None)}})
    assert isinstance(specs.params, FrozenDict)


def test_a_foreign_state_needs_three_methods():
    @flax.struct.dataclass
    class Foreign:
        weights: object

        def as_logical_axes(self):
            return Foreign({'w': partitioning.AxisNames('embed', 'mlp'), 'count': None})

        def state_dict(self):
            return {'target': dict(self.weights)}

        def restore_state(self, state_dict):
            return Foreign(state_dict['target'])

    specs = PjitPartitioner(2).get_mesh_axes(Foreign({'w': np.ones((4, 8)), 'count': 0}))
    assert specs.weights == {'w': P(None, 'model'), 'count': None}


def test_a_partitioned_step_equals_the_plain_one_and_keeps_layouts():
    partitioner = PjitPartitioner(2)
    state = make_state()
    axes = partitioner.get_mesh_axes(state)

    def step(state, scale):
        grads = jax.tree.map(lambda x: x * scale, state.params)
        return state.apply_gradient(grads, learning_rate=None)

    compiled = partitioner.partition(step, (axes, None), axes, donate_argnums=(0,))
    plain = step(make_state(), 0.5)
    placed = partitioner.move_params_to_devices(state, axes)
    for _ in range(2):
        sharded = compiled(placed, 0.5)
        placed = sharded
    plain = step(plain, 0.5)
    for name, value in named_leaves(plain.state_dict()).items():
        np.testing.assert_allclose(named_leaves(placed.state_dict())[name], value, rtol=1e-6, err_msg=name)
    wi = NamedSharding(partitioner.mesh, P(None, 'model'))
    assert placed.params['mlp']['wi'].sharding.is_equivalent_to(wi, 2)
    assert placed.param_states[0].mu['mlp']['wi'].sharding.is_equivalent_to(wi, 2)


def test_compile_ahead_of_time():
    partitioner = PjitPartitioner(2)
    program = partitioner.partition(lambda x: x + 1, (P('data'),), P('data'))
    compiled = partitioner.compile(program, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert compiled.as_text()
    np.testing.assert_array_equal(compiled(program(np.ones(8, np.float32))), np.full(8, 3))


def test_constraints_act_where_a_mesh_is_in_scope():
    def constrained(x):
        assert partitioning.global_mesh_defined()
        return partitioning.with_sharding_constraint(x, P('data', 'model'))

    x = np.ones((8, 4), np.float32)
    assert not partitioning.global_mesh_defined()
    assert partitioning.with_sharding_constraint(x, P('nowhere')) is x
    lowered = PjitPartitioner(2).partition(constrained, None, None).lower(x).as_text()
    assert re.search(r'sharding_constraint.*"data".*"model"', lowered)
    mesh = PjitPartitioner(2).mesh
    with_context = partitioning.PjittedFnWithContext(jax.jit(constrained), mesh, (('batch', 'data'),))
    np.testing.assert_array_equal(with_context(x), x)
    assert 'sharding_constraint' in with_context.lower(x).as_text()


def test_helpers_of_the_module():
    assert partitioning.get_mesh((1, 1, 1, 2)).shape['model'] == 2
    assert partitioning.get_cpu_mesh().shape['model'] == 8
    assert partitioning.get_cpu_mesh(2).shape['model'] == 2
    assert partitioning.default_mesh(4).shape['data'] == 2
    value, keys = partitioning._id_fn('x', 3)
    assert value == 'x'
    assert keys.shape == (2, 2)
    mesh = partitioning.get_cpu_mesh(2)
    made = partitioning.host_local_array_to_global_array(
        {'a': np.ones((8,)), 'b': np.ones(3)}, mesh, {'a': P('data'), 'b': None}
    )
    assert made['a'].sharding.spec == P('data')
    assert hash(PjitPartitioner(2).get_mesh_axes(make_state()).params) is not None


@pytest.mark.parametrize(
    ('axes', 'says'),
    [
        ({'a': AxisMetadata(names=('embed', 'mlp'))}, r'b \(4, 8\): no axes'),
        ({'a': AxisMetadata(names=('embed',)), 'b': None}, r"a \(4, 8\): 1 axes \('embed',\) for 2 dims"),
        ({'a': AxisMetadata(names=(0, 1)), 'b': None}, r'a \(4, 8\): \(0, 1\) are not names'),
        (
            {'a': jax.ShapeDtypeStruct((4, 8), jnp.float32), 'b': None},
            r'a \(4, 8\): a ShapeDtypeStruct where its axis names belong',
        ),
    ],
)
def test_a_hand_made_state_with_wrong_axes_is_refused(axes, says):
    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    state = InferenceState(step=jnp.array(0), params=freeze({'a': shape, 'b': shape}), params_axes=freeze(axes))
    with pytest.raises(StateError, match=says):
        PjitPartitioner(2).get_mesh_axes(state)


def test_a_state_without_axes_is_refused_with_three_ways_to_get_them():
    state = InferenceState(step=jnp.array(0), params=freeze({'a': np.ones(4)}))
    with pytest.raises(StateError, match=r'(?s)param_with_axes.*AxisMetadata.*override_params_axes_names'):
        PjitPartitioner(2).get_mesh_axes(state)


def test_names_that_stand_for_two_dims_are_refused_at_once():
    axes = {'mlp': {'wi_axes': AxisMetadata(names=('embed', 'embed')), 'scale_axes': AxisMetadata(names=('kv',))}}
    with pytest.raises(
        RuleError, match=r"1 leaves.*\n  target/mlp/wi: \('embed', 'embed'\) has 'embed' more than once"
    ):
        PjitPartitioner(2).get_mesh_axes(make_state(axes=axes))


def test_empty_names_mean_replicated():
    axes = {'mlp': {'wi': AxisMetadata(names=tuple(P())), 'scale': AxisMetadata(names=())}}
    specs = PjitPartitioner(2).get_mesh_axes(make_state(axes=axes))
    assert specs.params['mlp'] == freeze({'wi': P(), 'scale': P()})


def test_an_assigned_mesh_counts_everywhere():
    partitioner = PjitPartitioner(2)
    assert partitioner.get_data_layout().batch_size == 4
    partitioner.mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ('data', 'model'))
    assert partitioner.get_data_layout().batch_size == partitioner.data_mesh_size == 8
    explicit = Mesh(np.array(jax.devices()).reshape(8, 1), ('data', 'model'), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(MeshError, match='Explicit'):
        partitioner.mesh = explicit


def test_a_warning_is_told_once_at_the_line_of_the_call():
    axes = {'mlp': {**AXES['mlp'], 'wi_axes': AxisMetadata(names=('embed', 'mpl'))}}
    partitioner, state = PjitPartitioner(2), make_state(axes=axes)
    with pytest.warns(UserWarning) as caught:
        partitioner.get_mesh_axes(state)
        partitioner.get_mesh_axes(state)
    assert len(caught) == 1
    assert caught[0].filename == __file__
