import json
import logging
import math
import threading

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from t5x_pjit_recipes import layout
from t5x_pjit_recipes import trainer as trainer_lib
from t5x_pjit_recipes.errors import TrainingError
from t5x_pjit_recipes.metrics import AveragePerStep, LastValue, Step, Sum, TimeRate
from t5x_pjit_recipes.partitioning import PjitPartitioner
from t5x_pjit_recipes.trainer import Trainer, WeightMetricsComputer

ROWS, FEATURES = 8, 4


@flax.struct.dataclass
class State:
    """A train state of another make: plain SGD."""

    step: jax.Array
    params: dict
    flax_mutables: dict = flax.struct.field(default_factory=dict)

    def apply_gradient(self, grads, learning_rate, flax_mutables=None):
        params = jax.tree.map(lambda p, g: (p - learning_rate * g).astype(p.dtype), self.params, grads)
        return State(self.step + 1, params, flax_mutables or self.flax_mutables)


class Model:
    """Linear regression; `draws` are what dropout would go by."""

    def loss_fn(self, params, batch, dropout_rng):
        loss = jnp.sum(jnp.square(batch['x'] @ params['w'] - batch['y']))
        metrics = {
            'loss': AveragePerStep.from_model_output(loss),
            'rows': Sum.from_model_output(jnp.ones(batch['y'].shape)),
            'parts': Step(),
            'last': LastValue.from_model_output(batch['y'][-1]),
            'timing/rows_per_second': TimeRate.from_model_output(jnp.float32(len(batch['y']))),
        }
        if dropout_rng is not None:
            metrics['draws'] = Sum.from_model_output(jax.random.uniform(dropout_rng))
        return loss, metrics

    def eval_fn(self, params, batch):
        return self.loss_fn(params, batch, None)


class ModelWithMutables(Model):
    def loss_fn(self, params, batch, dropout_rng, flax_mutables):
        loss, metrics = super().loss_fn(params, batch, dropout_rng)
        return loss, (metrics, {'stats': {'count': flax_mutables['stats']['count'] + 1}})

    def eval_fn(self, params, batch, flax_mutables):
        loss, metrics = super().loss_fn(params, batch, None)
        return loss, metrics | {'count': Sum.from_model_output(flax_mutables['stats']['count'])}


def make_state(dtype=jnp.float32, **mutables):
    return State(jnp.int32(0), {'w': jnp.arange(1, FEATURES + 1, dtype=dtype) / 4}, mutables)


def make_batch(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    return {'x': rng.normal(size=(rows, FEATURES)).astype('f'), 'y': rng.normal(size=(rows,)).astype('f')}


def batches(start=0, stop=100):
    return (make_batch(seed) for seed in range(start, stop))


def learning_rate(step):
    return 0.01 / (1 + step)


PARTITIONER = PjitPartitioner(num_partitions=2)
AXES = State(None, {'w': PartitionSpec('model')}, {})


def placed(state, axes=AXES):
    return layout.place(state, layout.Plan(state, axes, PARTITIONER.mesh))


def make_trainer(model=None, state=None, summary_dir=None, axes=AXES, seed=0, **settings):
    settings = {'learning_rate_fn': learning_rate, 'num_microbatches': None, 'eval_names': ['a', 'b']} | settings
    return Trainer(
        model=model or Model(),
        train_state=placed(state or make_state(), axes),
        partitioner=PARTITIONER,
        summary_dir=summary_dir,
        train_state_axes=axes,
        rng=jax.random.PRNGKey(seed),
        **settings,
    )


def gradients(num_microbatches, state=None, rng=None, model=None, batch=None):
    return trainer_lib.accumulate_grads_microbatched(
        model or Model(), state or make_state(), batch or make_batch(), rng, num_microbatches
    )


# The step functions.


@pytest.mark.parametrize('num_microbatches', [0, 1, 2, 4, 8])
def test_microbatches_sum_to_the_whole_batch(num_microbatches):
    grads, metrics, mutables = gradients(num_microbatches)
    whole_grads, whole_metrics, _ = gradients(None)
    np.testing.assert_allclose(grads['w'], whole_grads['w'], rtol=1e-6)
    assert metrics['parts'].compute() == max(num_microbatches, 1)
    for name in ('loss', 'rows'):
        np.testing.assert_allclose(metrics[name].total, whole_metrics[name].total, rtol=1e-6)
    assert metrics['last'].compute() == make_batch()['y'][-1]
    assert mutables is None


@pytest.mark.parametrize(('num_microbatches', 'dtype'), [(None, jnp.bfloat16), (0, jnp.bfloat16), (2, jnp.float32)])
def test_gradients_are_summed_in_float32(num_microbatches, dtype):
    assert gradients(num_microbatches, make_state(jnp.bfloat16))[0]['w'].dtype == dtype


def test_each_microbatch_draws_with_a_key_of_its_own():
    rng = jax.random.PRNGKey(1)
    draws = [jax.random.uniform(jax.random.fold_in(rng, i)) for i in range(4)]
    assert gradients(4, rng=rng)[1]['draws'].compute() == pytest.approx(float(sum(draws)), rel=1e-6)


@pytest.mark.parametrize('num_microbatches', [None, 0, 1])
def test_a_whole_batch_draws_with_the_key_itself(num_microbatches):
    rng = jax.random.PRNGKey(1)
    assert gradients(num_microbatches, rng=rng)[1]['draws'].compute() == jax.random.uniform(rng)


def test_a_batch_that_does_not_divide_is_an_error():
    with pytest.raises(TrainingError, match='batch of 8 into 3 microbatches'):
        gradients(3)


@pytest.mark.parametrize(('num_microbatches', 'count'), [(None, 1), (2, 2), (4, 4)])
def test_mutables_go_from_microbatch_to_microbatch(num_microbatches, count):
    state = make_state(stats={'count': jnp.int32(0)})
    new_state, _ = trainer_lib.train_with_lr(state, make_batch(), 0.1, None, ModelWithMutables(), num_microbatches)
    assert new_state.flax_mutables['stats']['count'] == count
    assert trainer_lib.eval_step(ModelWithMutables(), new_state, make_batch())['count'].compute() == count


def test_microbatches_are_laid_out_where_a_mesh_is_in_scope():
    def text():
        return str(jax.make_jaxpr(lambda batch: gradients(2, batch=batch))(make_batch()))

    with jax.sharding.use_abstract_mesh(PARTITIONER.mesh.abstract_mesh):
        assert text().count('sharding_constraint') == len(make_batch())
    assert 'sharding_constraint' not in text()


def test_gradients_are_applied_with_the_learning_rate_and_it_is_reported():
    state, grads = make_state(), {'w': jnp.ones(FEATURES)}
    given = {'loss': Sum(1.0)}
    new_state, metrics = trainer_lib.apply_grads(state, grads, given, jnp.float32(0.5), None)
    np.testing.assert_allclose(new_state.params['w'], state.params['w'] - 0.5)
    assert metrics['learning_rate'].compute() == metrics['learning_rate/current'].compute() == 0.5
    assert metrics['loss'] == given['loss']


def test_weight_metrics_measure_one_step():
    def state(w):
        return State(jnp.int32(0), {'mlp': {'w': jnp.array(w)}, 'b': jnp.zeros(2)})

    grads = {'mlp': {'w': jnp.array([3.0, 0.0])}, 'b': jnp.array([0.0, 4.0])}
    metrics = WeightMetricsComputer().compute_metrics(grads, state([2.0, -4.0]), state([1.0, -7.0]))
    values = {name: float(metric.compute()) for name, metric in metrics.items()}
    assert values == pytest.approx(
        {
            'weight_gradient_norm': 5.0,
            'weight_rms/mlp/w': 5.0,
            'weight_rms/b': 0.0,
            'weight_gradient_rms/mlp/w': math.sqrt(4.5),
            'weight_gradient_rms/b': math.sqrt(8.0),
            'weight_update_rms/mlp/w': math.sqrt(5.0),
            'weight_update_rms/b': 0.0,
            'weight_update_divided_by_weight_rms/mlp/w': math.sqrt((0.25 + 0.5625) / 2),
            'weight_update_divided_by_weight_rms/b': 0.0,
            'weight_max/mlp/w': 7.0,
            'weight_max/b': 0.0,
        }
    )


def test_a_weight_of_zero_is_left_out_of_the_relative_update():
    def state(w):
        return State(jnp.int32(0), {'w': jnp.array(w)})

    metrics = WeightMetricsComputer().compute_metrics({'w': jnp.ones(2)}, state([0.0, 2.0]), state([1.0, 3.0]))
    assert metrics['weight_update_divided_by_weight_rms/w'].compute() == 0.5


# The trainer.


def plain_training(num_steps, num_microbatches=None):
    """Trains on one device, without partitioner or trainer."""
    state, losses = make_state(), []
    for step in range(num_steps):
        rng = jax.random.fold_in(jax.random.PRNGKey(0), step)
        state, metrics = trainer_lib.train_with_lr(
            state, make_batch(step), learning_rate(step), rng, Model(), num_microbatches
        )
        losses.append(float(metrics['loss'].total))
    return state, losses


@pytest.mark.parametrize('num_microbatches', [None, 2])
@pytest.mark.parametrize('compiled', [False, True])
def test_training_laid_out_equals_plain_training(num_microbatches, compiled):
    expected, losses = plain_training(4, num_microbatches)
    with make_trainer(num_microbatches=num_microbatches) as trainer:
        if compiled:
            trainer.compile_train(make_batch())
        summary = trainer.train(batches(), 4).result()
        np.testing.assert_allclose(trainer.train_state.params['w'], expected.params['w'], rtol=1e-5)
        assert int(trainer.train_state.step) == 4
    assert summary['loss'].value == pytest.approx(np.mean(losses), rel=1e-5)
    assert summary['rows'].value == 4 * ROWS
    assert summary['parts'].value == 4
    assert summary['learning_rate'].value == pytest.approx(np.mean([learning_rate(step) for step in range(4)]))
    assert summary['learning_rate/current'].value == pytest.approx(learning_rate(3))
    assert summary['timing/rows_per_second'].value > 0
    assert summary['timing/uptime'].value > 0


def test_draws_depend_on_seed_and_step_alone():
    def draws(seed, *parts):
        with make_trainer(seed=seed) as trainer:
            batch_iter = batches()
            return sum(trainer.train(batch_iter, part).result()['draws'].value for part in parts)

    assert draws(0, 4) == pytest.approx(draws(0, 1, 3), rel=1e-6)
    assert draws(0, 4) != pytest.approx(draws(1, 4), rel=1e-3)


def test_a_typed_key_draws_as_a_raw_one():
    def draws(key):
        with make_trainer() as trainer:
            trainer._base_rng = key
            return trainer.train(batches(), 1).result()['draws'].value

    assert draws(jax.random.key(5)) == draws(jax.random.PRNGKey(5))


def compilations(caplog):
    return [record.getMessage().split(' with ')[0] for record in caplog.records if 'Compiling' in record.getMessage()]


@pytest.mark.parametrize('num_microbatches', [None, 2])
def test_steps_compile_once(caplog, num_microbatches):
    trainer = make_trainer(num_microbatches=num_microbatches)
    with trainer, jax.log_compiles(), caplog.at_level(logging.WARNING, logger='jax'):
        trainer.train(batches(), 3).result()
        assert compilations(caplog).count('Compiling jit(train_step)') == 1
        assert compilations(caplog).count('Compiling jit(merge_metrics)') <= 1
        caplog.clear()
        trainer.train(batches(), 3).result()
        assert compilations(caplog) == []


def test_a_compiled_step_is_not_compiled_again(caplog):
    with make_trainer() as trainer, jax.log_compiles(), caplog.at_level(logging.WARNING, logger='jax'):
        trainer.compile_train(make_batch())
        trainer.train(batches(), 2).result()
        assert compilations(caplog).count('Compiling jit(train_step)') == 1


def test_training_does_not_wait_for_its_metrics():
    free = threading.Event()
    with make_trainer() as trainer:
        trainer.train_metrics_manager._worker.submit(free.wait, 60)
        future = trainer.train(batches(), 3, start_step=0)
        assert not future.done()
        free.set()
        assert future.result()['rows'].value == 3.0 * ROWS


def test_batches_may_be_global_arrays():
    def trained(make):
        with make_trainer() as trainer:
            trainer.train((make(batch) for batch in batches()), 2).result()
            return np.asarray(trainer.train_state.params['w'])

    sharding = jax.sharding.NamedSharding(PARTITIONER.mesh, PARTITIONER.data_partition_spec)
    np.testing.assert_array_equal(trained(lambda b: jax.device_put(b, sharding)), trained(lambda b: b))


def test_batches_that_end_leave_the_last_state():
    with make_trainer() as trainer:
        trainer.train(batches(0, 1), 1)
        with pytest.raises(TrainingError, match='train 5 steps from step 1: the batches ended after 2, at step 3'):
            trainer.train(batches(1, 3), 5)
        np.testing.assert_allclose(trainer.train_state.params['w'], plain_training(3)[0].params['w'], rtol=1e-5)


def test_no_steps_make_an_empty_summary():
    with make_trainer() as trainer:
        assert trainer.train(batches(), 0).result() == {}
        assert int(trainer.train_state.step) == 0


def test_mutables_are_trained_and_evaluated():
    axes = State(None, {'w': PartitionSpec()}, {'stats': {'count': None}})
    state = make_state(stats={'count': jnp.int32(0)})
    with make_trainer(ModelWithMutables(), state, axes=axes, num_microbatches=2) as trainer:
        trainer.train(batches(), 3).result()
        assert trainer.eval({'a': batches(0, 1)})['a']['count'].value == 6


def test_summaries_are_written_at_their_steps(tmp_path):
    with make_trainer(summary_dir=str(tmp_path), weight_metrics_computer=WeightMetricsComputer()) as trainer:
        trainer.compile_train(make_batch())
        trainer.train(batches(), 2, start_step=0)
        trainer.train(batches(), 3)
        trainer.eval({'a': batches(0, 2)})
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [(line['step'], line['collection']) for line in lines] == [
        (0, 'train'),
        (2, 'train'),
        (5, 'train'),
        (5, 'training_eval/a'),
    ]
    assert 'timing/compilation_seconds' in lines[0]
    assert {'loss', 'learning_rate', 'weight_gradient_norm', 'weight_rms/w'} <= set(lines[1])


# Evaluation.


def plain_losses(start, stop):
    return [float(Model().eval_fn(make_state().params, batch)[0]) for batch in batches(start, stop)]


@pytest.mark.parametrize('compiled', [False, True])
def test_evaluation_merges_the_batches(compiled):
    with make_trainer() as trainer:
        if compiled:
            trainer.compile_eval({'a': make_batch(), 'b': make_batch()})
        summaries = trainer.eval({'a': batches(0, 3), 'b': batches(3, 4)})
    assert summaries['a']['loss'].value == pytest.approx(np.mean(plain_losses(0, 3)), rel=1e-5)
    assert summaries['b']['loss'].value == pytest.approx(np.mean(plain_losses(3, 4)), rel=1e-5)
    assert summaries['a']['rows'].value == 3 * ROWS
    assert 'draws' not in summaries['a']


def test_an_evaluation_without_batches_is_empty():
    with make_trainer() as trainer:
        assert trainer.eval({'a': iter(())}) == {'a': {}}


def test_equal_shapes_share_one_compilation(caplog):
    with make_trainer() as trainer, jax.log_compiles(), caplog.at_level(logging.WARNING, logger='jax'):
        trainer.compile_eval({'a': make_batch(0), 'b': make_batch(1)})
        trainer.eval({'a': batches(0, 2), 'b': batches(0, 1)})
        assert compilations(caplog).count('Compiling jit(partitioned_eval_step)') == 1
        trainer.compile_eval({'b': make_batch(rows=16)})
        assert compilations(caplog).count('Compiling jit(partitioned_eval_step)') == 2


def test_an_unknown_evaluation_is_an_error():
    with make_trainer(eval_names=['pydoc']) as trainer:
        with pytest.raises(TrainingError, match=r"'pydocs' \(did you mean 'pydoc'\?\).*\['pydoc'\]"):
            trainer.eval({'pydocs': batches()})
        with pytest.raises(TrainingError, match='pydocs'):
            trainer.compile_eval({'pydocs': make_batch()})


def test_long_evaluation_names_are_cut_for_the_file_system(tmp_path):
    with make_trainer(summary_dir=str(tmp_path), eval_names=['n' * 200]) as trainer:
        trainer.eval({'n' * 200: batches(0, 1)})
    assert [path.name for path in (tmp_path / 'training_eval').iterdir()] == ['n' * 113]
