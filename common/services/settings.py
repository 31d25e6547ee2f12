"""The settings of a run: which must stay the same when it is resumed, and which may change."""

import hashlib

import numpy as np
import torch
from torch.utils._pytree import tree_leaves  # torch has no public one

from common.data import open_dataset
from common.options import flag

FIXED_OPTIONS = "seed", "batch_size", "seq_len"
# They change what is trained. Checkpoints adds the settings of the optimizer, such as its betas.
CHANGEABLE_OPTIONS = "steps", "lr", "min_lr", "warmup_steps", "grad_clip"


def run_settings(args, dataset, config=None):
    """Two dicts. The settings that must stay the same when a run is resumed: those of the model
    (``config``, a dict; None: ``args.config``), and those that decide which samples a step reads.
    And the settings that may change, but change what is trained."""
    config = vars(args.config) if config is None else config
    fixed = config_settings(config)
    fixed |= {flag(name): getattr(args, name) for name in FIXED_OPTIONS if name in args}
    changeable = {flag(name): getattr(args, name) for name in CHANGEABLE_OPTIONS if name in args}
    changeable["--dtype"] = str(args.compute_dtype).removeprefix("torch.")
    if config.get("num_experts"):
        changeable["--balance-rate"] = args.balance_rate
    if getattr(args, "val_data", None):
        changeable |= fingerprint(open_dataset(args, "--val-data"), "--val-data")
    return fixed | fingerprint(dataset), changeable


def config_settings(config):
    """The settings of a model, of the dict ``config``. None stands for 0, the number of experts:
    earlier checkpoints do not have it."""
    return {flag(name): value or None for name, value in config.items()}


def fingerprint(dataset, option="--data"):
    """What tells one dataset from another: its number of samples, and a hash of a few of them, as a
    dict. A sample is any structure of tensors, arrays, numbers and strings."""
    digest = hashlib.sha256()
    last = len(dataset) - 1
    for index in sorted({last * place // 15 for place in range(16)}):
        for value in tree_leaves(dataset[index]):
            if isinstance(value, torch.Tensor):  # NumPy has no bfloat16
                value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            array = isinstance(value, np.ndarray)
            digest.update(value.tobytes() if array else repr(value).encode())
    return {
        f"the number of samples in {option}": len(dataset),
        f"the hash of some samples in {option}": digest.hexdigest()[:16],
    }
