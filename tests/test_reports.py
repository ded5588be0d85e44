import gzip
import pathlib

from t5x_pjit_recipes import layout, optimizers, partitioning, reports
from t5x_pjit_recipes.initialization import TrainStateInitializer
from t5x_pjit_recipes.layout.plan import format_bytes
from tests import t5_models

PARAMETERS = 74368
NORMS = 12 * 32  # the scales, replicated; all else is divided in two
GOLDEN = pathlib.Path(__file__).parent / 'goldens' / 'model-info.txt.gz'


def initialize(partitioner, optimizer_def=None):
    model = t5_models.make_model(optimizer_def)
    return TrainStateInitializer(**t5_models.initializer_arguments(model), partitioner=partitioner)


def test_the_list_of_variables_is_the_golden_one(tmp_path):
    partitioner = partitioning.PjitPartitioner(1)
    file = tmp_path / 'model-info.txt'
    reports.log_model_info(str(file), initialize(partitioner).global_train_state_shape, partitioner)
    assert file.read_text() == gzip.decompress(GOLDEN.read_bytes()).decode()


def test_the_description_adds_up():
    mesh = layout.abstract_mesh(data=4, model=2)
    initializer = initialize(partitioning.PjitPartitioner(mesh=mesh), optimizers.adamw(1e-3))
    text = reports.describe_train_state(initializer.global_train_state_shape, initializer.train_state_axes, mesh)
    lines = text.splitlines()
    assert lines[0] == 'mesh data=4, model=2 on 8 devices'
    assert any(line.startswith('encoder/layers_*/mlp/wi_*/kernel x4') for line in lines)
    held = {
        line[:16].strip(): line[16:].split(' per device')[0].strip() for line in lines[-5:] if ' per device' in line
    }
    params = 4 * ((PARAMETERS - NORMS) // 2 + NORMS)
    counts = {'params': params, 'gradients': params, 'optimizer state': 2 * params + 8, 'together': 4 * params + 8}
    assert held == {name: format_bytes(count) for name, count in counts.items()}
    assert lines[-2].strip() == '105 slots: 104 as their parameter, 1 replicated (4 B)'


def test_a_state_for_inference_has_no_gradients():
    mesh = layout.abstract_mesh(data=4, model=2)
    model = t5_models.make_model()
    arguments = {**t5_models.initializer_arguments(model), 'optimizer_def': None}
    initializer = TrainStateInitializer(**arguments, partitioner=partitioning.PjitPartitioner(mesh=mesh))
    text = reports.describe_train_state(initializer.global_train_state_shape, initializer.train_state_axes, mesh)
    assert 'gradients' not in text
    assert 'optimizer' not in text
