"""pp.py: how layers are split, and what its schedules are. Curves and bytes: test_same_run.py."""

import copy

import pytest
import torch
from torch import nn

import pp
from common.model import PRESETS, Transformer
from tests.support.on_ranks import on_ranks
from tests.support.sample import rows
from tools.counting import theory


# Layers, stages, the cost of the head in layers; how many layers each stage gets. No other way to
# cut has a faster slowest stage. The first has the embedding, the last the head.
@rows("layers, stages, head, sizes", """
32 | 4 | 2.4 | 8 9 9 6
5 | 2 | 0 | 2 3
5 | 4 | 1 | 1 1 2 1
1 | 3 | 20 | 0 1 0
8 | 3 | 2.4 | 3 4 1
4 | 5 | 0.3 | 1 1 1 1 0
7 | 4 | 2.4 | 2 2 3 0
8 | 5 | 1 | 1 2 2 2 1
6 | 6 | 20 | 1 1 1 1 2 0
3 | 1 | 1 | 3
""")
def test_split_layers(layers, stages, head, sizes):
    found = pp.split_layers(layers, stages, float(head))
    assert " ".join(str(len(stage)) for stage in found) == str(sizes)
    assert [layer for stage in found for layer in stage] == [*range(layers)]


def test_the_cost_of_the_head():
    with torch.device("meta"):  # in layers, of an 8B Llama 3
        assert pp.cost_of_head(Transformer(PRESETS["llama3-8b"])) == pytest.approx(2.4, abs=0.05)


@on_ranks(2)
def test_frozen_parameters_may_be_in_several_stages(mesh, rank):
    """Of others test_refusals.py has rows."""
    whole = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    whole["a"].weight = whole["b"].weight
    part = copy.deepcopy(whole)
    del part["ab"[rank]]
    whole.requires_grad_(False)
    pp.check_stages(whole, [part], mesh.get_group())


@on_ranks(2)
def test_the_norm_over_stages_is_in_float32(mesh):
    """Also of weights in bfloat16."""
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter) * 129
    norm = pp.clip_over_stages([parameter], 1.0, mesh.get_group())
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(2 * 129, rel=0.01)


def test_the_bubble():
    """As Megatron's papers have it (arXiv:2104.04473), with a third of it if the schedule splits
    the backward pass."""
    assert theory.bubble("interleaved1f1b", 4, 2, 8) == 3 / 19
    assert theory.bubble("zerobubble", 4, 2, 3) == 3 / 21
    assert theory.bubble("zbv", 4, 2, 6) == 3 / 39
