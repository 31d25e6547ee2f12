"""Optimizers that tests/test_brought.py brings to the scripts."""

import torch


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
                    z -= rate * (1 + group["warm"]) / group["step"] / (state["calls"] + sum(past)) * p.grad
                    p.copy_(z)
            group["warm"] = True


class Listing(torch.optim.SGD):
    """It keeps a list of tensors of each parameter."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["past"] = [p.detach().clone()]
