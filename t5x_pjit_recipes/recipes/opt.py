"""Rules for OPT of every size.

The dims inside attention and MLPs, and the 50272 words, which 32 divides, are split over `model`; the width of the
model over `data`. There are 2050 positions, which 4 does not divide: that dim stays whole, and the width is split
over both axes. Biases are split where what they are added to is; norms and the other biases stay whole.
"""

from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.recipes.rule_sets import make_rules

RULES = (
    (r'(.*/)?embed_tokens/embedding', P('model', 'data')),
    (r'(.*/)?embed_positions/embedding', P(None, ('model', 'data'))),
    (r'(.*/)?lm_head/kernel', P('data', 'model')),
    (r'.*/project_(in|out)/kernel', P('data', 'model')),
    (r'.*/self_attn/[qkv]_proj/kernel', P('data', 'model')),
    (r'.*/self_attn/out_proj/kernel', P('model', 'data')),
    (r'.*/fc1/kernel', P('data', 'model')),
    (r'.*/fc2/kernel', P('model', 'data')),
    (r'.*/([qkv]_proj|fc1)/bias', P('model')),
    (r'.*/(out_proj|fc2)/bias', P()),
    (r'.*layer_norm/(scale|bias)', P()),
)
rules = make_rules(RULES)
