"""The families of models that there are ready rules for, by name, for gin files and commands."""

from t5x_pjit_recipes.errors import RuleError, did_you_mean
from t5x_pjit_recipes.layout.regex_rules import RegexRules
from t5x_pjit_recipes.recipes import bloom, gpt2, hf_t5, llama, opt, whisper

FAMILIES = {'bloom': bloom, 'gpt2': gpt2, 'hf_t5': hf_t5, 'llama': llama, 'opt': opt, 'whisper': whisper}


def torch_rules(family: str) -> RegexRules:
    """Returns a family's rules for the tensors of a Hugging Face folder, with '/' in place of '.' in their names.

    Raises:
      RuleError: if there is no such family.

    >>> torch_rules('opt').deciding('model/decoder/layers/0/fc1/weight')
    7
    """
    if family not in FAMILIES:
        raise RuleError(
            f'Cannot find rules for the family {family!r}{did_you_mean(family, FAMILIES)}: there are '
            f'{", ".join(FAMILIES)}. Name one of these, or give rules of your own.'
        )
    return FAMILIES[family].rules(torch=True)
