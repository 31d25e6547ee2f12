"""What AdamW (arXiv:1711.05101) needs around it."""

import math


def decay_groups(parameters, weight_decay):
    """Two parameter groups: matrices are decayed, norms are not."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate(step, args):
    """Linear warm-up to ``--lr``, then half a cosine down to ``--min-lr`` (arXiv:1608.03983).

    A function of the step (counted from 0) alone, so that there is no state to save.
    """
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    return args.min_lr + (args.lr - args.min_lr) * (1 + math.cos(math.pi * done)) / 2


def set_learning_rate(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
