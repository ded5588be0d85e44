"""Built-in tasks on Python's own documentation, which every machine has: `pydoc_span_corruption` and `pydoc_lm`.

About a twelfth of the text, whole topics, is held out as 'validation'. Topics quote each other at length, so paragraphs
that a held-out topic has are taken out of 'train'. The text differs a little from one Python version to the next.
"""

import functools

from t5x_pjit_recipes.data.preprocessors import LANGUAGE_MODEL, SPAN_CORRUPTION
from t5x_pjit_recipes.data.sources import SequenceSource, is_held_out
from t5x_pjit_recipes.data.tasks import BYTE_FEATURES, TaskRegistry

HELD_OUT = 0.1


@functools.cache
def topics() -> dict[str, list[str]]:
    """Returns the texts of the topics by split."""
    from pydoc_data.topics import topics as texts

    held_out = {name: text for name, text in texts.items() if is_held_out(f'topic/{name}', HELD_OUT)}
    seen = {paragraph for text in held_out.values() for paragraph in text.split('\n\n')}
    rest = [text.split('\n\n') for name, text in texts.items() if name not in held_out]
    train = ['\n\n'.join(p for p in paragraphs if p not in seen) for paragraphs in rest]
    return {'train': [text for text in train if text], 'validation': list(held_out.values())}


SOURCE = SequenceSource({'train': lambda: topics()['train'], 'validation': lambda: topics()['validation']})
TaskRegistry.add('pydoc_span_corruption', SOURCE, BYTE_FEATURES, SPAN_CORRUPTION)
TaskRegistry.add('pydoc_lm', SOURCE, {'targets': BYTE_FEATURES['targets']}, LANGUAGE_MODEL)
