"""What ``shard`` of fsdp.py promises for a model of your own: parts that some samples do not use,
and tied weights. Curves and bytes: test_same_run.py."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp
from common.options import SettingError
from tests.support.on_ranks import on_ranks


class TwoParts(nn.Module):
    """Two parts, of which a micro-batch uses one: as images and text do."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, kind):
        return self.out(torch.tanh((self.a if kind == 0 else self.b)(x))).square().sum()


def make():
    torch.manual_seed(0)
    return TwoParts().double()


def train(model, rows, accumulate):
    """The norms of the gradients of a and b in 3 steps, of 2 micro-batches each, and the sums of
    the weights after them. ``accumulate`` is called before each micro-batch."""
    optimizer, norms = torch.optim.SGD(model.parameters(), 0.01), []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(2, 8, 8, generator=generator, dtype=torch.double)
        for kind, x in enumerate(batch):
            accumulate(kind == 1)
            (model(x[rows], kind) / 64).backward()
        norms += [whole(p.grad).norm().item() for p in (model.a.weight, model.b.weight)]
        optimizer.step()
        optimizer.zero_grad()
    return norms + [whole(p.detach()).sum().item() for p in model.parameters()]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


@on_ranks(2)
def test_a_part_that_the_last_micro_batch_does_not_use(rank):
    """As in one process, with replicas too, in units apart and together."""
    expected = train(make(), slice(None), lambda last: None)
    for replicas in 1, 2:
        mesh = init_device_mesh("cpu", (replicas, 2 // replicas), mesh_dim_names=("r", "s"))
        for together in False, True:
            model = make()
            parts = [[model.a, model.b]] if together else [[model.a], [model.b]]
            fsdp.shard(model, [*parts, [model.out]], mesh if replicas > 1 else mesh["s"])
            fsdp.add_gradients_up(model)
            found = train(model, slice(4 * rank, 4 * rank + 4), model.set_requires_all_reduce)
            assert found == pytest.approx(expected, rel=0, abs=1e-12), (replicas, together)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(65, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 65, bias=False)
        self.head.weight = self.embed.weight


@on_ranks(2)
def test_a_weight_that_two_units_share_is_refused(mesh):
    for units in (lambda m: [[m.embed], [m.mid], [m.head]],  # two units
                  lambda m: [[m.embed], [m.mid]]):  # one and the rest
        model = Tied()
        with pytest.raises(SettingError, match="share a parameter"):
            fsdp.shard(model, units(model), mesh)
    model = Tied()
    fsdp.shard(model, [[model.embed, model.head], [model.mid]], mesh)
    assert model.head.weight is model.embed.weight
