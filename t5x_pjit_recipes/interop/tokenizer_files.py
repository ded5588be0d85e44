"""tokenizer.json, the file of a Hugging Face folder that says how texts become ids.

It is read by the library `tokenizers`, which comes with the extra `hf`, and not through `transformers`, which would
import PyTorch beside JAX.
"""

import os
import pathlib
from typing import Any

from t5x_pjit_recipes.errors import ConfigError, DataError

TOKENIZER_FILE = 'tokenizer.json'


def read_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """Reads the tokenizer.json that lies in the folder, or returns None where there is none.

    Whole texts are tokenized, whatever it says about truncation and padding.

    Returns:
      A `tokenizers.Tokenizer`, or None.

    Raises:
      ConfigError: if there is one, and `tokenizers` is not installed.
      DataError: if it cannot be read.
    """
    path = pathlib.Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        return None
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            f'Cannot read {str(path)!r} without tokenizers, which is not installed. Install the extra: '
            "pip install 't5x_pjit_recipes[hf]'."
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises no narrower one.
        raise DataError(
            f'Cannot read {str(path)!r}: {error}. Copy the file again, or write it with save_pretrained of the '
            'tokenizer.'
        ) from error
    # Those are left over from how it was last used, and would cut texts off in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
