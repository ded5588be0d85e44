"""How weights, gradients and updates are scaled, parameter by parameter."""

from typing import Any

import jax
import jax.numpy as jnp

from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.metrics import AveragePerStep, MetricsMap


class WeightMetricsComputer:
    """Computes one step's metrics of weights, gradients and updates; averaged over steps."""

    def compute_metrics(self, gradients: Any, old_train_state: Any, new_train_state: Any) -> MetricsMap:
        """Measures what one step did to each parameter.

        Args:
          gradients: tree of gradients, like the params.
          old_train_state: the state before the step.
          new_train_state: the state after it.

        Returns:
          For each parameter, by its '/'-joined name: the root mean square of the new weights, of the gradient, of the
          update and of the update over the old weight (weights of zero left out), and the greatest absolute weight;
          and the L2 norm of all gradients together.
        """
        old, new = old_train_state.params, new_train_state.params
        updates = jax.tree.map(jnp.subtract, new, old)
        per_parameter = {
            'weight_rms': jax.tree.map(_rms, new),
            'weight_gradient_rms': jax.tree.map(_rms, gradients),
            'weight_update_rms': jax.tree.map(_rms, updates),
            'weight_update_divided_by_weight_rms': jax.tree.map(_ratio_rms, updates, old),
            'weight_max': jax.tree.map(lambda x: jnp.max(jnp.abs(x)), new),
        }
        values = {'weight_gradient_norm': _global_norm(gradients)}
        for metric, tree in per_parameter.items():
            values |= {f'{metric}/{name}': value for name, value in named_leaves(tree).items()}
        return {name: AveragePerStep.from_model_output(value) for name, value in values.items()}


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _ratio_rms(x: jax.Array, divisor: jax.Array) -> jax.Array:
    counted = divisor != 0
    ratios = jnp.where(counted, x / jnp.where(counted, divisor, 1), 0)
    return jnp.sqrt(jnp.sum(jnp.square(ratios)) / jnp.maximum(jnp.sum(counted), 1))


def _global_norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))
