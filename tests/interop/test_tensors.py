"""Parts of arrays, read from parts of tensors, against the whole read and then cut."""

import itertools

import numpy as np
import pytest

from t5x_pjit_recipes.errors import CheckpointError
from t5x_pjit_recipes.interop.tensors import Stack, Weight, linear, stack

STORED = np.arange(24 * 5).reshape(24, 5)
CASES = {
    'as it is': (Weight('w'), lambda w: w),
    'a linear layer': (linear('w'), lambda w: w.T),
    'fused heads': (Weight('w', ((2, 3, 4), 5), (3, 0, 1, 2)), lambda w: w.reshape(2, 3, 4, 5).transpose(3, 0, 1, 2)),
    'a split without an order': (Weight('w', ((6, 4), 5)), lambda w: w.reshape(6, 4, 5)),
    'heads last': (Weight('w', ((6, 4), (5,)), (2, 1, 0)), lambda w: w.reshape(6, 4, 5).transpose(2, 1, 0)),
}


def read_from(tensors, asked):
    def read(name, index):
        asked.append(np.size(tensors[name][index]))
        return tensors[name][index]

    return read


@pytest.mark.parametrize('case', CASES)
def test_any_part_is_the_part_of_the_whole(case):
    source, view = CASES[case]
    whole = view(STORED)
    assert source.shape(STORED.shape) == whole.shape
    halves = [[slice(0, n), slice(0, n // 2), slice(n // 2, n)] for n in whole.shape]
    for index in itertools.product(*halves):
        part = source.read(read_from({'w': STORED}, []), STORED.shape, index)
        np.testing.assert_array_equal(part, whole[index])


@pytest.mark.parametrize('case', CASES)
def test_a_tensor_comes_back(case):
    source, view = CASES[case]
    np.testing.assert_array_equal(source.stored(view(STORED)), STORED)


def test_only_what_is_wanted_is_read():
    asked = []
    source = CASES['fused heads'][0]
    source.read(read_from({'w': STORED}, asked), STORED.shape, (slice(0, 5), slice(1, 2), slice(0, 3), slice(0, 4)))
    source.read(read_from({'w': STORED}, asked), STORED.shape, (slice(2, 3), slice(0, 2), slice(0, 3), slice(0, 4)))
    assert asked == [12 * 5, 24]


def test_a_stack_reads_the_layers_that_are_wanted():
    tensors = {f'h.{i}.w': STORED + 1000 * i for i in range(4)}
    source = stack(lambda i: linear(f'h.{i}.w'), 4)
    assert isinstance(source, Stack)
    assert source.shape(STORED.shape) == (4, 5, 24)
    asked = []
    part = source.read(read_from(tensors, asked), STORED.shape, (slice(1, 3), slice(0, 5), slice(8, 16)))
    np.testing.assert_array_equal(part, np.stack([tensors[f'h.{i}.w'].T for i in (1, 2)])[:, :, 8:16])
    assert asked == [40, 40]


def test_a_tensor_that_cannot_be_split_so_is_an_error():
    with pytest.raises(CheckpointError, match=r'its shape is \(24, 5\), and \(\(2, 3, 5\), 5\) is wanted'):
        Weight('w', ((2, 3, 5), 5)).shape((24, 5))
