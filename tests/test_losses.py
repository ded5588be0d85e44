"""Losses have T5X's numbers, gradients that finite differences confirm, and factors that say what they count."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from t5x_pjit_recipes import losses
from t5x_pjit_recipes.errors import RecipeError
from t5x_pjit_recipes.losses import SpecialLossNormalizingFactor as Factor

GOLDENS = Path(__file__).parent / 'goldens'


@pytest.mark.parametrize('case', range(4))
def test_golden_numbers(case):
    golden = np.load(GOLDENS / 'losses.npz')
    kwargs = json.loads((GOLDENS / 'losses.json').read_text())[case]
    result = losses.compute_weighted_cross_entropy(
        golden['logits'], golden['targets'].astype(np.int32), golden['weights'], **kwargs
    )
    expected = [golden[f'{case}/{name}'] for name in ('loss', 'z', 'w')]
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('mass', [1.0, 0.7])
def test_gradients_are_those_of_the_formula(mass):
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    targets = mass * jax.nn.softmax(jax.random.normal(jax.random.key(1), (2, 3, 5)))
    loss = lambda logits, targets: losses.cross_entropy_with_logits(logits, targets, 0.01)[0]
    check_grads(loss, (logits, targets), order=1, modes=['rev'])


def test_a_perfect_model_has_loss_zero_under_label_smoothing():
    targets = jnp.array([[0, 2]])
    logits = jnp.log(losses._smooth(targets, 4, 0.3)[0])
    loss, _, weight_sum = losses.compute_weighted_cross_entropy(logits, targets, label_smoothing=0.3)
    assert float(loss) == pytest.approx(0.0, abs=1e-6)
    assert float(weight_sum) == 2.0


def test_targets_of_the_wrong_rank_are_refused():
    with pytest.raises(RecipeError, match=r'logits \(2, 5\) with targets \(2, 3\)'):
        losses.compute_weighted_cross_entropy(jnp.zeros((2, 5)), jnp.zeros((2, 3), jnp.int32))


TARGETS = np.array([[5, 6, 7, 8, 0], [9, 4, 0, 0, 0]], np.int32)
PACKED = np.array([[1, 1, 1, 2, 0], [1, 1, 0, 0, 0]], np.int32)
REAL = [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
WEIGHTS = np.array([[0, 1, 1, 0, 0], [0, 0.5, 0, 0, 0]], np.float32)


@pytest.mark.parametrize(
    ('factor', 'batch', 'expected_factor', 'expected_weights'),
    [
        (None, {}, None, None),
        (3.5, {}, 3.5, None),
        (np.float32(3.5), {'decoder_loss_weights': WEIGHTS}, 3.5, WEIGHTS),
        (Factor.NUM_REAL_TARGET_TOKENS, {}, 6, REAL),
        ('num_real_target_tokens', {'decoder_loss_weights': WEIGHTS}, 2.5, WEIGHTS),
        ('NUM_TOTAL_TARGET_TOKENS', {}, 10, REAL),
        ('average_per_sequence', {}, 2, [[0.25] * 4 + [0], [0.5, 0.5, 0, 0, 0]]),
        (
            'average_per_sequence',
            {'decoder_segment_ids': PACKED},
            3,
            [[1 / 3] * 3 + [1, 0], [0.5, 0.5, 0, 0, 0]],
        ),
        (
            Factor.AVERAGE_PER_SEQUENCE,
            {'decoder_segment_ids': PACKED, 'decoder_loss_weights': WEIGHTS},
            2,
            [[0, 0.5, 0.5, 0, 0], [0, 1, 0, 0, 0]],
        ),
    ],
)
def test_normalizing_factors(factor, batch, expected_factor, expected_weights):
    batch = {'decoder_target_tokens': TARGETS, **batch}
    factor, weights = losses.get_loss_normalizing_factor_and_weights(factor, batch)
    for actual, expected in ((factor, expected_factor), (weights, expected_weights)):
        assert (actual is None) == (expected is None)
        if expected is not None:
            np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_misspelt_factor_is_told_the_nearest_name():
    with pytest.raises(ValueError, match="'average_per_sequnce'.*did you mean 'AVERAGE_PER_SEQUENCE'"):
        losses.convert_special_loss_normalizing_factor_to_enum('average_per_sequnce')
