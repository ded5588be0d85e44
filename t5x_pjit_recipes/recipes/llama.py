"""Rules for Llama, Llama 2 and Llama 3, and for models that spell their parameters alike (Mistral).

The dims inside attention and MLPs, and the words, are split over `model`; the width of the model over `data`. Norms
stay whole. Keys and values have fewer heads than queries (8 in Llama 3), which `model` should divide too.
"""

from jax.sharding import PartitionSpec as P

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
rules = make_rules(RULES)
