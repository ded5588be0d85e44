"""Rules for Hugging Face's T5, T5 1.1, ByT5, mT5, Flan-T5 and UL2.

The dims inside attention and MLPs, and the words, are split over `model`; the width of the model over `data`. Norms
stay whole, and so do the relative position biases, (buckets, heads), which are small.
"""

from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.layout.regex_rules import RegexRules
from t5x_pjit_recipes.recipes.rule_sets import make_rules

RULES = (
    (r'(.*/)?(shared|embed_tokens)/embedding', P('model', 'data')),
    (r'(.*/)?lm_head/kernel', P('data', 'model')),
    (r'.*Attention/[qkv]/kernel', P('data', 'model')),
    (r'.*Attention/o/kernel', P('model', 'data')),
    (r'.*/DenseReluDense/wi(_[01])?/kernel', P('data', 'model')),
    (r'.*/DenseReluDense/wo/kernel', P('model', 'data')),
    (r'.*/relative_attention_bias/embedding', P()),
    (r'.*layer_norm/weight', P()),
)


def rules(*, data: str | None = 'data', model: str | None = 'model', torch: bool = False) -> RegexRules:
    """Returns the rules, on mesh axes of these names.

    Args:
      data: mesh axis that fully shards the parameters; None leaves those dims whole.
      model: mesh axis that splits heads, MLPs and words; it should divide the number of heads. None as for `data`.
      torch: whether names and shapes are those of a checkpoint for PyTorch, with '/' in place of '.'.
    """
    return make_rules(RULES, data=data, model=model, torch=torch)
