"""What people bring to ``Run`` and to the functions of the scripts: it trains and resumes, or it is
refused in words. In copies of the scripts: test_porting.py."""

import contextlib
import functools
import json
import random
import re
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fsdp
import tp
from common.options import SettingError
from common.step import seed_step
from common.usage import Usage
from tests.support.compare import furthest
from tests.support.lifted import whole
from tests.support.on_ranks import on_ranks
from tests.support.ported import Scattered
from tests.support.processes import edited
from tests.support.sample import rows
from tests.support.words import refused
from tests.test_checkpoint import run_of
from tests.test_checkpoint import train as train_steps
from tests.test_porting import OPTIONS, port


@rows("script, world", """
* fsdp.py | 2
ddp.py | 2
zero.py | 2
tp.py | 2
""")
def test_weights_alone_begin_another_run(once, shared, tmp_path, script, world):
    """With other data, batches and lengths, more tokens, and a head that is drawn again."""
    dcp_to_torch_save(once("single.py", 0, OPTIONS).out / "step-00000003", shared / "out.pt")
    options = f"{OPTIONS} --seq-len 16 --batch-size 4 --vocab-size 300"
    one, found = (once(edited(tmp_path / "copies", name, *port("other tokens")), n, options).curve()
                  for name, n in (("single.py", 0), (script, world)))
    assert furthest(one, found) < 1e-10
    afresh = once("single.py", 0, options).curve()
    assert one[0][0] < afresh[0][0] - 0.02  # what was learnt is there


# Optimizers of torch and others, alone


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)


def train(folder, make, last, dtype=torch.float32):
    """Train up to step ``last``, and return the weights."""
    model = network(dtype)
    optimizer = make(model.parameters())
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)

    def change(step):
        (model(x) - x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train_steps(run_of(folder, model, optimizer), last, change)
    return [p.detach() for p in model.parameters()]


@rows("name, options, dtype", """
Adadelta | | float32
Adafactor | | float32
Adagrad | | float32
Adam | | float32
Adamax | | float32
AdamW | | float32
ASGD | | float32
NAdam | | float32
RAdam | | float32
RMSprop | | float32
Rprop | | float32
SGD | {"lr": 0.1, "momentum": 0.9} | float32
Scattered | {"lr": 0.1} | float32
Scattered | {"lr": 0.1} | bfloat16
Adam | {"lr": 0.1} | bfloat16
""")
def test_an_optimizer_resumes_in_the_same_bits(tmp_path, name, options, dtype):
    make = getattr(torch.optim, name, Scattered)
    make, dtype = functools.partial(make, **json.loads(options or "{}")), getattr(torch, dtype)
    whole = train(tmp_path / "whole", make, 6, dtype)
    train(tmp_path / "again", make, 3, dtype)
    resumed = train(tmp_path / "again", make, 6, dtype)
    assert all(map(torch.equal, whole, resumed))


def test_settings_of_a_group_may_change(tmp_path):
    """On a resume: what the script gives is not forced back."""
    train(tmp_path, functools.partial(Scattered, lr=0.1), 1)
    model = network()
    optimizer = Scattered(model.parameters(), lr=0.5)
    run_of(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["step"] == 1


def test_a_state_that_a_checkpoint_cannot_hold_is_refused(tmp_path):
    """In the first step, not at the first save."""
    run = run_of(tmp_path, network())
    (optimizer,) = run.optimizers
    optimizer.state[optimizer.param_groups[0]["params"][0]]["past"] = [torch.ones(2)]
    with refused("past.* of the optimizer cannot be saved: .* not JSON"):
        train_steps(run, 2)
    run = run_of(tmp_path / "other", network())
    run.optimizers[0].state["global"] = {"beta": 0.9}
    with refused("a SGD keeps states of something else than its parameters"):
        train_steps(run, 2)


def test_what_is_no_tensor_or_no_plain_number(tmp_path):
    """A state of a module that is no tensor is refused; a rate or a figure may be a tensor."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(0.1))
    run = run_of(tmp_path, model, optimizer)
    for step, _ in run.steps([(0, None)]):
        run.after_step(step, 1.0, 1.0, balance=lambda: torch.tensor(0.5))
    (record,) = run.history
    assert record["lr"] == pytest.approx(0.1) and record["balance"] == 0.5
    model[1] = type("Scaled", (nn.Tanh,), {"get_extra_state": lambda self: {"scale": 1}})()
    with refused("1._extra_state of the model is no tensor"):
        run_of(tmp_path / "other", model)


def test_a_parameter_without_gradient_in_the_first_step(tmp_path, capsys):
    """Of some it is said, of all it is refused: the loss does not reach them."""
    model = network()
    model[0].requires_grad_(False)  # frozen

    groups = [{"params": []}, {"params": [*model.parameters()]}]  # as of decay_groups
    run = run_of(tmp_path, model, torch.optim.SGD(groups, 0.1))
    none = run_of(tmp_path / "none", network())

    def change(step):
        model[2](torch.ones(6)).sum().backward()
        model[2].bias.grad = None
        run.optimizers[0].step()

    train_steps(run, 2, change)
    said = capsys.readouterr().out
    assert re.findall("no gradient in the first step: (.*)", said) == ["2.bias"]
    with refused("no gradient in the first step: 0.weight, .*; does the"):
        train_steps(none, 1, lambda step: none.optimizers[0].step())


# Functions of the scripts, with other models


class Energy(nn.Sequential):
    """Its loss has an energy, and the gradient of it by the positions."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self.double()

    def forward(self, x):
        energy = super().forward(x.requires_grad_())
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.square().mean() + force.square().mean()

    def encode(self, x):
        return self[0](x)


@on_ranks(2)
def test_gradients_of_gradients(mesh, rank, folder):
    """A part of the loss is a gradient. Exact if no unit of FSDP is below the module that calls
    autograd.grad; otherwise torch says so, or, if parameters stay gathered, Run does."""
    one, model, positions = Energy(), Energy(), torch.arange(24).double().sin().view(8, 3)
    one(positions).backward()
    x = positions.detach().chunk(2)[rank]
    fsdp.shard(model, [], mesh)
    for called in model, DistributedDataParallel(Energy(), gradient_as_bucket_view=True):
        called(x).backward()
        for p, expected in zip(called.parameters(), one.parameters()):
            torch.testing.assert_close(whole(p.grad), expected.grad, rtol=0, atol=1e-15)
    for reshard, words in (True, "storage of size 0"), (False, "no gradient in the first step: "):
        model = Energy()
        fsdp.shard(model, [[model[0]], [model[2]]], mesh, reshard_after_forward=reshard)
        model.set_reshard_after_backward(reshard)
        run = run_of(folder / str(reshard), model)
        with pytest.raises((RuntimeError, SettingError), match=words):
            model(x).backward()
            train_steps(run, 1, lambda step: run.optimizers[0].step())


@on_ranks(2)
def test_calls_before_and_beside_the_forward_pass(mesh):
    """Another method than forward; inference before training."""
    model, x = Energy(), torch.ones(8, 3).double()
    fsdp.shard(model, [], mesh)
    with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
        model.encode(x)
    register_fsdp_forward_method(model, "encode")
    torch.testing.assert_close(model.encode(x), Energy().encode(x))
    for mode, ends in (torch.no_grad(), contextlib.nullcontext()), (
            torch.inference_mode(), pytest.raises(RuntimeError, match="nference tensor")):
        model = network()
        fsdp.shard(model, [[model[0]]], mesh)
        with mode:
            model(torch.ones(4))
        with ends:
            model(torch.ones(4)).sum().backward()


@on_ranks(2)
def test_a_target_that_is_no_token_is_refused(mesh):
    """By torch, as one process does."""
    logits = distribute_tensor(torch.zeros(1, 2, 6), mesh, [Shard(2)])
    for target in -1, 6:
        with pytest.raises(RuntimeError, match="out of bounds"):
            tp.loss_of_split_logits(logits, torch.tensor([[1, target]]))


@on_ranks(2)
def test_weights_that_a_forward_pass_changes_are_refused(folder):
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0))
    with refused(r"nn.Embedding\(max_norm=\) changes its weights"):
        run_of(folder, model, torch.optim.SGD(model.parameters(), 0.1))


@on_ranks(2)
def test_a_loss_that_is_a_dtensor_is_refused(folder, mesh):
    """As the square of sharded weights is."""
    model = network()
    fsdp.shard(model, [], mesh)
    run = run_of(folder, model, torch.optim.SGD(model.parameters(), 0.1))
    loss = sum(p.square().sum() for p in model.parameters()).detach()
    with refused("the loss is a DTensor, and after_step takes a rank's"):
        train_steps(run, 1, figures=lambda step: (loss, 1.0))


@on_ranks(2)
def test_numbers_of_a_part_are_refused(folder, rank):
    """An optimizer that measures the weights, of which each rank has other ones: in step 1."""
    model = network()
    optimizer = Scattered(model.parameters(), 0.1)
    run = run_of(folder, model, optimizer, "--save-every 5")

    def change(step):
        optimizer.param_groups[0]["d"][0] += 1 + rank

    words = "numbers has other values on another rank.* needs them whole"
    with refused(words):
        train_steps(run, 1, change)


def test_a_full_disk_is_called_that(tmp_path):
    """torch's writer may say something else: on a real one 12 of 48 saves did."""
    said = OSError("[enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598")
    with (mock.patch("common.run.start_save", side_effect=said),
          refused(f"in {tmp_path}: no space left on device")):
        train_steps(run_of(tmp_path, network()), 1)
    with (mock.patch("common.run.start_save", side_effect=TimeoutError()),  # it has no words
          refused("cannot read or write in .*: TimeoutError:")):
        train_steps(run_of(tmp_path / "new", network()), 1)


def draws(*numbers):
    seed_step(*numbers)
    return torch.rand(()).item(), np.random.rand(), random.random()


def test_draws_in_the_loop_are_functions_of_the_step():
    """Of torch, numpy.random and random, as those of a sample are: the same after a resume."""
    found = draws(0, 3, 1), draws(1, 3, 1), draws(0, 4, 1), draws(0, 3, 2), draws(0, 3)
    assert found[0] == draws(0, 3, 1)
    for of_one in zip(*found):
        assert len({*of_one}) == 5


@on_ranks(2)
def test_hooks_on_gradients_are_refused(mesh):
    """FSDP would not call them; DDP does."""
    for early in True, False:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with refused("never calls a hook on a gradient.* p.grad"):
            if early:
                model[1].weight.register_hook(lambda gradient: gradient / 2)
            fsdp.shard(model, [[model[0]]], mesh)
            Usage(model)  # sees those that come later
            model[1].weight.register_hook(lambda gradient: gradient / 2)
            model(torch.ones(2, 3)).sum().backward()


@on_ranks(2)
def test_a_weight_of_a_unit_and_of_the_rest_is_refused(mesh):
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    model[1][0].weight = model[0].weight
    with refused("one and the rest, share 0.weight: put modules with tied weights in one unit"):
        fsdp.shard(model, [[model[0]]], mesh)


class Shifted(nn.Sequential):
    """Layers on x plus a buffer of one's own."""

    def forward(self, x):
        return super().forward(x + self.shift)


@on_ranks(2)
def test_what_torch_says_of_types(mesh):
    """Of a float32 buffer that meets bfloat16, and of a unit of several types: with the words of
    docs/when-it-fails.md."""
    for words, *layers in (
        ("mat1 and mat2 must have the same dtype", nn.Linear(3, 3)),
        ("mixed dtype", nn.LayerNorm(3)),
        ("expects uniform original parameter dtype", nn.Linear(3, 3), nn.Linear(3, 3).double()),
    ):
        model = Shifted(*layers)
        model.shift = nn.Buffer(torch.ones(3))
        fsdp.shard(model, [], mesh, dtype=torch.bfloat16)
        with pytest.raises((RuntimeError, AssertionError), match=words):
            model(torch.ones(2, 3)).sum()
