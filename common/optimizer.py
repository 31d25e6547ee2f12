"""Parameter groups and a learning-rate schedule for AdamW (arXiv:1711.05101)."""

import math

import torch


def decay_groups(parameters, weight_decay):
    """Two parameter groups for an optimizer: weight decay acts on matrices, not on vectors."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate(step, peak, steps, warmup_steps=0, minimum=0.0):
    """Linear warm-up to ``peak``, then a cosine decay (arXiv:1608.03983).

    The decay reaches ``minimum`` at ``steps``, one step after the last. The rate depends only on
    ``step`` (0 to ``steps`` - 1), so there is no state to save.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def skip_if_not_finite(optimizer, grad_norm, step):
    """Let the next ``optimizer.step()`` change nothing if ``grad_norm`` is infinite or NaN.

    torch's fused optimizers read ``found_inf``, which GradScaler usually sets: weights, states and
    the count of steps stay as they are, bit for bit. ``optimizer.first_skipped`` is the first such
    step (-1: none), a tensor on the device, so that no step waits for the device.
    """
    broken = ~grad_norm.isfinite()
    optimizer.found_inf = broken.float()
    first = getattr(optimizer, "first_skipped", torch.full_like(broken, -1, dtype=torch.int64))
    optimizer.first_skipped = torch.where(broken & (first < 0), step, first)


def set_learning_rate(optimizer, lr):
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
