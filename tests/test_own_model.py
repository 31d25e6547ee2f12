"""One's own model: what the scripts cannot know is handled, or refused in words. Copies of scripts
with models of one's own: test_porting.py."""

import argparse
import copy
import importlib
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils._pytree import tree_leaves

import common.model
import ep
import fsdp
import tp
from common.errors import SettingError
from common.launch import source_files
from common.materialise import materialise
from common.model import ModelConfig, Transformer
from common.model_options import add_model_options
from common.options import option_parser, parse_options
from common.services.same_calls import compare_calls
from common.services.settings import config_settings, fingerprint, run_settings
from common.step import count_targets, seed_step, set_learning_rate
from tests.support.on_ranks import on_ranks
from tests.test_porting import OPTIONS, REDUCES_UNUSED

CPU = torch.device("cpu")


def model_parser():
    parser = option_parser("")
    add_model_options(parser)
    return parser


def meta_model():
    with torch.device("meta"):
        return Transformer(ModelConfig(96, 48, 80, 2, 6, 2))


def test_initial_values_of_other_layers():
    """Biases are 0, weights of norms 1, and ties stay. What is unknown is refused by name."""
    model = meta_model()
    layer = model.model.layers["0"]
    with torch.device("meta"):
        layer.mlp.up_proj, layer.input_layernorm = nn.Linear(48, 80), nn.LayerNorm(48)
    model.lm_head.weight = model.model.embed_tokens.weight
    materialise(model, "cpu", 0)
    assert (layer.mlp.up_proj.bias == 0).all() and (layer.input_layernorm.bias == 0).all()
    assert (layer.input_layernorm.weight == 1).all() and layer.mlp.up_proj.weight.std() > 0.01
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.model.norm.register_parameter("gate", nn.Parameter(torch.empty(3)))
    with pytest.raises(SettingError, match="the parameter model.norm.gate of a RMSNorm"):
        materialise(model, "cpu", 0)
    model.model.register_buffer("inv_freq", torch.empty(4), persistent=False)
    with pytest.raises(SettingError, match="the buffer model.inv_freq"):
        materialise(model, "cpu", 0)


def test_rotary_angles_stay_in_float32(monkeypatch):
    """Of a model in bfloat16, whose layers FSDP casts: see below."""
    rotate = mock.Mock(wraps=common.model.rotate)
    monkeypatch.setattr(common.model, "rotate", rotate)
    model = meta_model().bfloat16()
    materialise(model, "cpu", 0)
    model(torch.arange(64).view(2, 32))
    for x, cos, sin in (call.args for call in rotate.call_args_list):
        assert (x.dtype, cos.dtype, sin.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        assert (cos**2 + sin**2 - 1).abs().max() < 1e-6  # bfloat16: 4e-3


def test_the_seed_of_a_step_is_a_function_of_its_numbers():
    def draw(*numbers):
        seed_step(*numbers)
        return torch.rand(8).sum().item()

    assert draw(0, 3, 1) == draw(0, 3, 1)
    assert len({draw(0, 3, 1), draw(1, 3, 1), draw(0, 4, 1), draw(0, 3, 2), draw(0, 3)}) == 5


def test_a_batch_without_targets_counts_one():
    """The loss is then 0, and not 0/0."""
    assert count_targets([(None, torch.full((2, 3), -100))]) == 1


def test_a_buffer_with_two_names_stays_one():
    model = nn.ModuleList(nn.Module() for _ in "ab")
    buffer = torch.ones(2)
    for module in model:
        module.register_buffer("mask", buffer)
        module.register_buffer("same", buffer)
    fsdp.move_buffers(model, "meta")
    assert model[0].mask.is_meta and model[0].mask is model[0].same is model[1].mask


class Seeded(Exception):
    """Ends a run."""


@on_ranks(2)
def test_each_step_and_rank_draws_its_own_dropout(folder):
    """Ranks have other samples, parts of the sequence or layers; or all compute the same. The
    options of the optimizer reach it. Under FSDP ranks with other samples compare their calls."""
    adamw = "--beta1 0.8 --beta2 0.9 --weight-decay 0.3"
    for command in (
        "single.py", "ddp.py", "zero.py", "fsdp.py", "tp.py", "cp.py", "pp.py",
        "ep.py --num-experts 4", "hybrid_3d.py --dp 2 --num-experts 4",
        "hybrid_3d.py --pp 2", "hybrid_3d.py --tp 2", "hybrid_3d.py --cp 2", "hybrid_3d.py --dp 2",
        "tp.py --no-sequence-parallel", "hybrid_3d.py --tp 2 --no-sequence-parallel",
        "tp.py --compile",
    ):
        script, *options = f"{command} {OPTIONS} {adamw} --seed 5 --out {folder}/out".split()
        module, numbers = importlib.import_module(script.removesuffix(".py")), [None, None]
        with (mock.patch.object(module, "load_steps", lambda *_: [(7, [])]),
              mock.patch.object(module, "seed_step", side_effect=Seeded) as seed,
              mock.patch.object(module, "Report", wraps=module.Report) as report,
              mock.patch.object(module, "compare_calls", create=True) as compare,
              mock.patch.object(module, "set_timeout", create=True) as set_timeout,
              mock.patch.object(module, "wait_for_output", create=True) as wait,
              mock.patch.object(torch, "compile", lambda forward, **_: forward),
              mock.patch.object(module, "start_process", create=True, return_value=CPU),
              pytest.raises(Seeded)):
            module.main([*options, "--data", __file__])
        dist.all_gather_object(numbers, seed.call_args.args)
        assert numbers[0][:2] == (5, 7)
        assert (numbers[0] == numbers[1]) == (script == "single.py" or "--no" in command), command
        groups = tree_leaves(report.call_args.args[2])[0].param_groups
        assert {group["weight_decay"] for group in groups} == {0.3, 0.0}, command
        assert {group["betas"] for group in groups} == {(0.8, 0.9)}, command
        assert {group["fused"] for group in groups} == {True}, command
        meshes = {"hybrid_3d.py": 2 + ("experts" in command)}  # whose groups wait for --timeout
        assert set_timeout.call_count == meshes.get(script, int(module in (fsdp, ep)))
        waiting = [call.args[0].mesh_dim_names for call in set_timeout.call_args_list]
        assert any("ep" in names for names in waiting) == ("experts" in command)
        assert wait.called == ("--compile" in command or "hybrid_3d.py --tp" in command), command
        alike = {"fsdp.py": 2, "ep.py": 2, "hybrid_3d.py": 1 + ("--dp 2" in command)}
        if script in alike:
            (_, group), passes = compare.call_args
            assert group.size() == alike[script] and passes == {"passes": 2}, command


def test_no_clipping_is_an_infinite_norm():
    args = parse_options(model_parser(), ["--grad-clip", "0", "--rope-theta", "1e6"])
    assert args.max_norm == float("inf") and args.config.rope_theta == 1e6


def test_each_parameter_group_keeps_its_own_rate():
    """Times the schedule; with --lr 0 there is no schedule."""
    def rates(lr, min_lr=0.0, warmup_steps=3):
        first, second, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
        groups = [{"params": [first], "lr": 0.02}, {"params": [second], "lr": 3e-4}]
        optimizers = [torch.optim.SGD(groups, 0.5), torch.optim.AdamW([third], lr)]
        args = argparse.Namespace(lr=lr, min_lr=min_lr, warmup_steps=warmup_steps, steps=9)
        for step in range(9):
            set_learning_rate(optimizers, step, args)
            yield [group["lr"] for each in optimizers for group in each.param_groups]

    found, low = list(rates(1e-3)), list(rates(1e-3, min_lr=5e-4))
    assert found[2] == found[3] == [0.02, 3e-4, 1e-3] == pytest.approx(low[3])
    assert found[6][2] == pytest.approx(0.5e-3)  # a half of a cosine
    assert found[8][2] == pytest.approx(1e-3 * (1 + math.cos(math.pi * 5 / 6)) / 2)
    assert found[0] == pytest.approx([0.02 / 3, 1e-4, 1e-3 / 3])
    for one, two, three in found + low:
        assert one / two == pytest.approx(0.02 / 3e-4) and one / three == pytest.approx(20)
    assert low[8][0] > 0.5 * 0.02 > found[8][0] > 0
    assert list(rates(0.0)) == [[0.02, 3e-4, 0.0]] * 9
    assert list(rates(1e-3, warmup_steps=9))[8] == [0.02, 3e-4, 1e-3]


def test_settings_of_a_run():
    """A checkpoint without experts is that of a run that had no such option."""
    args = parse_options(model_parser(), ["--lr", "0.5"])
    args.balance_rate = 0.01  # of experts
    _, changeable = run_settings(args, [torch.ones(2)])
    assert changeable["--lr"] == 0.5 and changeable["--balance-rate"] == 0.01
    assert source_files().items() <= changeable.items()
    assert config_settings({"num_experts": 0}) == {"--num-experts": None}


def test_the_fingerprint_is_of_the_values():
    """Of any structure; a dict is not its keys. Tuples of tokens have the hash that they had."""
    def hash_of(*samples):
        return fingerprint(samples)["the hash of some samples in --data"]

    tokens = torch.arange(12).view(2, 2, 3)
    assert hash_of(*map(tuple, tokens)) == "700a4498438a801b"
    ones = torch.ones(2, dtype=torch.bfloat16), np.ones((2, 2), np.uint16)
    values = [*ones, *(2 * each for each in ones), 1.5, 2, "text", None, [torch.tensor(True)],
              {"deep": torch.zeros((), requires_grad=True)}, {"deep": torch.ones(())}]
    hashes = {hash_of({"x": tokens, "y": value}) for value in values}
    assert len(hashes) == len(values) and hash_of({"x": tokens, "y": values[0]}) in hashes


# Functions of the scripts, with other models


class Turned(nn.Module):
    """Float images, and float angles that go into the layer."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), Scaled(4, 4)

    def forward(self, images):
        return self.layer(self.first(images), torch.ones(4))


class Scaled(nn.Linear):
    def forward(self, x=None, scale=1.0):
        if x is None:
            return self.weight
        self.types = x.dtype, getattr(scale, "dtype", None)
        return (super().forward(x) * scale).to(x.dtype)


@on_ranks(2)
def test_fsdp_casts_images_once(mesh):
    """The images of a user are float32. Angles that the model gives to its layer stay float32."""
    model = Turned()
    fsdp.shard(model, [[model.layer]], mesh, dtype=torch.bfloat16)
    out = model(torch.randn(2, 4))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert model.layer.types == (torch.bfloat16, torch.float32)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@on_ranks(2)
def test_bfloat16_reaches_the_layers(folder):
    """Of pp.py: test_same_run.py; of single.py: test_validation.py. No copies of weights stay."""
    def check(mlp, x):
        assert mlp.up_proj(x).dtype == torch.bfloat16
        assert not (torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled())
        raise Seeded

    for command in "ddp.py", "zero.py", "fsdp.py", "tp.py", "cp.py", "hybrid_3d.py":
        module = importlib.import_module(command.removesuffix(".py"))
        with mock.patch.object(common.model.MLP, "forward", check), pytest.raises(Seeded):
            module.main(f"{OPTIONS} --dtype bfloat16 --no-count --out {folder}/out "
                        f"--data {__file__}".split())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in "ab")

    def forward(self, block):
        return self.blocks[block](torch.ones(4))


PLAN = {"embed": tp.Replicated(), "blocks.*.0": ColwiseParallel(), "blocks.*.1": RowwiseParallel()}


@on_ranks(2)
def test_a_plan_reaches_all_of_the_model(mesh, rank):
    def refused(match, plan, model):
        with pytest.raises(SettingError, match=match):
            tp.parallelize(model, mesh, plan)

    for blocks in (1, 0):
        stage = Net()
        stage.blocks, stage.embed = stage.blocks[:blocks], nn.Identity()  # as pp.keep_stage does
        tp.parallelize(stage, mesh, PLAN, Net())
    refused(r"the plan names b\*0.1, but the model has", PLAN | {"b*0.1": None}, Net())  # no dot
    model = Net()
    model.blocks[1].gate = nn.Parameter(torch.ones(4))
    refused("the plan does not reach blocks.1.gate: add its module", PLAN, model)
    model = Net()
    model.blocks[1][0].weight = model.embed.weight
    refused("embed.weight and blocks.1.0.weight are tied: .* both alike", PLAN, model)
    model = Net()
    model.blocks[1][0].weight = model.blocks[0][0].weight
    torch.nn.init.constant_(model.blocks[0][0].weight, rank)
    tp.parallelize(model, mesh, PLAN)
    assert model.blocks[1][0].weight is model.blocks[0][0].weight
    assert (model.blocks[0][0].weight.to_local() == rank).all()  # its own part: nothing is sent
    model = nn.Sequential(nn.LayerNorm(4).requires_grad_(False))
    tp.parallelize(model, mesh, {"0": SequenceParallel()})  # which thaws it
    assert not any(parameter.requires_grad for parameter in model.parameters())


@on_ranks(2)
def test_replicated_modules_take_all_inputs(mesh):
    """DTensors of any layout too: all ranks compute the same."""
    torch.manual_seed(0)
    whole, x = Scaled(4, 4), torch.randn(2, 6, 4)
    model = nn.Sequential(copy.deepcopy(whole))
    tp.parallelize(model, mesh, {"0": tp.Replicated()})
    torch.testing.assert_close(model[0](), whole.weight)
    for placement in (Replicate(), Shard(1), Shard(2)):
        split = distribute_tensor(x, mesh, [placement])
        for scale in (x, 10):
            torch.testing.assert_close(model[0](split, scale), whole(x, scale))


@on_ranks(2)
def test_inputs_that_a_style_would_drop_are_refused(mesh):
    """PyTorch's styles pass on the first positional input only."""
    for style in (ColwiseParallel(), RowwiseParallel(),
                  SequenceParallel(sequence_dim=0, use_local_output=True)):
        model = nn.Sequential(Scaled(4, 4))
        tp.parallelize(model, mesh, {"0": style})
        x = torch.ones(6, 4)
        with pytest.raises(SettingError, match="Scaled was called with 2 inputs by position"):
            model[0](x, 3.0)


@on_ranks(2)
def test_positions_that_cannot_be_split_are_refused(mesh):
    split = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    model = Net()
    tp.parallelize(model, mesh, PLAN | {"embed": split})
    assert type(model.embed(torch.zeros(2, 16, dtype=torch.int64))) is AsyncCollectiveTensor
    tp.wait_for_output(model.embed)  # which a compiled layer could not take
    found = model.embed(torch.zeros(2, 16, dtype=torch.int64))
    assert type(found) is torch.Tensor and found.shape == (2, 8, 4)
    odd = torch.zeros(2, 15, dtype=torch.int64)
    with pytest.raises(SettingError, match="15 positions cannot be split over 2 tensor-para"):
        model.embed(odd)
    stage, part = Net(), torch.ones(2, 15, 4)
    stage.embed = nn.Identity()  # of a later stage, which gets positions that are split
    tp.parallelize(stage, mesh, PLAN | {"embed": split}, Net())
    assert stage.embed(part) is part
    model = Net()
    tp.parallelize(model, mesh, PLAN | {"embed": RowwiseParallel(input_layouts=Replicate())})
    assert model.embed(odd).shape == (2, 15, 4)  # whole, on each rank


@on_ranks(2)
def test_a_loss_across_samples(mesh, rank):
    """Of images and their texts (CLIP, arXiv:2103.00020), with the words of docs/copying.md."""
    def loss_of(first, everyone, row):
        labels = torch.arange(row, row + len(first))
        return nn.functional.cross_entropy(first @ everyone.mT, labels, reduction="sum")

    samples = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    whole, weight = (torch.eye(4, requires_grad=True) for _ in range(2))
    loss_of(*samples @ whole, 0).backward()
    first, z = samples.chunk(2, dim=1)[rank] @ weight
    everyone = DTensor.from_local(z, mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()])
    loss_of(first, everyone, mesh.get_local_rank() * len(z)).backward()
    dist.all_reduce(weight.grad)
    torch.testing.assert_close(weight.grad, whole.grad)


@on_ranks(2)
def test_ranks_use_different_parts_of_a_unit(mesh, rank):
    """Before torch 2.13 they cannot."""
    model = Net()
    if not REDUCES_UNUSED:
        with pytest.raises(SettingError, match="needs torch 2.13"):
            fsdp.shard(model, [[*model.blocks]], mesh, reduce_unused=True)
        return
    model.forward = lambda blocks: sum(model.blocks[i](torch.ones(4)) for i in blocks)
    fsdp.shard(model, [[*model.blocks]], mesh, reduce_unused=True)
    compare_calls(model, mesh.get_group(), 2)
    for blocks, expected in ([rank], (0.5, 0.5)), ([0, 1][: 2 - rank], (1, 0.5)):
        model.zero_grad()
        model(blocks).sum().backward()
        for block, gradient in zip(model.blocks, expected):
            assert (block[1].bias.grad.full_tensor() == gradient).all()


@on_ranks(2)
def test_calls_are_compared_in_the_first_passes(mesh, rank):
    model, other = Net(), Net()
    compare_calls(model, mesh.get_group(), 2)
    with torch.no_grad():  # those of an evaluation do not count
        model(0), model(0)
    model(0)
    with (mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather,
          pytest.raises(SettingError, match="rank 1 calls blocks.1 where rank 0 calls blocks.0")):
        model(rank)
    assert gather.call_args.kwargs["group"] is mesh.get_group()
    compare_calls(other, mesh.get_group(), 1)
    other(0)
    other(rank)
    longer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    longer.forward = lambda x: longer[1](longer[0](x)) if rank else longer[0](x)
    compare_calls(longer, mesh.get_group(), 1)
    with pytest.raises(SettingError, match="rank 1 calls 1 where rank 0 calls no further module"):
        longer(torch.ones(4))
    third = Net()
    third.blocks[1] = nn.Linear(4, 4)
    fsdp.shard(third, [[block] for block in third.blocks], mesh)
    compare_calls(third, mesh.get_group(), 1)  # before they gather units of different sizes
    with pytest.raises(SettingError, match="rank 1 calls blocks.1 where rank 0 calls blocks.0"):
        third(rank)


def test_what_is_offloaded():
    with mock.patch.object(fsdp, "fully_shard") as fully_shard:
        fsdp.shard(nn.Linear(2, 2), [], None, cpu_offload=True)
    assert isinstance(fully_shard.call_args.kwargs["offload_policy"], CPUOffloadPolicy)
