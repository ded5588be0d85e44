"""Data: tasks by name, from text to packed batches, on Grain.

Your own text files become a pre-training task in three lines:

    from t5x_pjit_recipes import data
    source = data.TextFileSource('notes/**/*.txt', unit='paragraph', held_out=0.05)
    data.TaskRegistry.add('notes_span_corruption', source, data.BYTE_FEATURES, data.SPAN_CORRUPTION)

Put them into a module, name that in `DatasetConfig.module`, and 'notes_span_corruption' in `mixture_or_task_name`.
Other tasks are put together from the steps in `data.preprocessors`.
"""

from t5x_pjit_recipes.data import pydoc as _pydoc_tasks  # noqa: F401 (registers the built-in tasks)
from t5x_pjit_recipes.data.config import DatasetConfig
from t5x_pjit_recipes.data.feature_converters import (
    EncDecFeatureConverter,
    FeatureConverter,
    LMFeatureConverter,
    PrefixLMFeatureConverter,
)
from t5x_pjit_recipes.data.iterators import DatasetIterator, EvalDataset
from t5x_pjit_recipes.data.pipelines import (
    get_dataset,
    get_training_eval_datasets,
    get_vocabulary,
    verify_matching_vocabs,
)
from t5x_pjit_recipes.data.preprocessors import LANGUAGE_MODEL, SPAN_CORRUPTION, TEXT_TO_TEXT
from t5x_pjit_recipes.data.sources import SequenceSource, Source, TextFileSource
from t5x_pjit_recipes.data.tasks import BYTE_FEATURES, Feature, Task, TaskRegistry
from t5x_pjit_recipes.data.vocabularies import ByteVocabulary, Vocabulary

__all__ = [
    'BYTE_FEATURES',
    'ByteVocabulary',
    'DatasetConfig',
    'DatasetIterator',
    'EncDecFeatureConverter',
    'EvalDataset',
    'Feature',
    'FeatureConverter',
    'LANGUAGE_MODEL',
    'LMFeatureConverter',
    'PrefixLMFeatureConverter',
    'SPAN_CORRUPTION',
    'SequenceSource',
    'Source',
    'TEXT_TO_TEXT',
    'Task',
    'TaskRegistry',
    'TextFileSource',
    'Vocabulary',
    'get_dataset',
    'get_training_eval_datasets',
    'get_vocabulary',
    'verify_matching_vocabs',
]
