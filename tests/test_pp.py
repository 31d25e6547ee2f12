"""pp.py: how layers are split, and what its schedules are. Curves and bytes: test_same_run.py."""

import argparse
import copy
import itertools
import types

import pytest
import torch
from torch import nn

import pp
from common.errors import SettingError
from common.model import ModelConfig
from tests.support.on_ranks import on_ranks
from tests.support.table import MODEL


def test_the_picture(run, corpus):
    result = run("pp.py", 4, f"{MODEL} --num-hidden-layers 7 --seq-len 16 --batch-size 14 "
                             f"--steps 1 --data {corpus} --schedule zbv --microbatches 7 "
                             "--save-every 0")
    assert result.lines[0] == "pp.py: 4 processes on cpu (gloo), rank grid pp 4 x dp 1"
    assert result.lines[1] == "model tiny: 70,624 parameters, float32"  # of all stages
    assert result.lines[4:9] == [
        "pipeline zbv: 7 micro-batches through 8 stages, bubble (n-1)/(3vM+n-1) = 6.7%",
        "rank 0: embedding, layer 0 | head", "rank 1: layer 1 | layer 6",
        "rank 2: layer 2 | layer 5", "rank 3: layer 3 | layer 4",
    ]


def test_split_layers():
    assert pp.split_layers(4, 2, head=0) == [range(0, 2), range(2, 4)]
    assert pp.split_layers(32, 4, head=2.4) == [  # an 8B Llama 3
        range(0, 8), range(8, 17), range(17, 26), range(26, 32)
    ]
    assert pp.split_layers(1, 3, head=1) == [range(0), range(0, 1), range(1, 1)]
    for num_layers, head in itertools.product(range(1, 9), (0, 0.3, 1, 2.4, 20)):
        for num_stages in range(1, num_layers + 3):
            stages = pp.split_layers(num_layers, num_stages, head)
            assert len(stages) == num_stages
            assert [layer for stage in stages for layer in stage] == list(range(num_layers))
            assert all(stages[1:-1])  # the first has the embedding, the last the head
            slowest = max(*map(len, stages), len(stages[-1]) + head)
            cuts = itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
            best = min(
                max(*(end - first for first, end in itertools.pairwise((0, *cut, num_layers))),
                    num_layers - (0, *cut)[-1] + head)
                for cut in cuts
            )
            assert slowest == best


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


# Schedule, p, M, V
GRIDS = list(itertools.product(pp.SCHEDULES, (1, 2, 3, 4), range(1, 10), (1, 2, 3)))


def build(name, p, M, V):
    """The engine's schedule of rank 0, on stages without a model."""
    stages = [
        types.SimpleNamespace(num_stages=p * V, group_size=p, group_rank=0, submod=None)
        for _ in range(V)
    ]
    return pp.SCHEDULES[name](stages[0] if name in pp.ONE_STAGE else stages, M, loss_fn=len)


def test_before_torch_2_13_a_loss_in_chunks_is_refused(monkeypatch):
    """Where its backward pass would have two parts. No other schedule is refused."""
    monkeypatch.setattr(pp, "keeps_last_function", False)
    monkeypatch.setattr(pp, "MAX_LOGITS", 255)  # a micro-batch has 256
    refused = {name for name in pp.SCHEDULES if not allowed(name, 2, 4, 1 + (
        name not in pp.ONE_STAGE))}
    assert refused == set(pp.SPLIT_BACKWARD)


def allowed(name, p, M, V):
    args = argparse.Namespace(
        schedule=name, microbatches=M, grad_accum=1, batch_size=M, seq_len=1, compile=False,
        activation_checkpointing=False, config=ModelConfig(num_hidden_layers=99),
    )
    try:
        pp.check(args, p, V)
    except SettingError:
        return False
    return True


def test_refuses_exactly_what_the_engine_does():
    """Its own errors are never seen, and nothing that it can do is refused."""
    for name, p, M, V in GRIDS:
        if name in pp.ONE_STAGE and V > 1:
            assert not allowed(name, p, M, V)
            continue
        try:
            build(name, p, M, V)
            works = True
        except ValueError:
            works = False
        assert allowed(name, p, M, V) == works, (name, p, M, V)


def test_the_bubble_is_the_one_of_the_schedule():
    """The engine's order of work, played through with 1 for forward and either half of backward."""
    for name, p, M, V in GRIDS:
        # What the engine says of 1f1b is not what it runs;
        # it is interleaved1f1b with one stage on each rank.
        if name == "1f1b" or not allowed(name, p, M, V):
            continue
        _, formula = pp.bubble(name, p, V, M)
        waiting = play(build(name, p, M, V).pipeline_order, p * V)
        value = float(formula.partition("= ")[2].rstrip("%")) / 100
        if formula.startswith("at least"):
            assert waiting > value - 6e-4, (name, p, M, V)
        else:
            assert abs(waiting - value) < 6e-4, (name, p, M, V)


SECONDS = {"F": 1, "I": 1, "W": 1, "B": 2}  # forward; gradients of inputs, of weights, of both


def play(order, num_stages):
    """The share of time in which ranks wait, if each works its actions off as soon as it can."""
    todo = {rank: actions_of(actions) for rank, actions in order.items()}
    work = sum(SECONDS[kind] for actions in todo.values() for kind, _, _ in actions)
    ready, clock = {}, dict.fromkeys(todo, 0)  # when a result is there; where a rank is in time
    while any(todo.values()):
        for rank, actions in todo.items():
            while actions:
                kind, stage, M = actions[0]
                needs = {"F": [("F", stage - 1, M)], "W": [("I", stage, M)]}.get(
                    kind, [("F", stage, M), ("I", stage + 1, M)]
                )
                needs = [need for need in needs if 0 <= need[1] < num_stages]
                if not all(need in ready for need in needs):
                    break
                clock[rank] = max([clock[rank], *(ready[need] for need in needs)]) + SECONDS[kind]
                ready["I" if kind == "B" else kind, stage, M] = clock[rank]
                actions.pop(0)
    return 1 - work / max(clock.values()) / len(order)


def actions_of(actions):
    """(kind, stage, micro-batch) of what computes."""
    flat = [part for action in actions if action for part in action.sub_actions or [action]]
    return [
        (action.computation_type.value, action.stage_index, action.microbatch_index)
        for action in flat if action.computation_type.value in SECONDS
    ]
