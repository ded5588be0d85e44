"""The bench: eight emulated CPU devices, no silent rank promotion, and warnings are errors."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
if hasattr(jax.config, 'jax_disallow_mesh_context_manager'):
    jax.config.update('jax_disallow_mesh_context_manager', True)

# Warnings that are not ours to mend, each with its reason. All others are errors.
IGNORED_WARNINGS = ()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line('filterwarnings', 'error')
    for spec in IGNORED_WARNINGS:
        config.addinivalue_line('filterwarnings', spec)
