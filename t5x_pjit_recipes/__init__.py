"""T5X's partitioner, pip-installable, on current JAX: rules → plan → place."""

__version__ = '0.1.0'
