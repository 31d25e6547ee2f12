"""The settings of a run: which must stay the same when it is resumed, and which may change."""

import hashlib

import numpy as np
import torch
from torch.utils._pytree import tree_leaves  # torch has no public one

from common.launch import source_files
from common.options import flag
from common.tokens import TokenDataset, open_dataset

FIXED_OPTIONS = "seed", "batch_size", "seq_len"
# They change what is trained. Checkpoints adds the settings of the optimizer, such as its betas.
CHANGEABLE_OPTIONS = (
    "steps", "lr", "min_lr", "warmup_steps", "grad_clip",
    "balance_rate",  # of experts
)


def run_settings(args, dataset, config=None):
    """Two dicts. The settings that must stay the same when a run is resumed: those of the model
    (``config``, a dict; None: ``args.config``), and those that decide which samples a step reads.
    And the settings that may change, but change what is trained, the code among them."""
    config = vars(args.config) if config is None else config
    fixed = config_settings(config)
    fixed |= {flag(name): getattr(args, name) for name in FIXED_OPTIONS if name in args}
    changeable = {flag(name): getattr(args, name) for name in CHANGEABLE_OPTIONS if name in args}
    changeable["--dtype"] = str(args.compute_dtype).removeprefix("torch.")
    changeable |= source_files()
    if getattr(args, "val_data", None):
        changeable |= fingerprint(open_dataset(args, "--val-data"), "--val-data")
    return fixed | fingerprint(dataset), changeable


def config_settings(config):
    """The settings of a model, of the dict ``config``. None stands for 0, the number of experts:
    earlier checkpoints do not have it."""
    return {flag(name): value or None for name, value in config.items()}


def fingerprint(dataset, option="--data", samples=None):
    """What tells one dataset from another: its number of samples, and a hash of some of them, as a
    dict. A sample is any structure of tensors, arrays, numbers and strings.

    ``samples``: how many are hashed, the first, the last and others anywhere; None: 1,024 of a
    TokenDataset (0.1 to 0.5 s on a local disk), and 16 of any other, which may take long to read.
    If a share x of all samples differs, this is noticed with the probability 1 - (1-x)^samples: 1 %
    by 1,024 almost always, by 16 once in seven times.
    """
    samples = samples or (1024 if isinstance(dataset, TokenDataset) else 16)
    digest, last = hashlib.sha256(), len(dataset) - 1
    some = np.random.default_rng(0).integers(0, last, samples - 2, endpoint=True)
    for index in sorted({0, last, *some.tolist()}):
        for value in tree_leaves(dataset[index]):
            if isinstance(value, torch.Tensor):  # NumPy has no bfloat16
                value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            array = isinstance(value, np.ndarray)
            digest.update(value.tobytes() if array else repr(value).encode())
    return {
        f"the number of samples in {option}": len(dataset),
        f"the hash of some samples in {option}": digest.hexdigest()[:16],
    }
