"""The student of a distillation: a model whose loss counts its teacher's probabilities beside the labels."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from t5x_pjit_recipes import losses, metrics, models
from t5x_pjit_recipes.errors import ConfigError, RecipeError, offenders
from t5x_pjit_recipes.recipes.distill_teacher import Lesson


def distillation_loss(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    *,
    temperature: float = 1.0,
    weights: jax.Array | None = None,
    loss_normalizing_factor: float | jax.Array | None = None,
) -> jax.Array:
    """Sums T² · KL(softmax(teacher / T) || softmax(student / T)) over all positions, in nats.

    Its gradients keep their size as the temperature T grows, thanks to the factor T² (Hinton et al. 2015,
    arXiv:1503.02531, section 2). The teacher gets none.

    Args:
      student_logits: (batch, length, vocabulary).
      teacher_logits: likewise; -inf rules a word out.
      temperature: T, above 0; the larger, the more the unlikely words count.
      weights: (batch, length), 0 for padding, or None where all positions count as one.
      loss_normalizing_factor: what the sum is divided by; see `losses.get_loss_normalizing_factor_and_weights`.

    Raises:
      ConfigError: if the temperature is not above 0.
      RecipeError: if the logits' shapes differ, as those of different vocabularies do.
    """
    _check_settings(temperature=temperature)
    if student_logits.shape != teacher_logits.shape:
        raise RecipeError(
            f'Cannot compare the logits of a student, {student_logits.shape}, with those of a teacher, '
            f'{teacher_logits.shape}: a student of {student_logits.shape[-1]} words learns from a teacher of as many, '
            f'not {teacher_logits.shape[-1]}, on the same batch. Give both one vocabulary.'
        )
    teacher_logits = jax.lax.stop_gradient(teacher_logits).astype(jnp.float32)
    log_taught = jax.nn.log_softmax(teacher_logits / temperature)
    log_learnt = jax.nn.log_softmax(student_logits.astype(jnp.float32) / temperature)
    taught = jnp.exp(log_taught)
    divergence = jnp.sum(jnp.where(taught > 0, taught * (log_taught - log_learnt), 0), axis=-1)
    total = temperature**2 * jnp.sum(divergence if weights is None else divergence * weights)
    return total if loss_normalizing_factor is None else total / loss_normalizing_factor


def _check_settings(temperature: float = 1.0, mixing: float = 0.0) -> None:
    faults = []
    if not 0 < temperature < math.inf:
        faults.append(f'temperature={temperature}: it divides logits, so it is a number above 0; 1 to 10 are usual')
    if not 0 <= mixing <= 1:
        faults.append(f"mixing={mixing}: it is the teacher's share of the loss, from 0 (no teacher) to 1 (no labels)")
    if faults:
        raise ConfigError(f'Cannot distil with {len(faults)} of these settings. Correct them:\n' + offenders(faults))


class DistilledModel(models.BaseTransformerModel):
    """A student: trained on lessons, evaluated on batches, where it is the model that it wraps."""

    def __init__(self, model: models.BaseTransformerModel, temperature: float = 2.0, mixing: float = 0.5):
        """Wraps the model to be trained.

        The loss is (1 - mixing) · the model's own + mixing · `distillation_loss`, divided and weighted as its own.

        Args:
          model: the student, with its optimizer.
          temperature: above 0, see `distillation_loss`.
          mixing: the teacher's share of the loss, 0 to 1.

        Raises:
          ConfigError: naming each of the settings that is out of its range.
        """
        _check_settings(temperature, mixing)
        super().__init__(
            model.module,
            model.input_vocabulary,
            model.output_vocabulary,
            model.optimizer_def,
            decode_fn=model.decode_fn,
            loss_normalizing_factor=model._loss_normalizing_factor,
            feature_converter_cls=model.FEATURE_CONVERTER_CLS,
        )
        self._student, self._temperature, self._mixing = model, temperature, mixing

    def loss_fn(self, params: Any, batch: Lesson, dropout_rng: jax.Array | None) -> models.LossAndMetrics:
        """Computes the mixed loss of a lesson.

        The metrics are those of the student's own loss, under their names, so that they compare with a training without
        a teacher; and 'distillation/loss', what is trained, 'distillation/soft_loss_per_nonpadding_target_token' and
        'distillation/agreement', the share of positions where student and teacher hold the same word likeliest.
        """
        if not isinstance(batch, Lesson):
            raise RecipeError(
                f"Cannot distil from a {type(batch).__name__} of {', '.join(sorted(batch))}: the teacher's logits are "
                'missing. Train with distill.DistillationTrainer, or on what distill.make_teacher_fn makes of batches.'
            )
        lesson = batch
        logits = self._compute_logits(params, lesson.batch, dropout_rng)
        hard_loss, found = self._student._loss_of_logits(logits, lesson.batch)
        factor, weights = losses.get_loss_normalizing_factor_and_weights(self._loss_normalizing_factor, lesson.batch)
        soft_loss = distillation_loss(
            logits,
            lesson.teacher_logits,
            temperature=self._temperature,
            weights=weights,
            loss_normalizing_factor=factor,
        )
        loss = (1 - self._mixing) * hard_loss + self._mixing * soft_loss
        return loss, {**found, **_distillation_metrics(loss, soft_loss, logits, lesson, weights)}

    def eval_fn(self, params: Any, batch: models.Batch) -> models.LossAndMetrics:
        """Computes the student's own loss and metrics of a batch, without a teacher."""
        return self._student.eval_fn(params, batch)

    def get_initial_variables(self, rng: Any, input_shapes: Any, input_types: Any = None) -> Any:
        """Initialises the student's variables."""
        return self._student.get_initial_variables(rng, input_shapes, input_types)

    def _compute_logits(self, *args, **kwargs):
        return self._student._compute_logits(*args, **kwargs)


def _distillation_metrics(loss, soft_loss, logits, lesson, weights) -> dict[str, metrics.Metric]:
    agree = jnp.argmax(logits, axis=-1) == jnp.argmax(lesson.teacher_logits, axis=-1)
    count = float(agree.size) if weights is None else jnp.sum(weights, dtype=jnp.float32)
    return {
        'distillation/loss': metrics.AveragePerStep(total=loss),
        'distillation/soft_loss_per_nonpadding_target_token': metrics.Average(total=soft_loss, count=count),
        'distillation/agreement': metrics.Average.from_model_output(agree, mask=weights),
    }
