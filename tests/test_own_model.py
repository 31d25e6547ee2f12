"""One's own model: what the functions of the scripts cannot know is handled, or refused in words.
Beside one process: test_porting.py."""

import argparse
import copy
import importlib
import math
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import common.model
import fsdp
import tp
from common.data import load_steps
from common.materialise import materialise
from common.model import ModelConfig, Transformer, wrap_layers
from common.step import count_targets, seed_step, set_learning_rate
from tests.support.lifted import Parts, Stage, split
from tests.support.on_ranks import on_ranks
from tests.support.sample import rows
from tests.support.words import refused
from tests.test_porting import OPTIONS


def test_initial_values_of_other_layers():
    """Biases are 0, weights of norms 1, and ties stay. What is unknown is refused by name."""
    with torch.device("meta"):
        model = Transformer(ModelConfig(96, 48, 80, 2, 6, 2))
        layer = model.model.layers["0"]
        layer.mlp.up_proj, layer.input_layernorm = nn.Linear(48, 80), nn.LayerNorm(48)
    model.lm_head.weight = model.model.embed_tokens.weight
    materialise(model, "cpu", 0)
    assert not layer.mlp.up_proj.bias.any() and not layer.input_layernorm.bias.any()
    assert layer.input_layernorm.weight.eq(1).all() and layer.mlp.up_proj.weight.std() > 0.01
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.model.norm.gate = nn.Parameter(torch.empty(3))
    with refused("does not know model.norm.gate of a RMSNorm"):
        materialise(model, "cpu", 0)
    del model.model.norm.gate
    model.model.register_buffer("inv_freq", torch.empty(4), persistent=False)
    with refused("does not know model.inv_freq of a ModuleDict"):
        materialise(model, "cpu", 0)


@on_ranks(2, thorough=True)
def test_a_batch_without_targets_counts_one(rank):
    """The loss is then 0, and not 0/0. But a rank without targets, beside others, counts none."""
    none, six = torch.full((2, 3), -100), torch.ones(2, 3)
    assert count_targets([(None, none)]) == count_targets([(None, none)], dist.group.WORLD) == 1
    assert count_targets([(None, none if rank else six)], dist.group.WORLD) == 6


class Ended(Exception):
    """Ends a run."""


COMMANDS = """single.py
ddp.py
zero.py
fsdp.py
tp.py
tp.py --no-sequence-parallel
cp.py
pp.py
ep.py --num-experts 4
hybrid_3d.py --dp 2
hybrid_3d.py --dp 2 --num-experts 4
hybrid_3d.py --pp 2
hybrid_3d.py --tp 2
hybrid_3d.py --tp 2 --no-sequence-parallel
hybrid_3d.py --cp 2"""
SETTINGS = "--seed 5 --dtype bfloat16 --beta1 0.8 --beta2 0.9 --weight-decay 0.3 --grad-clip 0"


@on_ranks(2)
def test_what_reaches_a_step():
    """Each step and rank draws its own dropout: ranks have other samples, parts of the sequence or
    layers; or all compute the same. The options of the optimizer, and of clipping, reach it, only
    matrices decay, also those of experts, which are stacked; bfloat16 reaches the layers; and a
    part in eval mode stays so, and no other is."""
    def load_from_7(*args):
        for _, batch in load_steps(*args):
            yield 7, batch

    def wrap(layers, *args, **more):
        for layer in layers:
            layer.input_layernorm.eval()
        wrap_layers(layers, *args, **more)

    for command in COMMANDS.splitlines():
        script, *options = f"{command} {OPTIONS} {SETTINGS} --data {__file__}".split()
        module, numbers = importlib.import_module(script.removesuffix(".py")), [None, None]
        seed, run = mock.Mock(wraps=seed_step), mock.Mock(wraps=module.Run)
        clip, silu = mock.Mock(side_effect=Ended), mock.Mock(wraps=torch.nn.functional.silu)
        with (mock.patch.multiple(module, create=True, load_steps=load_from_7, seed_step=seed,
                                  wrap_layers=wrap, Run=run, clip_over_stages=clip,
                                  clip_over_meshes=clip,
                                  start_process=lambda *_: torch.device("cpu")),
              mock.patch.object(common.model.F, "silu", silu),
              mock.patch.object(torch.nn.utils, "clip_grad_norm_", clip), pytest.raises(Ended)):
            module.main(options)
        assert clip.call_args.args[1] == math.inf, command
        dist.all_gather_object(numbers, seed.call_args.args)
        assert numbers[0][:2] == (5, 7)
        assert (numbers[0] == numbers[1]) == (script == "single.py" or "--no" in command), command
        groups = run.call_args.args[2].param_groups
        assert {(p.ndim > 1, group["weight_decay"]) for group in groups
                for p in group["params"]} == {(True, 0.3), (False, 0.0)}, command
        assert {(group["betas"], group["fused"]) for group in groups} == {((0.8, 0.9), True)}
        assert silu.call_args.args[0].dtype == torch.bfloat16, command
        models = run.call_args.args[1]
        models = nn.ModuleList(models if isinstance(models, list) else [models])
        for name, part in models.named_modules():
            assert part.training != name.endswith("input_layernorm"), (command, name)


# Of two groups of one optimizer, and of another one, after the first step and this one: their rates
# times the schedule, 3 steps of warm-up, then a cosine. With --lr 0 there is no schedule.
@rows("step, lr, min_lr, rates", """
0 | 1e-3 | 0.0 | 0.00666666667 0.0001 0.000333333333
2 | 1e-3 | 0.0 | 0.02 0.0003 0.001
3 | 1e-3 | 0.0 | 0.02 0.0003 0.001
6 | 1e-3 | 0.0 | 0.01 0.00015 0.0005
8 | 1e-3 | 0.0 | 0.00133974596 2.00961894e-05 6.69872981e-05
8 | 1e-3 | 5e-4 | 0.010669873 0.000160048095 0.000533493649
8 | 0.0 | 0.0 | 0.02 0.0003 0
""")
def test_each_parameter_group_keeps_its_own_rate(step, lr, min_lr, rates):
    first, second, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    groups = [{"params": [first], "lr": 0.02}, {"params": [second], "lr": 3e-4}]
    optimizers = [torch.optim.SGD(groups, 0.5), torch.optim.AdamW([third], float(lr))]
    args = argparse.Namespace(lr=float(lr), min_lr=float(min_lr), warmup_steps=3, steps=9)
    for number in 0, step:
        set_learning_rate(optimizers, number, args)
    found = [group["lr"] for each in optimizers for group in each.param_groups]
    assert found == pytest.approx([*map(float, rates.split())])


# Functions of the scripts, with other models


class Scaled(nn.Linear):
    def forward(self, x=None, scale=1.0):
        if x is None:
            return self.weight
        self.types = x.dtype, getattr(scale, "dtype", None)
        return (super().forward(x) * scale).to(x.dtype)


@on_ranks(2)
def test_fsdp_casts_images_once(mesh):
    """The images of a user are float32. Angles that the model gives to its layer stay float32."""
    model = nn.Sequential(nn.Linear(4, 4), Scaled(4, 4))
    model.forward = lambda images: model[1](model[0](images), torch.ones(4))
    fsdp.shard(model, [[model[1]]], mesh, dtype=torch.bfloat16)
    out = model(torch.randn(2, 4))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert model[1].types == (torch.bfloat16, torch.float32)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@on_ranks(2)
def test_a_plan_reaches_all_of_the_model(mesh, rank):
    for name in "first", "out":  # stages of a model that has more
        stage = Stage(Parts(), [name])
        stage.choice = nn.Identity()  # as pp.keep_stage does
        split(stage, mesh, Parts())
    for more, words in (
        ({}, "the plan does not reach choice.a.norm.weight: add its module"),
        ({"o*up": None}, r"the plan names o\*up, but the model has"),  # * matches no dot
    ):
        plan = {"first.*": tp.Replicated(), "out.*": tp.Replicated(), **more}
        with refused(words):
            tp.parallelize(Parts(), mesh, plan)
    model = Parts()
    model.out.up.weight = model.first.norm.weight
    with refused("first.norm.weight and out.up.weight are tied: .* both"):
        split(model, mesh)
    model = Parts()
    model.out.up.weight = model.first.up.weight
    torch.nn.init.constant_(model.first.up.weight, rank)
    split(model, mesh)
    assert model.out.up.weight is model.first.up.weight
    assert model.first.up.weight.to_local().eq(rank).all()  # its own part: nothing is sent
    model = nn.Sequential(nn.LayerNorm(4).requires_grad_(False))
    tp.parallelize(model, mesh, {"0": SequenceParallel()})  # which thaws it
    assert not model[0].weight.requires_grad
    layers = nn.ModuleList([nn.ModuleDict({name: nn.Linear(4, 4)}) for name in "ab"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a pattern that some layers lack
        tp.parallelize(nn.Sequential(layers), mesh, {"*.*.a": ColwiseParallel(),
                                                     "*.*.b": RowwiseParallel()})


@on_ranks(2)
def test_partial_gradients_are_added_up_in_their_group():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    model = nn.Sequential(nn.LayerNorm(4))
    tp.parallelize(model, mesh, {"0": SequenceParallel()})
    model[0].bias.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    tp.redistribute_gradients(model, mesh.get_group())
    assert model[0].bias.grad.to_local().tolist() == [1, 1, 1, 1]


@on_ranks(2)
def test_replicated_modules_take_all_inputs(mesh):
    """DTensors of any layout too: all ranks compute the same."""
    torch.manual_seed(0)
    whole, x = Scaled(4, 4), torch.randn(2, 6, 4)
    model = nn.Sequential(copy.deepcopy(whole))
    tp.parallelize(model, mesh, {"0": tp.Replicated()})
    torch.testing.assert_close(model[0](), whole.weight)
    for placement in (Replicate(), Shard(1), Shard(2)):
        inputs = distribute_tensor(x, mesh, [placement])
        for scale in (x, 10):
            torch.testing.assert_close(model[0](inputs, scale), whole(x, scale))


@on_ranks(2)
def test_inputs_that_a_style_would_drop_are_refused(mesh):
    """PyTorch's styles pass on the first positional input only."""
    for style in ColwiseParallel, RowwiseParallel, SequenceParallel:
        model = nn.Sequential(Scaled(4, 4))
        tp.parallelize(model, mesh, {"0": style()})
        with refused("Scaled was called with 2 inputs by position"):
            model[0](torch.ones(6, 4), 3.0)


# Tied weights: test_porting.py trains them, and test_refusals.py has rows of those of two units


@on_ranks(2)
def test_a_weight_that_modules_of_one_unit_share(mesh):
    model = Parts()
    model.out.up.weight = model.first.up.weight
    fsdp.shard(model, [[model.first, model.out], [model.choice]], mesh)
    assert model.out.up.weight is model.first.up.weight
