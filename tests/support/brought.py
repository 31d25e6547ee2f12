"""What tests/test_brought.py brings to the scripts: optimizers, a metric."""

import importlib.util
import pathlib

import torch
from torch.distributed.tensor import distribute_tensor


class Scattered(torch.optim.Optimizer):
    """It keeps its state in many places: numbers in its groups, as schedule-free AdamW, Prodigy
    and apex do, one of which is there only after the first step; and of each parameter a number, a
    list, and a tensor in float32 or wider. Each changes what a step does."""

    def __init__(self, parameters, lr):
        start = {"lr": lr, "k": 0, "d": 1.0, "warm": False}
        super().__init__(parameters, start)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 0.7
            group["step"] = group.get("step", 0) + 1
            rate = group["lr"] * group["d"] / (1 + group["k"])
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    wide = torch.promote_types(p.dtype, torch.float32)
                    z = state.setdefault("z", p.to(wide, copy=True))
                    state["calls"] = state.get("calls", 0) + 1
                    past = state.setdefault("past", [])
                    past.append(float(len(past)))
                    share = (1 + group["warm"]) / group["step"] / (state["calls"] + sum(past))
                    z -= rate * share * p.grad
                    p.copy_(z)
            group["warm"] = True


class Listing(torch.optim.SGD):
    """It keeps a list of tensors of each parameter."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["past"] = [p.detach().clone()]


# Noise


def normal_like(p, generator):
    """Normal numbers in the shape of ``p``, the same however it is split."""
    whole = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    if not hasattr(p, "placements"):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements)


# A metric that is no mean: does the model expect a blank?


def pairs(logits, targets):
    """(N, 2): the score of a blank and whether there is one, of each target."""
    blank = ord(" ")
    return torch.stack((logits[..., blank].flatten(), (targets == blank).flatten()), dim=1)


def roc_auc_score(scores, labels):
    """The share of pairs of a right and a wrong one in which the right one has more."""
    right, wrong = scores[labels > 0], scores[labels == 0]
    return (right[:, None] > wrong).double().mean().item()


def muon_of_the_example():
    """The class of examples/fsdp_muon.py."""
    path = pathlib.Path(__file__).parents[2] / "examples" / "fsdp_muon.py"
    spec = importlib.util.spec_from_file_location("fsdp_muon", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Muon
