import numpy as np
import pytest
from flax.core import FrozenDict
from flax.linen.partitioning import AxisMetadata

from t5x_pjit_recipes.errors import StateError
from t5x_pjit_recipes.param_axes import override_params_axes_names

PARAMS = {'mlp': {'wi': {'kernel': np.ones((4, 8))}, 'norm': {'scale': np.ones(4)}}, 'head': np.ones((4, 3))}
AXES = {'mlp': {'wi': {'kernel_axes': AxisMetadata(names=('embed', 'mlp'))}}}


def override(*pairs, axes=AXES):
    return override_params_axes_names({'params': PARAMS, 'params_axes': axes, 'cache': {'x': 1}}, pairs)


def test_patterns_complete_and_replace_names():
    made = override((r'mlp/.*/kernel', ('embed', None)), (r'.*/scale', ('embed',)), (r'head', ('embed', 'vocab')))
    assert isinstance(made, FrozenDict)
    assert made['params_axes'] == FrozenDict(
        {
            'mlp': {
                'wi': {'kernel_axes': AxisMetadata(names=('embed', None))},
                'norm': {'scale_axes': AxisMetadata(names=('embed',))},
            },
            'head_axes': AxisMetadata(names=('embed', 'vocab')),
        }
    )
    assert made['cache'] == FrozenDict({'x': 1})


def test_the_first_pattern_that_matches_the_whole_name_wins():
    axes = override((r'mlp/norm/.*', ('first',)), (r'mlp/.*/(kernel|scale)', ('second', 'third')))['params_axes']
    assert axes['mlp']['norm']['scale_axes'].names == ('first',)
    assert axes['mlp']['wi']['kernel_axes'].names == ('second', 'third')


def test_names_stay_where_no_pattern_matches():
    assert override((r'head', ('embed', 'vocab')))['params_axes']['mlp'] == FrozenDict(AXES['mlp'])


def test_without_a_collection_of_axes_it_is_refused():
    with pytest.raises(StateError, match=r"no collection 'params_axes' in \['params'\].*'params_axes': \{\}"):
        override_params_axes_names({'params': PARAMS}, [('head', ('a', 'b'))])


def test_wrong_ranks_are_told_at_once_and_idle_patterns_too():
    with pytest.raises(StateError) as caught:
        override((r'head', ('embed',)), (r'mlp/.*/scale', ('a', 'b')))
    message = str(caught.value)
    assert "head (4, 3): 1 names ('embed',) from pattern 'head'" in message
    assert "mlp/norm/scale (4,): 2 names ('a', 'b') from pattern 'mlp/.*/scale'" in message
    with pytest.warns(UserWarning) as warned:
        override((r'mlp/wi/kernal', ('a', 'b')), (r'head', ('x', 'y')), (r'he.*', ('x', 'y')))
    (message,) = (str(w.message) for w in warned)
    assert '2 of 3 patterns' in message
    assert "'mlp/wi/kernal' (near it are ['mlp/wi/kernel'" in message
    assert "'he.*'" in message
