import logging
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_pjit_recipes import layout, partitioning
from t5x_pjit_recipes.errors import ConfigError, DataError, MeshError
from t5x_pjit_recipes.examples.bloom import layers
from t5x_pjit_recipes.examples.bloom.network import Block, Bloom, BloomConfig
from t5x_pjit_recipes.interop.hugging_face import Stack, Weight
from t5x_pjit_recipes.layout.paths import map_named, named_leaves
from t5x_pjit_recipes.recipes import bloom, bloom_folders, generation
from t5x_pjit_recipes.train_state import InferenceState

MODULE = Bloom(BloomConfig(vocab_size=64, emb_dim=24, num_heads=6, num_layers=2))
PROMPTS = [[5, 9, 0], [3], [7, 1, 2, 8, 4, 6, 11, 0], [0, 0], [12, 13, 14]]
GREEDY = bloom.Sampling(max_new_tokens=6, eos_id=None)


def make_state(module=MODULE, dtype=jnp.float32):
    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, 1), jnp.int32))
    rng = np.random.default_rng(0)

    def weight(name, leaf):
        noise = rng.normal(size=leaf.shape)
        if name.endswith('ln_f/scale'):
            return jnp.asarray(noise, dtype)  # With these signs tokens are not followed by themselves.
        return jnp.asarray(1 + 0.3 * noise if name.endswith('scale') else 0.3 * noise, dtype)

    return InferenceState.create({**variables, 'params': map_named(weight, variables['params'])})


def make_partitioner(num_partitions=2, params=1):
    rules = partitioning.standard_logical_axis_rules(1, params)
    return partitioning.PjitPartitioner(num_partitions, logical_axis_rules=rules, strict=True)


@pytest.fixture(scope='module')
def state():
    return make_state()


@pytest.fixture(scope='module')
def partitioner():
    return make_partitioner()


@pytest.fixture(scope='module')
def tokens():
    return np.random.default_rng(1).integers(0, 64, (8, 10)).astype(np.int32)


@pytest.fixture(scope='module')
def logits(state, tokens):
    return np.asarray(jax.jit(apply)(state.params, tokens))


def apply(params, tokens):
    return MODULE.apply({'params': params}, tokens)


def prefill(params, tokens, start):
    return extend(params, MODULE.empty_cache(tokens.shape[0], 16), tokens, start)


def extend(params, cache, tokens, start):
    return MODULE.apply({'params': params}, cache, tokens, start, method='extend')


@pytest.fixture(scope='module')
def naive(state):
    """Returns a function that continues prompts without cache or padding, one by one."""
    # What stands behind a token does not change its logits, as another test says.
    run = jax.jit(lambda params, tokens: apply(params, tokens[None])[0])

    def continue_prompt(prompt, steps):
        text = list(prompt)
        for _ in range(steps):
            padded = np.zeros(24, np.int32)
            padded[: len(text)] = text
            text.append(int(np.argmax(run(state.params, padded)[len(text) - 1])))
        return text[len(prompt) :]

    return continue_prompt


@pytest.fixture(scope='module')
def generate(state, partitioner):
    return bloom.make_generate(MODULE, partitioner, state=state, sampling=GREEDY)


@pytest.mark.parametrize(
    ('num_heads', 'slopes'),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (8, [2**-i for i in range(1, 9)]),
        (12, [*(2**-i for i in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (112, [*(2 ** (-i / 8) for i in range(1, 65)), *(2 ** (-i / 16) for i in range(1, 96, 2))]),
    ],
)
def test_alibi_slopes(num_heads, slopes):
    assert layers.alibi_slopes(num_heads) == pytest.approx(slopes, rel=1e-12)


def test_biases_fall_with_distance_and_mask_what_lies_ahead():
    biases = layers.alibi_biases(2, jnp.array([[[-2, -1, 0, 1]]]))
    np.testing.assert_allclose(biases[0, :, 0, :3], [[-0.125, -0.0625, 0], [-2 / 256, -1 / 256, 0]])
    assert (biases[..., 3] == layers.MASKED).all()


@pytest.mark.parametrize(
    ('sizes', 'count'),
    [((1024, 16, 24), 559_214_592), ((4096, 32, 30), 7_069_016_064), ((14336, 112, 70), 176_247_271_424)],
)
def test_published_models_have_as_many_parameters(sizes, count):
    shapes = bloom_folders.variable_shapes(BloomConfig(250880, *sizes))['params']
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == count


@pytest.mark.parametrize('dims', [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_the_standard_rules_cover_every_axis_of_the_largest_model(dims):
    module = Bloom(BloomConfig(250880, 14336, 112, 70, dtype=jnp.bfloat16))
    rules = partitioning.standard_logical_axis_rules(*dims)
    mesh = layout.abstract_mesh(data=16, model=16)
    partitioner = partitioning.PjitPartitioner(mesh=mesh, logical_axis_rules=rules, strict=True)
    state, plan = bloom.plan_model(module, partitioner)
    plan.check()
    assert plan.bytes_per_device < 1.01 * plan.num_bytes / (16 if dims[1] == 1 else 256)
    kernel = next(row for row in plan.rows if row.name == 'h/self_attention/query_key_value/kernel')
    assert kernel.spec[2] == 'model'
    assert state.params_axes['h']['mlp']['dense_h_to_4h']['kernel_axes'].names == ('layers', 'embed', 'mlp')


@pytest.mark.parametrize('params', [1, 2])
def test_sharded_logits_are_unsharded_ones(state, tokens, logits, params):
    partitioner = make_partitioner(2, params)
    specs, rows = partitioner.get_mesh_axes(state).params, partitioner.data_partition_spec
    got = partitioner.partition(apply, (specs, rows), rows)(state.params, tokens)
    np.testing.assert_allclose(got, logits, rtol=0, atol=1e-5)


def test_scanned_layers_are_layers_one_after_the_other(state, tokens, logits):
    class Unrolled(Bloom):
        def _run(self, tokens, start, cache):
            x = self.word_embeddings_layernorm(self.word_embeddings(tokens))
            for i in range(self.config.num_layers):
                params = jax.tree.map(lambda leaf, i=i: leaf[i], state.params['h'])
                block = Block(self.config, parent=None)
                (x, _), _ = block.apply({'params': params}, (x, None), jnp.asarray(i), start)
            return self.word_embeddings.attend(self.ln_f(x)), None

    got = jax.jit(Unrolled(MODULE.config).apply)({'params': state.params}, tokens)
    np.testing.assert_allclose(got, logits, rtol=0, atol=1e-5)


def test_what_stands_behind_a_token_does_not_change_it(state, tokens, logits):
    changed = np.concatenate([tokens[:, :6], 63 - tokens[:, 6:]], axis=1)
    got = np.asarray(jax.jit(apply)(state.params, changed))
    np.testing.assert_array_equal(got[:, :6], logits[:, :6])
    assert np.abs(got[:, 6:] - logits[:, 6:]).min(axis=-1).max() > 0


def test_reading_with_a_cache_gives_the_logits_of_the_whole(state, partitioner, tokens, logits):
    specs, rows = partitioner.get_mesh_axes(state).params, partitioner.data_partition_spec
    cache_specs = bloom.plan_cache(MODULE, partitioner, rows=8, length=16).specs
    read = partitioner.partition(prefill, (specs, rows, rows), (rows, cache_specs))
    step = partitioner.partition(extend, (specs, cache_specs, rows, rows), (rows, cache_specs))
    got, cache = read(state.params, tokens[:, :6], np.zeros(8, np.int32))
    np.testing.assert_allclose(got, logits[:, :6], rtol=0, atol=1e-5)
    layout.check_placement(cache, bloom.plan_cache(MODULE, partitioner, rows=8, length=16))
    # Rows go on from positions of their own, over what they read before.
    start = np.array([6, 2, 5, 0, 6, 3, 1, 4], np.int32)
    for i in range(4):
        now = start + i
        got, cache = step(state.params, cache, tokens[np.arange(8), now][:, None], now)
        np.testing.assert_allclose(np.asarray(got)[:, 0], logits[np.arange(8), now], rtol=0, atol=1e-5)


def test_prompts_of_different_lengths_are_continued_as_each_by_itself(state, generate, naive):
    got = generate(state, PROMPTS)
    assert got == [naive(prompt, 6) for prompt in PROMPTS]
    assert len({token for new in got for token in new}) > 5


def test_one_program_for_each_shape(state, generate, caplog):
    generate(state, PROMPTS)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger='jax'):
        generate(state, PROMPTS)
        generate(state, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]] * 7)
        assert compilations(caplog) == []
        generate(state, [[1] * 17] * 7)
        generate(state, [[2] * 20] * 8)
        assert compilations(caplog) == ['jit(decode)']


def compilations(caplog):
    return re.findall(r'Compiling (\S+)', '\n'.join(record.getMessage() for record in caplog.records))


def test_nothing_that_was_given_is_donated(state, generate, partitioner):
    placed = state.replace(params=layout.place(state.params, params_plan(state, partitioner)))
    first = generate(placed, PROMPTS)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    assert generate(placed, PROMPTS) == first


def params_plan(state, partitioner):
    return layout.Plan(state.params, partitioner.get_mesh_axes(state).params, partitioner.mesh)


def test_the_cache_stays_divided_in_the_compiled_program(state, generate, partitioner):
    inputs = generation.pad_prompts(PROMPTS, GREEDY.max_new_tokens, partitioner.data_mesh_size)
    text = generate.program.compile(state.params, *inputs, jax.random.key(0)).as_text()
    # 2 layers, 8 rows, 6 heads of 4, 21 positions: 2 rows and 3 heads on each device.
    assert 'f32[2,2,3,4,21]' in text
    gathered = re.findall(r'f32\[([\d,]+)\]\S* all-gather\(', text)
    assert all(math.prod(map(int, shape.split(','))) <= 8 * 64 for shape in gathered), gathered


def test_a_text_ends_with_its_end_token(state, partitioner, generate):
    whole = generate(state, PROMPTS)
    eos = whole[0][2]
    sampling = bloom.Sampling(max_new_tokens=6, eos_id=eos)
    got = bloom.make_generate(MODULE, partitioner, state=state, sampling=sampling)(state, PROMPTS)
    assert got == [new[: new.index(eos) + 1] if eos in new else new for new in whole]
    assert got[0][-1] == eos


@pytest.mark.parametrize('cutoff', [{'top_k': 5}, {'top_p': 0.8}])
def test_sampling_draws_the_same_however_the_model_is_divided(state, cutoff):
    sampling = bloom.Sampling(max_new_tokens=6, temperature=1.5, eos_id=None, **cutoff)
    drawn = []
    for devices, num_partitions in ((1, 1), (8, 2)):
        partitioner = partitioning.PjitPartitioner(num_partitions, devices=jax.devices()[:devices], strict=True)
        generate = bloom.make_generate(MODULE, partitioner, state=state, sampling=sampling)
        # Eight rows on either mesh: what is drawn for a row depends on how many there are.
        drawn.append(generate(state, [*PROMPTS, [1], [2], [3]], jax.random.key(0)))
    assert drawn[0] == drawn[1]
    assert generate(state, [*PROMPTS, [1], [2], [3]], jax.random.key(1)) != drawn[1]


def test_sampling_from_the_likeliest_alone_is_greedy(state, partitioner, generate):
    sampling = bloom.Sampling(max_new_tokens=6, temperature=2.0, top_k=1, eos_id=None)
    got = bloom.make_generate(MODULE, partitioner, state=state, sampling=sampling)(state, PROMPTS, jax.random.key(0))
    assert got == generate(state, PROMPTS)


def test_bfloat16_parameters_stay_so_and_logits_are_float32(tokens, logits):
    module = Bloom(BloomConfig(64, 24, 6, 2, dtype=jnp.bfloat16))
    params = make_state(module, jnp.bfloat16).params
    got, cache = jax.jit(lambda p, t: module.apply({'params': p}, module.empty_cache(8, 16), t, jnp.zeros(8, jnp.int32),
                                                   method='extend'))(params, tokens)  # fmt: skip
    assert (got.dtype, {x.dtype for x in cache.values()}) == (jnp.float32, {jnp.dtype('bfloat16')})
    assert np.corrcoef(np.ravel(got), np.ravel(logits))[0, 1] > 0.999


class Alphabet:
    def encode(self, text):
        return [ord(letter) - ord('a') for letter in text]

    def decode(self, ids, skip_special_tokens):
        return ''.join(chr(i + ord('a')) for i in ids)


def test_texts_become_texts_and_ids_ids(state, generate):
    got = bloom.generate_text(generate, state, prompts=['hello', *PROMPTS], tokenizer=Alphabet())
    ids = generate(state, [Alphabet().encode('hello'), *PROMPTS])
    assert got == [Alphabet().decode(ids[0], True), *ids[1:]]


def test_texts_without_a_tokenizer_are_refused(state, generate, tmp_path):
    assert bloom.load_tokenizer(tmp_path) is None
    with pytest.raises(ConfigError, match=r"1 of 2 prompts, such as 'hello'.* no tokenizer\.json"):
        bloom.generate_text(generate, state, prompts=[[1], 'hello'])


def test_what_is_said_of_a_single_text_and_of_a_wrong_dtype(tmp_path, partitioner):
    with pytest.raises(ConfigError, match=r"prompts='hello': .* \['hello'\]"):
        bloom.encode_prompts('hello', Alphabet())
    with pytest.raises(ConfigError, match=r"dtype='bfloat17' \(did you mean 'bfloat16'\?\)"):
        bloom.complete(tmp_path, [[1]], partitioner=partitioner, sampling=GREEDY, dtype='bfloat17')


@pytest.mark.parametrize(
    ('prompts', 'message'),
    [
        ([], 'continue 0 of 0 prompts'),
        (
            [[1], [], [2, 64, -1]],
            '2 of 3 prompts.* from 0 to 63(.|\n)*prompt 1: it is empty\n  prompt 2: no ids are 64, -1',
        ),
        ([1, 2], '2 of 2 prompts(.|\n)*prompt 0: 1 is no list of ids'),
        (['a text'], "prompt 0: 'a text' is no list of ids"),
        ([[1.5, 2]], r'prompt 0: no ids are 1\.5'),
        ([[[1, 2], [3, 4]]], 'prompt 0: it is of 2 dims'),
    ],
)
def test_prompts_that_are_none_are_named(state, generate, prompts, message):
    with pytest.raises(DataError, match=message):
        generate(state, prompts)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'max_new_tokens': 0}, 'max_new_tokens=0 at'),
        ({'temperature': -1.0}, r'temperature=-1\.0'),
        ({'top_k': 3, 'top_p': 0.5}, r'topk=3 and topp=0\.5'),
        ({'eos_id': 0}, 'eos_id=0'),
        ({'temperature': float('nan')}, 'temperature=nan'),
        (
            {'max_new_tokens': 2.5, 'top_k': '5', 'eos_id': '</s>'},
            r"3 settings(.|\n)*max_new_tokens=2\.5(.|\n)*top_k='5'(.|\n)*eos_id='</s>'",
        ),
    ],
)
def test_sampling_that_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        bloom.Sampling(**settings)


def test_a_cutoff_that_changes_nothing_is_told_of():
    with pytest.warns(UserWarning, match=r'top_k=5 and top_p=0\.0 change nothing at temperature=0\.0'):
        bloom.Sampling(top_k=5)


@pytest.mark.parametrize('eos_id', [64, -1])
def test_an_end_token_outside_the_vocabulary_is_refused(state, partitioner, eos_id):
    with pytest.raises(ConfigError, match=f'eos_id={eos_id}: ids are from 0 to 63'):
        bloom.make_generate(MODULE, partitioner, state=state, sampling=bloom.Sampling(eos_id=eos_id))


def test_prompts_may_be_arrays(state, generate):
    prompts = [[5, 9], [7, 1]]
    assert generate(state, np.array(prompts)) == generate(state, jnp.array(prompts)) == generate(state, prompts)


def test_sampling_without_a_key_is_refused(state, partitioner):
    generate = bloom.make_generate(MODULE, partitioner, state=state, sampling=bloom.Sampling(temperature=0.7))
    with pytest.raises(ConfigError, match=r'temperature=0\.7 without a key'):
        generate(state, PROMPTS)


def test_heads_that_do_not_divide_are_told_with_what_would(state):
    with pytest.raises(MeshError, match=r"6 attention heads 4 ways over \('model',\) .* from 1, 2\."):
        bloom.make_generate(MODULE, make_partitioner(4), state=state, sampling=GREEDY)


def test_heads_share_the_width():
    with pytest.raises(ConfigError, match='emb_dim=24 with num_heads=5'):
        BloomConfig(64, 24, 5, 2)


def test_every_parameter_has_its_tensors():
    shapes = bloom_folders.variable_shapes(MODULE.config)['params']
    sources = named_leaves(bloom_folders.param_sources(shapes), lambda x: isinstance(x, Weight | Stack))
    tensors = {weight.name for source in sources.values() for weight in source.weights}
    halves = ('self_attention.query_key_value', 'self_attention.dense', 'mlp.dense_h_to_4h', 'mlp.dense_4h_to_h')
    blocks = [f'h.{i}.{part}' for i in range(2) for part in (*halves, 'input_layernorm', 'post_attention_layernorm')]
    both = [f'transformer.{part}' for part in (*blocks, 'word_embeddings_layernorm', 'ln_f')]
    expected = {f'{part}.{kind}' for part in both for kind in ('weight', 'bias')}
    assert tensors == expected | {'transformer.word_embeddings.weight'}
    for name, leaf in named_leaves(shapes).items():
        stored = sources[name].weights[0].split
        assert sources[name].shape(stored) == leaf.shape


def test_sizes_that_are_no_counts_are_named():
    content = {**bloom_folders.write_config(MODULE.config), 'n_head': '6', 'n_layer': 0}
    with pytest.raises(ConfigError, match="2 sizes(.|\n)*n_head='6'(.|\n)*n_layer=0"):
        bloom_folders.read_config(content, jnp.float32)


def test_config_json_is_read_as_it_was_written_and_under_old_names():
    config = BloomConfig(64, 24, 6, 2, 1e-3, True, jnp.bfloat16)
    content = bloom_folders.write_config(config)
    assert bloom_folders.read_config(content, jnp.bfloat16) == config
    old = {'model_type': 'bloom', 'vocab_size': 64, 'n_embed': 24, 'num_attention_heads': 6, 'n_layer': 2}
    assert bloom_folders.read_config(old, jnp.float32) == BloomConfig(64, 24, 6, 2)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model_type': 'blom'}, r"model_type='blom' as BLOOM \(did you mean 'bloom'\?\)"),
        ({'tie_word_embeddings': False}, 'tie_word_embeddings=False'),
        (
            {'n_head': None, 'hidden_size': None},
            '2 entries(.|\n)*hidden_size or n_embed\n  n_head or num_attention_heads',
        ),
    ],
)
def test_a_config_that_is_not_bloom_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        bloom_folders.read_config(bloom_folders.write_config(MODULE.config) | changes, jnp.float32)


def test_writing_stops_once_every_text_has_ended(state, naive):
    calls, (eos,) = [], naive([5], 1)

    class Counted(Bloom):
        def extend(self, cache, tokens, start):
            jax.debug.callback(lambda: calls.append(tokens.shape))
            return super().extend(cache, tokens, start)

    # One text on two devices along data: the row beside it is empty, and must not keep it going.
    partitioner = partitioning.PjitPartitioner(1, devices=jax.devices()[:2], strict=True)

    sampling = bloom.Sampling(max_new_tokens=6, eos_id=eos)
    generate = bloom.make_generate(Counted(MODULE.config), partitioner, state=state, sampling=sampling)

    def write(prompt):
        calls.clear()
        (new,) = generate(state, [prompt])
        jax.effects_barrier()
        return new, calls.count((2, 1))

    without_end = next(prompt for prompt in PROMPTS if eos not in naive(prompt, 6))
    whole, steps = write(without_end)
    assert whole == naive(without_end, 6)
    assert steps > 0
    assert write([5]) == ([eos], steps // 6)
