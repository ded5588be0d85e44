"""What transformers and PyTorch say, in a process of their own: they must not share one with JAX.

    python oracle.py make CASES DIRECTORY    folders with random weights, and the logits of each
    python oracle.py logits DIRECTORY        the logits of all folders that are there

CASES is a JSON file: name of a folder to {'entries': of the config, 'own_head': whether it has one}. Inputs are those
in DIRECTORY/inputs.npz; the logits of DIRECTORY/NAME are written to DIRECTORY/NAME.npz.
"""

import json
import pathlib
import sys
import warnings

import numpy as np
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.filterwarnings('ignore', message='.*requires_grad.*')


def make_t5(entries, own_head):
    """Makes a T5 or mT5 with weights large enough for logits of order 1 to 10, and biases that matter."""
    entries = dict(entries)
    if entries.pop('model_type', 't5') == 'mt5':
        model = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**entries))
    else:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**entries))
    if own_head:
        # Whatever its config says, version 5 ties the head of a new model; one that differs stays as it is.
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight) / 4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if 'relative_attention_bias' in name:
                weight.normal_(std=2)
            elif 'layer_norm' in name:
                weight.normal_(mean=1, std=0.3)
            elif '.q.' in name:
                weight.mul_(4)
    return model


@torch.no_grad()
def t5_logits(model, inputs):
    """Computes logits (batch, target length, vocabulary); id 0 pads the encoder's inputs."""
    tokens = torch.from_numpy(inputs['encoder_input_tokens']).long()
    targets = torch.from_numpy(inputs['decoder_input_tokens']).long()
    got = model.eval()(input_ids=tokens, attention_mask=(tokens > 0).long(), decoder_input_ids=targets)
    return got.logits.float().numpy()


def make(cases, directory):
    torch.manual_seed(0)
    inputs = np.load(directory / 'inputs.npz')
    for name, case in json.loads(pathlib.Path(cases).read_text()).items():
        model = make_t5(**case)
        np.savez(directory / f'{name}.npz', logits=t5_logits(model, inputs))
        model.save_pretrained(directory / name, max_shard_size='40KB')


def logits(directory):
    inputs = np.load(directory / 'inputs.npz')
    for folder in sorted(path.parent for path in directory.glob('*/config.json')):
        model, told = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
        assert not any(told[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), told
        np.savez(directory / f'{folder.name}.npz', logits=t5_logits(model, inputs))


if __name__ == '__main__':
    command, *arguments = sys.argv[1:]
    {'make': make, 'logits': logits}[command](*arguments[:-1], pathlib.Path(arguments[-1]))
