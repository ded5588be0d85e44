"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import t5x_pjit_recipes

MODULES = [m.name for m in pkgutil.walk_packages(t5x_pjit_recipes.__path__, 't5x_pjit_recipes.')]


def with_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in MODULES:
        module = importlib.import_module(name)
        if any(test.examples for test in finder.find(module)):
            yield name


@pytest.mark.parametrize('name', list(with_examples()))
def test_examples_run(name):
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted
    assert not failed


def test_the_engine_has_examples():
    engine = {'paths', 'axes', 'meshes', 'logical_rules', 'plan', 'placement', 'tiles'}
    assert {f't5x_pjit_recipes.layout.{name}' for name in engine} <= set(with_examples())
