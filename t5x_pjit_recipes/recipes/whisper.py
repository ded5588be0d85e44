"""Rules for Whisper of every size.

The dims inside attention and MLPs are split over `model`, the width of the model over `data`. There are 51865 words
(51866 in the newest), which 8 does not divide, and 1500 positions of sound: those dims stay whole, and the width is
split over both axes, whose product must divide it (384 by 64). Biases are split where what they are added to is;
norms and the other biases stay whole.
"""

from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.recipes.rule_sets import make_rules

RULES = (
    (r'.*/embed_(tokens|positions)/embedding', P(None, ('model', 'data'))),
    (r'(.*/)?proj_out/kernel', P(('model', 'data'), None)),
    (r'.*/conv1/kernel', P(None, None, 'model')),
    (r'.*/conv2/kernel', P(None, 'data', 'model')),
    (r'.*/[qkv]_proj/kernel', P('data', 'model')),
    (r'.*/out_proj/kernel', P('model', 'data')),
    (r'.*/fc1/kernel', P('data', 'model')),
    (r'.*/fc2/kernel', P('model', 'data')),
    (r'.*/([qv]_proj|fc1)/bias', P('model')),
    (r'.*/(out_proj|fc2|conv[12])/bias', P()),
    (r'.*layer_norm/(scale|bias)', P()),
)
rules = make_rules(RULES)
