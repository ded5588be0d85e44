"""Rules for Llama, Llama 2 and Llama 3, and for models that spell their parameters alike (Mistral).

The dims inside attention and MLPs, and the words, are split over `model`; the width of the model over `data`. Norms
stay whole.
"""

from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.layout.regex_rules import RegexRules
from t5x_pjit_recipes.recipes.rule_sets import make_rules

RULES = (
    (r'(.*/)?embed_tokens/embedding', P('model', 'data')),
    (r'(.*/)?lm_head/kernel', P('data', 'model')),
    (r'.*/self_attn/[qkv]_proj/kernel', P('data', 'model')),
    (r'.*/self_attn/o_proj/kernel', P('model', 'data')),
    (r'.*/mlp/(gate|up)_proj/kernel', P('data', 'model')),
    (r'.*/mlp/down_proj/kernel', P('model', 'data')),
    (r'(.*/)?(input_layernorm|post_attention_layernorm|norm)/weight', P()),
)


def rules(*, data: str | None = 'data', model: str | None = 'model', torch: bool = False) -> RegexRules:
    """Returns the rules, on mesh axes of these names.

    Args:
      data: mesh axis that fully shards the parameters; None leaves those dims whole.
      model: mesh axis that splits heads, MLPs and words; it should divide the number of heads, that of keys and
        values too (8 in Llama 3). None as for `data`.
      torch: whether names and shapes are those of a checkpoint for PyTorch, with '/' in place of '.'.
    """
    return make_rules(RULES, data=data, model=model, torch=torch)
