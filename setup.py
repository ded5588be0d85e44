"""Packaging of t5x_pjit_recipes; the tools' settings are in pyproject.toml."""

import pathlib

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
# The gin files stand in gin/ in a checkout and travel as a data-only package of their own in a wheel.
GIN_PACKAGE = 't5x_pjit_recipes.gin_files'

TEST = ['pytest>=8', 'pytest-xdist', 'ruff', 'setuptools>=68', 'wheel', 'tensorboard', 'matplotlib']

setup(
    name='t5x_pjit_recipes',
    version='0.1.0',
    description="T5X's partitioner, pip-installable, on current JAX",
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=[*find_packages(include=['t5x_pjit_recipes', 't5x_pjit_recipes.*']), GIN_PACKAGE],
    package_dir={GIN_PACKAGE: 'gin'},
    package_data={GIN_PACKAGE: ['*.gin', '**/*.gin']},
    install_requires=[
        'jax>=0.10',
        'flax>=0.12',
        'optax>=0.2.5',
        'orbax-checkpoint>=0.12',
        'gin-config>=0.5,<0.6',
        'grain>=0.2.10',
        'absl-py',
        'etils[epath]',
        'numpy',
        'rich',
        'tensorboardX',
        'typing_extensions',
    ],
    extras_require={
        'seqio': ['seqio'],
        'plan': ['jax[tpu]>=0.10'],
        'hf': ['transformers>=5', 'safetensors'],
        'notebooks': ['jupyter', 'matplotlib'],
        'test': [*TEST, 'jax[tpu]>=0.10'],
    },
)
