"""Rules for BLOOM and BLOOMZ of every size.

The dims inside attention and MLPs, and the words (250880 of them, which 512 divides), are split over `model`; the
width of the model over `data`. Biases are split where what they are added to is; norms and the other biases stay
whole.
"""

from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.layout.regex_rules import RegexRules
from t5x_pjit_recipes.recipes.rule_sets import make_rules

RULES = (
    (r'(.*/)?word_embeddings/embedding', P('model', 'data')),
    (r'(.*/)?lm_head/kernel', P('data', 'model')),
    (r'.*/self_attention/query_key_value/kernel', P('data', 'model')),
    (r'.*/self_attention/query_key_value/bias', P('model')),
    (r'.*/self_attention/dense/kernel', P('model', 'data')),
    (r'.*/mlp/dense_h_to_4h/kernel', P('data', 'model')),
    (r'.*/mlp/dense_h_to_4h/bias', P('model')),
    (r'.*/mlp/dense_4h_to_h/kernel', P('model', 'data')),
    (r'.*/(dense|dense_4h_to_h)/bias', P()),
    (r'.*layernorm/(scale|bias)', P()),
    (r'(.*/)?ln_f/(scale|bias)', P()),
)


def rules(*, data: str | None = 'data', model: str | None = 'model', torch: bool = False) -> RegexRules:
    """Returns the rules, on mesh axes of these names.

    Args:
      data: mesh axis that fully shards the parameters; None leaves those dims whole.
      model: mesh axis that splits heads, MLPs and words; it should divide the number of heads. None as for `data`.
      torch: whether names and shapes are those of a checkpoint for PyTorch, with '/' in place of '.'.
    """
    return make_rules(RULES, data=data, model=model, torch=torch)
