import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.layout import Plan, abstract_mesh, diff

MESH = abstract_mesh(data=4, model=2)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def plan(specs, mesh=MESH, **extra):
    layers = {f'layers_{i}': {'wi': shape(8, 16), 'scale': shape(8)} for i in range(3)}
    specs = {**{f'layers_{i}': {'wi': specs, 'scale': None} for i in range(3)}, **dict.fromkeys(extra)}
    return Plan({**layers, **extra}, specs, mesh)


def test_equal_plans_do_not_differ():
    difference = diff(plan(P(None, 'model')), plan(P(None, 'model')))
    assert not difference
    assert difference.unchanged == 6
    assert 'no arrays changed, 6 alike' in str(difference)
    assert not diff(plan(P('data', None)), plan(P('data')))  # one layout in two spellings


def test_changed_leaves_and_bytes_are_told():
    difference = diff(plan(P(None, 'model')), plan(P('data', 'model')))
    assert [change.name for change in difference.changed] == ['layers_0/wi', 'layers_1/wi', 'layers_2/wi']
    assert [change.bytes_per_device for change in difference.changed] == [64 - 256] * 3
    assert difference.bytes_per_device == (3 * 256 + 96, 3 * 64 + 96)
    text = str(difference).splitlines()
    assert text[2].split('  ') == [
        'layers_*/wi x3', '(8, 16)', "(None, 'model')", "('data', 'model')", '768 B -> 192 B', '-576 B'
    ]  # fmt: skip
    assert text[3:] == ['3 arrays changed, 3 alike', 'each device holds 864 B -> 288 B (-576 B)']


def test_leaves_of_one_plan_alone_are_told():
    difference = diff(plan(None, head=shape(8)), plan(None, tail=shape(4, 4)))
    assert [change.name for change in difference.only_before] == ['head']
    assert [change.name for change in difference.only_after] == ['tail']
    lines = [line.split() for line in str(difference).splitlines()]
    assert ['head', '(8,)', '()', 'absent', '32', 'B', '->', '0', 'B', '-32', 'B'] in lines
    assert '2 arrays changed, 6 alike' in str(difference)


def test_another_mesh_changes_what_is_divided():
    difference = diff(plan(P('data')), plan(P('data'), abstract_mesh(data=8)))
    assert len(difference.changed) == 3
    assert str(difference).startswith('mesh data=4, model=2 on 8 devices -> mesh data=8 on 8 devices\n')
