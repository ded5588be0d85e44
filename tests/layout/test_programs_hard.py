"""Calls that a program must not get wrong: equal statics, hidden layouts, shared memory, leaks."""

import copy
import gc
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import MeshError, PlacementError, PlanError, RecipeError
from t5x_pjit_recipes.layout import AxisMetadata, AxisNames, Plan, Program, abstract_mesh, make_mesh, place
from t5x_pjit_recipes.layout.paths import named_leaves

MESH = make_mesh(data=4, model=2)
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def on_mesh(x, *spec):
    return place(x, Plan(x, P(*spec), MESH))


def test_statics_that_are_equal_but_of_other_types_make_other_programs():
    program = Program(
        lambda x, n: x * 100 if isinstance(n, bool) else x * n, MESH, (P('data'),), P('data'), static_argnums=1
    )
    whole = np.arange(8, dtype=np.int32)
    assert [int(program(whole, n).sum()) for n in (1, 1.0, True)] == [28, 28, 2800]
    assert program(whole, 1.0).dtype == jnp.float32


def test_a_static_argument_may_be_given_by_keyword():
    program = Program(
        lambda x, n: x * n if isinstance(n, int) else None, MESH, (P('data'),), P('data'), static_argnums=1
    )
    np.testing.assert_array_equal(program(X, n=3), 3 * X)


def test_a_program_keeps_no_inputs_alive():
    program = Program(lambda x: x + 1, MESH, (P('data'),), P('data'))
    x = on_mesh(X, 'model')
    alive = weakref.ref(x)
    program(x)
    del x
    gc.collect()
    assert alive() is None
    with jax.checking_leaks():
        jax.jit(Program(lambda x: x + 1, MESH, (P('data'),), P('data')))(X)


@pytest.mark.parametrize('source', [lambda x: on_mesh(x, 'data'), lambda x: on_mesh(x, None, 'model'), jnp.asarray])
@pytest.mark.parametrize(
    'transformed',
    [
        lambda f, w, xs: jax.vmap(f, in_axes=(None, 0))(w, xs),
        lambda f, w, xs: jax.vmap(jax.grad(f), in_axes=(None, 0))(w, xs),
        lambda f, w, xs: jax.grad(lambda w: f(w, xs[0]))(w),
        lambda f, w, xs: jax.jit(jax.vmap(f, in_axes=(None, 0)))(w, xs),
    ],
    ids=['vmap', 'vmap of grad', 'grad', 'jit of vmap'],
)
def test_layouts_hidden_by_a_trace_are_changed_too(transformed, source):
    def loss(w, x):
        return ((x @ w) ** 2).sum()

    w, xs = np.ones((4, 4), np.float32) / 8, np.stack([X, X + 1, X - 1, X * 2])
    program = Program(loss, MESH, (P('model'), P('data')), None)
    expected = transformed(loss, jnp.asarray(w), jnp.asarray(xs))
    np.testing.assert_allclose(transformed(program, source(w), source(xs)), expected, rtol=1e-5)


def test_keyword_arguments_may_lie_anywhere():
    program = Program(lambda x, *, y: x + y, MESH, (P('data'),), P('data'))
    for y in (X, jax.device_put(X, jax.devices()[3]), on_mesh(X, 'model'), jnp.asarray(X)):
        np.testing.assert_array_equal(program(X, y=y), 2 * X)


def test_an_array_given_twice_matters_only_where_it_is_donated():
    step = Program(
        lambda s, b: s + b['inputs'] + b['targets'], MESH, (P('data'), P('data')), P('data'), donate_argnums=0
    )
    x = jnp.asarray(X)
    np.testing.assert_array_equal(step(X, {'inputs': x, 'targets': x}), 3 * X)
    placed = on_mesh(X, 'data')
    with pytest.raises(PlacementError, match=r"leaves 's' and 'b/inputs' are one array"):
        step(placed, {'inputs': placed, 'targets': x})
    jax.jit(lambda x: step(x, {'inputs': x, 'targets': x}))(X)


DEAD = """
import jax, numpy as np
jax.config.update('jax_platforms', 'cpu'); jax.config.update('jax_num_cpu_devices', 8)
from jax.sharding import PartitionSpec as P
from t5x_pjit_recipes.errors import PlacementError
from t5x_pjit_recipes.partitioning import PjitPartitioner
partitioner = PjitPartitioner(2)
step = partitioner.partition(lambda s: {'w': s['w'] + 1}, (P('data'),), P('data'), donate_argnums=(0,))
reader = partitioner.partition(lambda s: s['w'].sum(), (P('data'),), None)
dead = step({'w': np.ones(8)})
compiled = partitioner.compile(step, dead)
compiled(dead)
for call in (step, reader, compiled):
    try:
        call(dead)
    except PlacementError as error:
        assert "/w' was donated" in str(error), error
    else:
        raise SystemExit('nothing was raised')
print('alive')
"""


def test_a_donated_state_used_again_leaves_the_process_alive():
    done = subprocess.run([sys.executable, '-c', DEAD], text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, 'alive\n'), done.stderr


def test_lowering_asks_only_for_shapes():
    program = Program(lambda x: x * 2, MESH, (P('data'),), P('data'))
    for x in (jax.device_put(X, jax.devices()[3]), on_mesh(X, None, 'model'), jax.ShapeDtypeStruct(X.shape, X.dtype)):
        assert 'mhlo.sharding' in program.lower(x).as_text() or 'sdy' in program.lower(x).as_text()


def test_compiling_ahead_traces_once_and_keeps_to_its_structure():
    traces = []
    program = Program(
        lambda s, n: traces.append(1) or {'w': s['w'] * n}, MESH, (P('data'),), P('data'), static_argnums=1
    )
    compiled = program.compile({'w': jax.ShapeDtypeStruct(X.shape, X.dtype)}, 3)
    assert len(traces) == 1
    np.testing.assert_array_equal(compiled({'w': on_mesh(X, 'data')})['w'], 3 * X)
    assert compiled.memory_analysis() is not None
    with pytest.raises(PlanError, match=r"compiled for arguments of the structure .*'w'.* on .*'v'"):
        compiled({'v': on_mesh(X, 'data')})


def test_placed_arrays_share_no_memory_with_their_source():
    source = jax.device_put(X, jax.devices()[0])
    placed = place(source, Plan(X, P(), MESH))
    Program(lambda x: x + 1, MESH, (P(),), P(), donate_argnums=(0,))(placed)
    np.testing.assert_array_equal(source, X)
    assert not source.is_deleted()


def test_an_array_on_an_explicit_mesh_is_taken_in():
    explicit = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(X, NamedSharding(explicit, P('data')))
    program = Program(lambda x: x * 2, MESH, (P('data'),), P('data'))
    for _ in range(2):
        np.testing.assert_array_equal(program(x), 2 * X)
    assert on_mesh(x, 'data').sharding.mesh.axis_types == MESH.axis_types


def test_a_constraint_on_another_mesh_is_judged_by_that_mesh():
    other = Mesh(MESH.devices.reshape(2, 4), ('data', 'model'))

    def constrained(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(other, P('data')))

    assert 'sharding_constraint' in str(jax.make_jaxpr(constrained)(X[:6]))
    from t5x_pjit_recipes.layout.constraints import check_constraints

    check_constraints(jax.make_jaxpr(constrained)(X[:6]), MESH)
    with pytest.raises(PlanError, match=r'dim 0 is 5, which .* splits 2 ways'):
        check_constraints(jax.make_jaxpr(constrained)(jax.ShapeDtypeStruct((5, 4), jnp.float32)), MESH)


@pytest.mark.parametrize(
    ('specs', 'says'),
    [
        (('data',), r"x: 'data' is a str; write PartitionSpec\(\.\.\.\)"),
        ((('data', None),), r"x/0: 'data' is a str"),
        ((AxisMetadata(names=('batch',)),), r'x: .*names logical axes; get_mesh_axes makes specs'),
        ((), r'1 arguments \(x\) by 0 specs'),
    ],
)
def test_what_is_no_spec_is_told(specs, says):
    with pytest.raises(PlanError, match=says):
        Program(lambda x: x, MESH, specs, None)(X)


def test_shardings_serve_as_specs():
    sharding = NamedSharding(MESH, P('data'))
    assert Program(lambda x: x, MESH, (sharding,), sharding)(X).sharding.is_equivalent_to(sharding, 2)


def test_specs_for_more_parts_than_the_result_has_are_told():
    with pytest.raises(PlanError, match='a result of 2 parts by 3 specs'):
        Program(lambda x: (x, x), MESH, (None,), (P(), P(), None))(X)


def test_leaves_that_are_no_arrays_are_told():
    with pytest.raises(PlanError, match=r'(?s)1 of 2 leaves.*x/b: str'):
        Program(lambda x: x, MESH, (None,), None)({'a': X, 'b': 'text'})


def test_an_abstract_mesh_can_be_lowered_for_but_not_run_on():
    program = Program(lambda x: x * 2, abstract_mesh(data=4, model=2), (P('data'),), P('data'))
    with pytest.raises(MeshError, match='abstract mesh data=4, model=2: it has no devices'):
        program(X)


def test_names_that_stand_for_two_leaves_are_told():
    with pytest.raises(RecipeError, match=r'(?s)2 leaves apart.*\n  a/b'):
        named_leaves({'a/b': 1, 'a': {'b': 2}})


def test_axis_names_survive_copying():
    names = AxisNames('embed', None)
    for other in (copy.copy(names), copy.deepcopy(names)):
        assert other == names
        assert type(other) is AxisNames


def test_a_program_looks_like_its_function():
    def documented(x):
        """Says what it does."""
        return x

    program = Program(documented, MESH, (None,), None)
    assert (program.__name__, program.__doc__) == ('documented', 'Says what it does.')
    assert repr(program) == 'Program(documented on data=4, model=2)'


HALVES = [make_mesh(data=2, model=2, devices=half) for half in (jax.devices()[:4], jax.devices()[4:])]
SINGLES = [make_mesh(data=1, model=1, devices=[device]) for device in jax.devices()[:2]]
TURNED = [make_mesh(data=4, model=2, devices=order) for order in (jax.devices(), jax.devices()[::-1])]


@pytest.mark.parametrize('meshes', [HALVES, SINGLES, TURNED], ids=['halves', 'single devices', 'another order'])
@pytest.mark.parametrize('donate', [(), (0,)])
def test_arrays_on_another_mesh_of_the_same_sizes_are_moved_every_time(meshes, donate):
    here, there = (NamedSharding(mesh, P('data')) for mesh in meshes)
    traced = []

    def double(x, y):
        traced.append(x)
        return x * 2 + y

    program = Program(double, here.mesh, (P('data'), P('data')), P('data'), donate_argnums=donate)
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    for sharding in (here, there, there, here, there, there):
        result = program(jax.device_put(x, sharding), x)
        np.testing.assert_array_equal(result, x * 3)
        assert result.sharding.is_equivalent_to(here, 2)
    assert len(traced) == 1


@pytest.mark.parametrize('meshes', [HALVES, SINGLES, TURNED], ids=['halves', 'single devices', 'another order'])
def test_a_compiled_program_refuses_arrays_on_another_mesh_of_the_same_sizes(meshes):
    here, there = (NamedSharding(mesh, P('data')) for mesh in meshes)
    x = np.ones((8, 4), np.float32)
    compiled = Program(lambda x, y: x * 2 + y, here.mesh, (P('data'), P('data')), P('data')).compile(x, x)
    for _ in range(3):
        with pytest.raises(PlacementError, match=r'on 1 of 2 arrays that lie on other devices(.|\n)*: lies '):
            compiled(jax.device_put(x, here), jax.device_put(x, there))
    np.testing.assert_array_equal(compiled(jax.device_put(x, here), jax.device_put(x, here)), x * 3)


def test_a_key_may_come_before_arrays_from_the_host():
    def draw(key, x):
        return jax.random.randint(key, x.shape, 0, 1000) + x

    program = Program(draw, MESH, (None, P('data')), P('data'))
    key, x = jax.random.key(0), np.ones(8, np.int32)
    for y in (x, jnp.array(x), x):
        np.testing.assert_array_equal(program(key, y), draw(key, x))
