"""pp.py: how layers are split, and what its schedules are. Curves and bytes: test_same_run.py."""

import copy
import itertools

import pytest
import torch
from torch import nn

import pp
from common.model import PRESETS, Transformer
from common.options import SettingError
from tests.support.on_ranks import on_ranks
from tools.counting import theory


def test_split_layers():
    with torch.device("meta"):
        assert pp.cost_of_head(Transformer(PRESETS["llama3-8b"])) == pytest.approx(2.4, abs=0.05)
    assert pp.split_layers(32, 4, head=2.4) == [  # an 8B Llama 3
        range(0, 8), range(8, 17), range(17, 26), range(26, 32)
    ]
    for num_layers, head in itertools.product(range(1, 9), (0, 0.3, 1, 2.4, 20)):
        for num_stages in range(1, num_layers + 3):
            stages = pp.split_layers(num_layers, num_stages, head)
            assert len(stages) == num_stages
            assert [layer for stage in stages for layer in stage] == list(range(num_layers))
            assert all(stages[1:-1])  # the first has the embedding, the last the head
            cuts = itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
            assert slowest(stages, head) == min(slowest(
                [range(*ends) for ends in itertools.pairwise((0, *cut, num_layers))], head
            ) for cut in cuts)


def slowest(stages, head):
    return max(*map(len, stages), len(stages[-1]) + head)


@on_ranks(2)
def test_only_frozen_parameters_may_be_in_several_stages(mesh, rank):
    whole = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    whole["a"].weight = whole["b"].weight
    part = copy.deepcopy(whole)
    del part["ab"[rank]]
    with pytest.raises(SettingError, match="several stages have the parameter a.weight = b.weight"):
        pp.check_stages(whole, [part], mesh.get_group())
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
