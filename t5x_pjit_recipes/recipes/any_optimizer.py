"""What may serve as an optimizer where a recipe takes one: definitions of this package, and optax transformations."""

from typing import Any

import optax

from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.optimizers import OptaxWrapper


def read_optimizer(optimizer_def: Any) -> Any:
    """Returns the definition of an optimizer that is given as one, or as an optax transformation.

    Raises:
      ConfigError: if it is neither, as a class or a function that makes one.

    >>> read_optimizer(optax.sgd(0.1)).state_by_param
    False
    """
    if isinstance(optimizer_def, optax.GradientTransformation | optax.MultiSteps):
        return OptaxWrapper(optimizer_def)
    if isinstance(optimizer_def, type) or not all(hasattr(optimizer_def, m) for m in ('init_state', 'apply_gradient')):
        name = getattr(optimizer_def, '__name__', repr(optimizer_def))
        raise ConfigError(
            f'Cannot train by {name}, a {type(optimizer_def).__name__}: it is no optimizer. '
            f'{"Call it with its arguments" if callable(optimizer_def) else "Give one"}, such as '
            'optimizers.adamw(1e-3), adafactor.Adafactor(1e-3) or any optax transformation.'
        )
    return optimizer_def
