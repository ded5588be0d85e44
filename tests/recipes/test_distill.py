import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jax.sharding import NamedSharding, PartitionSpec

from t5x_pjit_recipes import checkpoints, layout, models, optimizers, trainer
from t5x_pjit_recipes.data import ByteVocabulary
from t5x_pjit_recipes.errors import CheckpointError, ConfigError, MeshError, PlacementError, RecipeError
from t5x_pjit_recipes.initialization import TrainStateInitializer
from t5x_pjit_recipes.partitioning import PjitPartitioner
from t5x_pjit_recipes.recipes import distill
from t5x_pjit_recipes.train_steps import train_with_lr
from tests import toy_runs

pytestmark = pytest.mark.filterwarnings('ignore:.*learning_rate.*:UserWarning')

WORDS, ROWS, LENGTH = 16, 8, 6


class Bigrams(nn.Module):
    """Predicts a token from the one before it; `width` bounds what it can learn."""

    words: int = WORDS
    width: int = 8

    @nn.compact
    def __call__(self, tokens, targets, *, decode, enable_dropout, **packing):
        init = nn.initializers.normal(0.5)
        table = param_with_axes('table', init, (self.words, self.width), axes=('vocab', 'embed'))
        kernel = param_with_axes('kernel', init, (self.width, self.words), axes=('embed', 'vocab'))
        return table[tokens.astype(jnp.int32)] @ kernel


def make_model(width=8, words=WORDS, z_loss=1e-4, **settings):
    module, optimizer = Bigrams(words, width), optimizers.adam(0.05)
    return models.DecoderOnlyModel(module, ByteVocabulary(), optimizer, z_loss=z_loss, **settings)


def make_odds(words):
    return np.random.default_rng(100).dirichlet(np.full(words - 1, 0.3), words)


def make_batch(seed=0, rows=ROWS, words=WORDS):
    """Walks from word to word by fixed odds; the last position of every other row is padding."""
    odds = make_odds(words)
    rng = np.random.default_rng(seed)
    tokens = np.zeros((rows, LENGTH + 1), np.int32)
    for i in range(LENGTH):
        tokens[:, i + 1] = [1 + rng.choice(words - 1, p=odds[token]) for token in tokens[:, i]]
    tokens[::2, -1] = 0
    targets = tokens[:, 1:]
    weights = (targets > 0).astype(np.int32)
    return {
        'decoder_input_tokens': tokens[:, :-1],
        'decoder_target_tokens': targets,
        'decoder_loss_weights': weights,
    }


class Sentences(toy_runs.Numbered):
    batch = staticmethod(make_batch)


BATCHES = [make_batch(seed) for seed in range(30)]
HELD_OUT = make_batch(1000, rows=64)
SHAPES = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BATCHES[0].items()}
PARTITIONER = PjitPartitioner(2)


def make_initializer(model, partitioner, optimizer=True):
    return TrainStateInitializer(
        model.optimizer_def if optimizer else None,
        model.get_initial_variables,
        {name: x.shape for name, x in SHAPES.items()},
        partitioner,
    )


def knowing_params():
    """Parameters of a teacher that knows the odds; word 0 never follows."""
    kernel = np.full((WORDS, WORDS), -20, np.float32)
    kernel[:, 1:] = np.log(np.maximum(make_odds(WORDS), 1e-8))
    return {'kernel': kernel, 'table': np.eye(WORDS, dtype=np.float32)}


def make_teacher(partitioner=PARTITIONER, model=None, params=None):
    model = make_model(width=WORDS) if model is None else model
    specs = make_initializer(model, partitioner, optimizer=False).train_state_axes.params
    params = knowing_params() if params is None else params
    plan = layout.Plan(params, specs, partitioner.mesh)
    return distill.Teacher(model, layout.place(params, plan), partitioner, vocab_size=model.module.words)


TEACHER = make_teacher()
teach = distill.make_teacher_fn(TEACHER, PARTITIONER)


def distilled(partitioner=PARTITIONER, teach=teach, steps=5, num_microbatches=None, **settings):
    """Trains a narrow student on lessons; returns its state and the metrics of each step."""
    student = distill.DistilledModel(make_model(width=2), **settings)
    initializer = make_initializer(student, partitioner)
    axes = initializer.train_state_axes
    step = distill.make_distill_step(
        student, partitioner, state_axes=axes, vocab_size=WORDS, num_microbatches=num_microbatches
    )
    state, found = initializer.from_scratch(jax.random.PRNGKey(0)), []
    for batch in BATCHES[:steps]:
        state, metrics = step(state, teach(batch))
        found.append(metrics)
    return state, found


distilled_by_default = functools.cache(distilled)


def student_params():
    shapes = {'decoder_input_tokens': (1, 1)}
    return make_model(width=2).get_initial_variables(jax.random.PRNGKey(0), shapes)['params']


def make_lesson(seed=0):
    """A lesson of numpy arrays, for losses without a mesh."""
    return distill.Lesson(make_batch(seed), make_logits(seed, (ROWS, LENGTH, WORDS)))


def held_out_loss(params, model=None):
    model = make_model(width=2) if model is None else model
    _, metrics = model.eval_fn(jax.tree.map(np.asarray, params), HELD_OUT)
    return float(metrics['loss_per_nonpadding_target_token'].compute())


def assert_close(a, b, rtol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=1e-6), a, b)


# The loss.


def make_logits(seed, shape=(2, 3, 5)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 3


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize('temperature', [0.5, 1.0, 4.0])
def test_the_loss_is_the_divergence_of_softened_probabilities_times_the_temperature_squared(temperature):
    student, teacher = make_logits(0), make_logits(1)
    weights = np.array([[1, 1, 0], [0.5, 0, 1]], np.float32)
    p, q = softmax(teacher / temperature), softmax(student / temperature)
    expected = temperature**2 * ((p * np.log(p / q)).sum(-1) * weights).sum() / 7
    got = distill.distillation_loss(
        student, teacher, temperature=temperature, weights=weights, loss_normalizing_factor=7.0
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_student_like_its_teacher_has_no_loss_and_no_gradient():
    logits = make_logits(0)
    loss, gradient = jax.value_and_grad(distill.distillation_loss)(logits, logits, temperature=3.0)
    assert loss == 0
    np.testing.assert_allclose(gradient, np.zeros(logits.shape), atol=1e-6)


def test_at_high_temperature_the_gradient_is_the_difference_of_centred_logits_over_their_number():
    # Hinton et al. 2015, equation 4, times T squared.
    student, teacher = make_logits(0), make_logits(1)
    gradient = jax.grad(distill.distillation_loss)(student, teacher, temperature=1e3)
    centred = [x - x.mean(-1, keepdims=True) for x in (student, teacher)]
    np.testing.assert_allclose(gradient, (centred[0] - centred[1]) / student.shape[-1], atol=0.02)


def test_the_teacher_gets_no_gradient():
    gradient = jax.grad(distill.distillation_loss, argnums=1)(make_logits(0), make_logits(1))
    np.testing.assert_array_equal(gradient, np.zeros((2, 3, 5)))


def test_words_that_the_teacher_rules_out_count_for_nothing():
    student, teacher = make_logits(0), make_logits(1)
    teacher[..., -1] = -np.inf
    loss, gradient = jax.value_and_grad(distill.distillation_loss)(student, teacher)
    p, q = softmax(teacher[..., :-1]), softmax(student)[..., :-1]
    np.testing.assert_allclose(loss, (p * np.log(p / q)).sum(), rtol=1e-5)
    assert np.isfinite(gradient).all()


# Training on lessons.


def test_the_held_out_loss_of_the_student_falls_and_the_teachers_bytes_stay():
    before = jax.tree.map(lambda x: np.asarray(x).tobytes(), TEACHER.params)
    state, metrics = distilled(steps=30)
    assert held_out_loss(state.params) < held_out_loss(student_params()) - 0.3
    assert jax.tree.map(lambda x: np.asarray(x).tobytes(), TEACHER.params) == before
    divergence = [float(m['distillation/soft_loss_per_nonpadding_target_token'].compute()) for m in metrics]
    assert np.mean(divergence[-5:]) < np.mean(divergence[:5]) * 0.75
    assert metrics[-1]['distillation/agreement'].compute() > metrics[0]['distillation/agreement'].compute()


def plainly_trained(steps=5):
    model, axes = make_model(width=2), make_initializer(make_model(width=2), PARTITIONER).train_state_axes
    step = PARTITIONER.partition(
        lambda state, batch: train_with_lr(state, batch, None, None, model, None),
        (axes, PARTITIONER.data_partition_spec),
        (axes, None),
    )
    state = make_initializer(model, PARTITIONER).from_scratch(jax.random.PRNGKey(0))
    for batch in BATCHES[:steps]:
        state, metrics = step(state, batch)
    return state, metrics


def test_without_a_share_for_the_teacher_the_student_trains_as_if_there_were_none():
    state, metrics = distilled(mixing=0.0)
    plain, plain_metrics = plainly_trained()
    assert_close(state.params, plain.params)
    for name in ('loss', 'z_loss', 'accuracy'):
        np.testing.assert_allclose(metrics[-1][name].compute(), plain_metrics[name].compute(), rtol=1e-5)


def test_with_no_share_for_the_labels_they_do_not_matter():
    student, lesson = distill.DistilledModel(make_model(width=2), mixing=1.0), make_lesson()
    other = lesson._replace(batch={**lesson.batch, 'decoder_target_tokens': lesson.batch['decoder_input_tokens']})
    gradient = jax.jit(jax.grad(student.loss_fn, has_aux=True), static_argnums=2)
    assert_close(gradient(student_params(), lesson, None)[0], gradient(student_params(), other, None)[0])


def test_the_loss_is_mixed_of_the_models_own_and_the_divergence():
    lesson, model, params = make_lesson(), make_model(width=2), student_params()
    loss, found = distill.DistilledModel(model, temperature=3.0, mixing=0.25).loss_fn(params, lesson, None)
    own, own_metrics = model.loss_fn(params, lesson.batch, None)
    soft = distill.distillation_loss(
        model._compute_logits(params, lesson.batch),
        lesson.teacher_logits,
        temperature=3.0,
        weights=lesson.batch['decoder_loss_weights'],
    )
    np.testing.assert_allclose(loss, 0.75 * own + 0.25 * soft, rtol=1e-6)
    np.testing.assert_allclose(found['distillation/loss'].total, loss, rtol=1e-6)
    assert found['loss'].total == own_metrics['loss'].total


@pytest.mark.parametrize('factor', [3.0, 'NUM_REAL_TARGET_TOKENS', 'AVERAGE_PER_SEQUENCE'])
def test_both_parts_of_the_loss_are_divided_and_weighted_alike(factor):
    # A teacher that is sure of the right words has no entropy: the divergence is the cross entropy with the labels.
    model, batch = make_model(width=2, z_loss=0.0, loss_normalizing_factor=factor), make_batch()
    sure = np.where(np.arange(WORDS) == batch['decoder_target_tokens'][..., None], 0, -np.inf).astype(np.float32)
    student = distill.DistilledModel(model, temperature=1.0, mixing=1.0)
    loss, _ = student.loss_fn(student_params(), distill.Lesson(batch, sure), None)
    np.testing.assert_allclose(loss, model.loss_fn(student_params(), batch, None)[0], rtol=1e-5)


def test_microbatches_sum_to_the_whole_lesson():
    whole, parts = distilled_by_default(), distilled(num_microbatches=2)
    assert_close(parts[0].params, whole[0].params)
    name = 'distillation/loss'
    np.testing.assert_allclose(parts[1][-1][name].total, whole[1][-1][name].total, rtol=1e-5)


# Meshes.


def halves(student_partitions=2, teacher_partitions=2):
    return (
        PjitPartitioner(student_partitions, devices=distill.second_half_of_devices()),
        PjitPartitioner(teacher_partitions, devices=distill.first_half_of_devices()),
    )


def test_disjoint_halves_train_as_the_same_devices_do():
    student_half, teacher_half = halves(student_partitions=1, teacher_partitions=4)
    state, _ = distilled(student_half, distill.make_teacher_fn(make_teacher(teacher_half), student_half))
    assert_close(state.params, distilled_by_default()[0].params)
    assert {device.id for device in state.params['table'].devices()} == {4, 5, 6, 7}


def test_sharded_trains_as_unsharded_does():
    one = PjitPartitioner(1, devices=jax.devices()[:1])
    state, _ = distilled(one, distill.make_teacher_fn(make_teacher(one), one))
    assert_close(distilled_by_default()[0].params, state.params)


@pytest.mark.parametrize(('words', 'entry'), [(16, 'model'), (15, None), (50257, None), (50264, 'model')])
def test_logits_are_divided_by_rows_and_where_they_divide_by_words(words, entry):
    specs = distill.make_lesson_specs(PARTITIONER, words)
    assert specs == (PartitionSpec('data'), PartitionSpec('data', None, entry))


def test_a_lesson_is_the_batch_and_the_teachers_logits_on_the_students_mesh():
    batch, params = BATCHES[0], knowing_params()
    lesson = teach(batch)
    wanted = NamedSharding(PARTITIONER.mesh, PartitionSpec('data', None, 'model'))
    assert lesson.teacher_logits.sharding.is_equivalent_to(wanted, 3)
    np.testing.assert_allclose(lesson.teacher_logits, params['kernel'][batch['decoder_input_tokens']], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, lesson.batch, batch)
    assert lesson.batch['decoder_target_tokens'].sharding.spec == PartitionSpec('data')


def test_a_step_keeps_the_words_divided_in_microbatches_too():
    student = distill.DistilledModel(make_model(width=2))
    axes = make_initializer(student, PARTITIONER).train_state_axes
    step = distill.make_distill_step(student, PARTITIONER, state_axes=axes, vocab_size=WORDS, num_microbatches=2)
    shapes = make_initializer(student, PARTITIONER).global_train_state_shape
    lesson = distill.Lesson(SHAPES, jax.ShapeDtypeStruct((ROWS, LENGTH, WORDS), jnp.float32))
    text = step.__wrapped__.lower(shapes, lesson).as_text()
    constraints = [
        line for line in text.splitlines() if 'sharding_constraint' in line and f'4x{LENGTH}x{WORDS}' in line
    ]
    assert constraints
    assert all('"data"' in line and '"model"' in line for line in constraints)


# The training loop.


@pytest.fixture(scope='module')
def teacher_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp('teacher')
    run(folder, total_steps=2, model=make_model(), trainer_cls=plain_trainer)
    return str(folder / 'checkpoint_2')


def plain_trainer(**kwargs):
    return trainer.Trainer(learning_rate_fn=lambda step: 0.1, num_microbatches=None, **kwargs)


def run(folder, total_steps=6, *, teacher=None, model=None, trainer_cls=None, **kwargs):
    def make_trainer(**given):
        return distill.DistillationTrainer(teacher=teacher, learning_rate_fn=lambda step: 0.1, **given)

    return toy_runs.run(
        folder,
        total_steps,
        model=distill.DistilledModel(make_model(width=2)) if model is None else model,
        trainer_cls=make_trainer if trainer_cls is None else trainer_cls,
        get_dataset_fn=lambda *_: Sentences(),
        train_eval_get_dataset_fn=lambda *_: {'held_out': [make_batch(1000), make_batch(1001)]},
        verify_matching_vocabs_fn=None,
        **kwargs,
    )


def load(path, model=None, partitioner=PARTITIONER):
    return distill.load_teacher(model or make_model(), partitioner, path=path, batch_shapes=SHAPES)


def test_a_teacher_is_restored_without_its_optimizer(teacher_checkpoint):
    teacher = load(teacher_checkpoint)
    assert teacher.vocab_size == WORDS
    assert [row.name for row in teacher.plan.rows] == ['kernel', 'table']
    layout.check_placement(teacher.params, teacher.plan)
    assert "(None, 'model')" in distill.describe_teacher(teacher)


def test_a_run_distils_says_both_plans_and_goes_on_bit_identical(teacher_checkpoint, tmp_path, capsys):
    teacher = load(teacher_checkpoint)
    _, whole = run(tmp_path / 'whole', teacher=teacher)
    said = capsys.readouterr().out
    assert 'kernel  (2, 16)' in said
    assert 'the teacher, which is not trained, on mesh data=4, model=2 on 8 CPU devices' in said
    assert 'kernel  (8, 16)' in said
    assert 'its logits           384 B per device, (8, 6, 16) for each batch' in said
    assert 'held-out loss' in said
    run(tmp_path / 'pieces', total_steps=2, teacher=teacher)
    _, state = run(tmp_path / 'pieces', teacher=load(teacher_checkpoint))
    jax.tree.map(np.testing.assert_array_equal, state.params, whole.params)
    assert checkpoints.all_steps(tmp_path / 'whole') == [0, 2, 4, 6]


def test_a_run_on_disjoint_halves_trains_as_on_the_same_devices(teacher_checkpoint, tmp_path):
    student_half, teacher_half = halves()
    _, state = run(
        tmp_path / 'halves', teacher=load(teacher_checkpoint, partitioner=teacher_half), partitioner=student_half
    )
    _, expected = run(tmp_path / 'same', teacher=load(teacher_checkpoint))
    assert_close(state.params, expected.params)


# Errors.


def test_every_setting_out_of_its_range_is_named():
    with pytest.raises(ConfigError, match=r'(?s)with 2 of these settings.*temperature=0: .*mixing=1.5: '):
        distill.DistilledModel(make_model(), temperature=0, mixing=1.5)


@pytest.mark.parametrize('temperature', [0, -1.0, math.inf, math.nan])
def test_a_temperature_is_above_0(temperature):
    with pytest.raises(ConfigError, match=f'temperature={temperature}: '):
        distill.distillation_loss(make_logits(0), make_logits(1), temperature=temperature)


@pytest.mark.parametrize('mixing', [-0.1, 1.1, math.nan])
def test_a_share_is_between_0_and_1(mixing):
    with pytest.raises(ConfigError, match=f'mixing={mixing}: '):
        distill.DistilledModel(make_model(), mixing=mixing)


def test_different_vocabularies_are_refused():
    lesson = distill.Lesson(make_batch(), make_logits(0, (ROWS, LENGTH, 20)))
    with pytest.raises(RecipeError, match='a student of 16 words learns from a teacher of as many, not 20'):
        distill.DistilledModel(make_model(width=2)).loss_fn(student_params(), lesson, None)


def test_a_wrong_size_of_the_vocabulary_is_refused():
    wrong = distill.Teacher(TEACHER.model, TEACHER.params, PARTITIONER, vocab_size=12)
    with pytest.raises(RecipeError, match=r'vocab_size=12: the logits of the teacher are \(8, 6, 16\)'):
        distill.make_teacher_fn(wrong, PARTITIONER)(BATCHES[0])


def test_the_checkpoint_of_another_model_is_refused_with_every_leaf(teacher_checkpoint):
    with pytest.raises(
        CheckpointError, match=r'(?s)checkpoint_2 into .*kernel \(8, 16\).*\(4, 16\).*table \(16, 8\).*\(16, 4\)'
    ):
        load(teacher_checkpoint, make_model(width=4))


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match='checkpoint_5'):
        load(str(tmp_path / 'checkpoint_5'))


def test_meshes_that_share_some_devices_are_refused():
    half = PjitPartitioner(2, devices=distill.first_half_of_devices())
    with pytest.raises(MeshError, match='teacher on 8 devices to a student on 4: they share 4'):
        distill.make_teacher_fn(TEACHER, half)


def test_an_odd_number_of_devices_has_no_halves(monkeypatch):
    devices = jax.devices()[:3]
    monkeypatch.setattr(jax, 'devices', lambda: devices)
    with pytest.raises(MeshError, match='halve 3 devices'):
        distill.second_half_of_devices()


def test_a_teacher_that_lies_elsewhere_is_refused():
    with pytest.raises(PlacementError, match=r'(?s)with 2 arrays that do not lie on the mesh data=4.*table \(16, 16\)'):
        distill.Teacher(make_model(), knowing_params(), PARTITIONER, vocab_size=WORDS)


def test_a_batch_without_a_lesson_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"decoder_target_tokens: the teacher's logits are missing"):
        run(tmp_path, trainer_cls=plain_trainer)


def test_a_model_that_has_no_use_for_a_teacher_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='distil to a DecoderOnlyModel'):
        run(tmp_path, teacher=TEACHER, model=make_model(width=2))
