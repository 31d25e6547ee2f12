"""What surrounds AdamW (arXiv:1711.05101): parameter groups and a learning-rate schedule."""

import math


def decay_groups(parameters, weight_decay):
    """Two parameter groups for an optimizer: weight decay acts on matrices, not on vectors."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate(step, peak, steps, warmup_steps=0, minimum=0.0):
    """Linear warm-up to ``peak``, then a cosine decay (arXiv:1608.03983).

    The decay would reach ``minimum`` at ``steps``, one step after the last. A function of ``step``
    (0 to ``steps`` - 1) alone, so that there is no state to save.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * done)) / 2


def set_learning_rate(optimizer, lr):
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
