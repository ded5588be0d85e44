"""What PyTorch and `transformers` say of BLOOM, in a process of its own: folders, logits and greedy tokens.

    python bloom_oracle.py make DIRECTORY CASES.json
    python bloom_oracle.py logits FOLDER TOKENS.npz LOGITS.npz

`make` writes for each case a folder of random weights and an .npz of what the model does. A case is BloomConfig's
keyword arguments, and may have `save`, a dict with the keyword arguments of save_pretrained, `bare`, which saves the
model without its head, and `dtype`, which the weights are saved in.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import BloomConfig, BloomForCausalLM

NEW_TOKENS = 10
PROMPT_LENGTHS = (3, 1, 7, 5)


def randomise(model: BloomForCausalLM) -> None:
    """Gives every weight something to say; the last norm turns signs, or each token would be followed by itself."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in sorted(model.named_parameters()):
            noise = torch.randn(param.shape, generator=generator)
            if 'ln_f.weight' in name:
                param.copy_(noise)
            elif name.endswith('norm.weight'):
                param.copy_(1 + 0.3 * noise)
            else:
                param.copy_((0.1 if name.endswith('bias') else 0.3) * noise)


def make_prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, length).tolist() for length in PROMPT_LENGTHS]


def greedy(model: BloomForCausalLM, prompts: list[list[int]]) -> np.ndarray:
    """Continues prompts side by side, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found[:, longest:].numpy()


def make(directory: pathlib.Path, cases: dict) -> None:
    for name, case in cases.items():
        save, bare, dtype = case.pop('save', {}), case.pop('bare', False), case.pop('dtype', 'float32')
        model = BloomForCausalLM(BloomConfig(**case)).eval()
        randomise(model)
        model.to(getattr(torch, dtype))
        (model.transformer if bare else model).save_pretrained(directory / name, **save)
        tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (4, 12))
        prompts = make_prompts(model.config.vocab_size)
        with torch.no_grad():
            model.float()
            result = {'tokens': tokens, 'logits': model(torch.tensor(tokens)).logits.numpy()}
            result['new'] = greedy(model, prompts)
            model.bfloat16()
            result['bfloat16_logits'] = model(torch.tensor(tokens)).logits.float().numpy()
            result['embedding'] = model.transformer.word_embeddings.weight.float().numpy()
        np.savez(directory / f'{name}.npz', **result, prompts=json.dumps(prompts))


def logits(folder: str, tokens: str, out: str) -> None:
    model, info = BloomForCausalLM.from_pretrained(folder, output_loading_info=True)
    faults = {key: value for key, value in info.items() if value}
    assert not faults, faults
    with torch.no_grad():
        np.savez(out, logits=model.eval().float()(torch.tensor(np.load(tokens)['tokens'])).logits.numpy())


if __name__ == '__main__':
    torch.set_num_threads(1)
    if sys.argv[1] == 'make':
        make(pathlib.Path(sys.argv[2]), json.loads(pathlib.Path(sys.argv[3]).read_text()))
    else:
        logits(*sys.argv[2:])
