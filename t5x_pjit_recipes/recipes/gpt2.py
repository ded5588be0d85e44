"""Rules for GPT-2 of every size.

The dims inside attention and MLPs are split over `model`, the width of the model over `data`. There are 50257 words,
which no power of two divides: that dim stays whole, and the width is split over both axes, whose product must divide
it (768 by 64, 1600 by 64). GPT-2's kernels are (out, in), unlike other models', and its weights for PyTorch (in,
out).
"""

from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.recipes.rule_sets import make_rules

RULES = (
    (r'(.*/)?wte/embedding', P(None, ('model', 'data'))),
    (r'(.*/)?wpe/embedding', P('model', 'data')),
    (r'.*/attn/c_attn/kernel', P('model', 'data')),
    (r'.*/mlp/c_fc/kernel', P('model', 'data')),
    (r'.*/c_proj/kernel', P('data', 'model')),
    (r'.*/(c_attn|c_fc)/bias', P('model')),
    (r'.*/c_proj/bias', P()),
    (r'(.*/)?ln_[12f]/(scale|bias)', P()),
)
rules = make_rules(RULES)
