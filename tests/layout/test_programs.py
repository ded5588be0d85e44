import functools
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, freeze
from flax.linen import partitioning as flax_partitioning
from jax.experimental import checkify
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import PlacementError, PlanError
from t5x_pjit_recipes.layout import Plan, Program, make_mesh, place

MESH = make_mesh(data=4, model=2)
X = np.arange(32, dtype=np.float32).reshape(8, 4)
PARAMS = {'w': X, 'b': {'s': np.arange(6, dtype=np.float32)}}
SPECS = {'w': P('data', 'model'), 'b': {'s': None}}
RULES = (('batch', 'data'), ('mlp', 'model'))


def identity(x):
    return x


def cast(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def lies(x, *spec):
    return x.sharding.is_equivalent_to(NamedSharding(MESH, P(*spec)), x.ndim)


@pytest.mark.parametrize('freeze_specs', [identity, freeze], ids=['dict specs', 'frozen specs'])
@pytest.mark.parametrize('freeze_params', [identity, freeze], ids=['dict', 'frozen'])
@pytest.mark.parametrize(
    'source',
    [
        identity,
        lambda p: jax.tree.map(jnp.asarray, p),
        lambda p: jax.device_put(p, jax.devices()[0]),
        lambda p: jax.device_put(p, jax.devices()[3]),
        lambda p: jax.device_put(p, NamedSharding(MESH, P())),
        lambda p: place(p, Plan(p, P(), make_mesh(x=2, devices=jax.devices()[6:]))),
    ],
    ids=['numpy', 'uncommitted', 'device 0', 'device 3', 'replicated', 'other mesh'],
)
@pytest.mark.parametrize(
    'fn', [identity, lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)], ids=['id', 'cast']
)
def test_inputs_from_anywhere_come_out_laid_out(fn, source, freeze_params, freeze_specs):
    specs = freeze_specs(SPECS)
    given = freeze_params(source(PARAMS))
    out = Program(fn, MESH, (specs,), specs)(given)
    assert type(out) is type(given)
    assert lies(out['w'], 'data', 'model')
    assert lies(out['b']['s'])
    np.testing.assert_array_equal(np.asarray(out['w'], np.float32), X)


def test_sharding_twice_moves_nothing_and_compiles_nothing():
    traces = []
    program = Program(lambda p: traces.append(1) or p, MESH, (SPECS,), SPECS)
    once = program(PARAMS)
    twice = program(once)
    program(twice)
    assert len(traces) <= 2  # host arrays and placed ones may have avals of their own
    traces.clear()
    with jax.transfer_guard('disallow'):
        thrice = program(twice)
    assert not traces
    jax.tree.map(np.testing.assert_array_equal, thrice, PARAMS)


def test_one_program_takes_both_containers_in_turn():
    program = Program(identity, MESH, (SPECS,), SPECS)
    for container in (dict, FrozenDict, dict, FrozenDict):
        assert type(program(container(PARAMS))) is container


def test_a_state_step_compiles_once():
    traces = []
    step = Program(
        lambda s, x: (traces.append(1), jax.tree.map(lambda a: a + x.sum(), s))[1],
        MESH, (SPECS, P('data')), SPECS, donate_argnums=(0,),
    )  # fmt: skip
    state = place(PARAMS, Plan(PARAMS, SPECS, MESH))
    for _ in range(4):
        state = step(state, place(X, Plan(X, P('data'), MESH)))
    assert len(traces) == 1


def loss(w, x):
    return (w * x).sum()


@pytest.mark.parametrize(
    'transformed',
    [
        lambda f: jax.value_and_grad(f)(X, X)[0],
        lambda f: jax.jit(f)(X, X),
        lambda f: jax.vmap(f)(jnp.stack([X, X]), jnp.stack([X, X]))[0],
        lambda f: jax.vmap(jax.value_and_grad(f))(jnp.stack([X, X]), jnp.stack([X, X]))[0][1],
        lambda f: Program(lambda w: f(w, w), MESH, (P('data'),), None)(X),
        lambda f: f(X, x=X),
        lambda f: f(w=X, x=X),
        lambda f: Program(functools.partial(f, X), MESH, (None,), None)(X),
    ],
    ids=['grad', 'jit', 'vmap', 'vmap grad', 'nested', 'keyword', 'keywords', 'partial'],
)
def test_transformations_give_the_plain_result(transformed):
    program = Program(loss, MESH, (P('data'), None), None)
    np.testing.assert_allclose(transformed(program), (X * X).sum(), rtol=1e-6)


def test_gradients_equal_unsharded_ones():
    program = Program(loss, MESH, (P('data'), None), None)
    np.testing.assert_allclose(jax.grad(program)(X, X + 1), jax.grad(loss)(X, X + 1))
    assert jax.eval_shape(program, X, X).shape == ()
    assert program.eval_shape(X, X).shape == ()


class Doubler:
    def twice(self, x):
        return 2 * x


def test_bound_methods_and_functions_without_arguments():
    assert lies(Program(Doubler().twice, MESH, (P('data'),), P('data'))(X), 'data')
    assert lies(Program(lambda: jnp.ones((8, 4)), MESH, None, P(None, 'model'))(), None, 'model')


def test_static_and_absent_arguments():
    program = Program(lambda x, n, y: x * n if y is None else y, MESH, (P('data'), None), P('data'), static_argnums=1)
    np.testing.assert_array_equal(program(X, 3, None), 3 * X)
    np.testing.assert_array_equal(program(X, 4, None), 4 * X)
    np.testing.assert_array_equal(program(X, 4, X + 1), X + 1)


def test_specs_of_absent_arguments_are_ignored():
    program = Program(lambda x, y: x, MESH, (P('data'), {'a': P('model')}), P('data'))
    assert lies(program(X, None), 'data')


@flax.struct.dataclass
class Pair:
    first: Any
    second: Any


def test_a_dataclass_under_one_spec():
    out = Program(lambda x: Pair(x, {'deep': x}), MESH, (None,), P('data'))(X)
    assert lies(out.first, 'data')
    assert lies(out.second['deep'], 'data')


def test_checkified_functions_keep_their_errors():
    def checked(x):
        checkify.check(x.sum() < 0, 'sum is not negative')
        return x

    error, out = Program(checkify.checkify(checked), MESH, (P('data'),), (None, P('data')))(X)
    assert 'sum is not negative' in error.get()
    assert lies(out, 'data')


def constrained_by_partitioning(x):
    return flax_partitioning.with_sharding_constraint(x, ('batch', 'mlp'))


def constrained_by_linen(x):
    return nn.with_logical_constraint(x, ('batch', 'mlp'))


@pytest.mark.parametrize('fn', [constrained_by_partitioning, constrained_by_linen])
def test_logical_constraints_reach_the_lowered_module(fn):
    constrained = Program(fn, MESH, (None,), None, rules=RULES).lower(X).as_text()
    assert constrained.count('sharding_constraint') == 1
    assert '"data"' in constrained and '"model"' in constrained
    assert 'sharding_constraint' not in Program(fn, MESH, (None,), None).lower(X).as_text()
    assert 'sharding_constraint' not in jax.jit(fn).lower(X).as_text()


def test_constraints_survive_an_outer_grad_and_program():
    inner = Program(lambda x: constrained_by_linen(x).sum(), MESH, (None,), None, rules=RULES)
    assert 'sharding_constraint' in jax.jit(jax.grad(inner)).lower(X).as_text()
    assert 'sharding_constraint' in Program(lambda x: inner(x) + 1, MESH, (None,), None).lower(X).as_text()


def test_an_uneven_constraint_is_an_error_also_for_later_shapes():
    program = Program(constrained_by_linen, MESH, (None,), None, rules=RULES)
    program(X)
    message = r"array \(6, 4\): dim 0 is 6, which \('data',\) splits 4 ways; 8 would fit"
    with pytest.raises(PlanError, match=message):
        program(X[:6])
    with pytest.raises(PlanError, match=message):
        Program(jax.jit(constrained_by_linen), MESH, (None,), None, rules=RULES).lower(X[:6])


def test_inputs_and_outputs_that_do_not_divide_are_told_at_once():
    with pytest.raises(PlanError, match=r'(?s)2 of 2 arrays.*x/a \(6,\): dim 0 is 6.*x/b \(3,\): dim 0 is 3'):
        Program(identity, MESH, ({'a': P('data'), 'b': P('model')},), None)({'a': np.ones(6), 'b': np.ones(3)})
    with pytest.raises(PlanError, match=r'a \(3,\): dim 0 is 3'):
        Program(lambda x: {'a': x[:3]}, MESH, (None,), {'a': P('data')})(np.ones(8))


def test_specs_for_another_tree_are_told():
    with pytest.raises(PlanError, match=r'(?s)x/c: no spec.*x/b: a spec without an array'):
        Program(identity, MESH, ({'a': P(), 'b': P('data')},), None)({'a': X, 'c': X})


def test_a_donated_state_used_again_is_an_error_naming_its_first_leaf():
    step = Program(lambda s: jax.tree.map(lambda x: x + 1, s), MESH, (SPECS,), SPECS, donate_argnums=(0,))
    first = step(PARAMS)
    step(first)
    reader = Program(identity, MESH, (SPECS,), SPECS)
    for program in (step, reader):
        with pytest.raises(PlacementError, match=r"leaf '[sx]/b/s' was donated.*state = step\(state, batch\)"):
            program(first)


def test_one_array_given_twice_cannot_be_donated():
    step = Program(lambda s, x: jax.tree.map(lambda a: a + x, s), MESH, ({'w': P('data')}, P('data')), P('data'),
                   donate_argnums=(0,))  # fmt: skip
    x = place(X, Plan(X, P('data'), MESH))
    with pytest.raises(PlacementError, match=r"leaves 's/w' and 'x' are one array.*Copy one of them"):
        step({'w': x}, x)
    np.testing.assert_array_equal(step({'w': x}, jnp.copy(x))['w'], X + X)


def test_errors_of_the_function_come_through():
    def wrong(x):
        raise ValueError(f'no {x.shape}')

    with pytest.raises(ValueError, match=r'no \(8, 4\)'):
        Program(wrong, MESH, (None,), None)(X)


def test_compiling_ahead_gives_the_same_result():
    program = Program(lambda p: jax.tree.map(lambda x: 2 * x, p), MESH, (SPECS,), SPECS)
    placed = place(PARAMS, Plan(PARAMS, SPECS, MESH))
    compiled = program.lower(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)).compile()
    np.testing.assert_array_equal(compiled(placed)['w'], program(placed)['w'])
