"""One's own model: what the scripts cannot know is handled, or refused in words."""

import argparse
import copy
import re
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import fsdp
import tp
from common.data import BatchSampler, load_steps
from common.errors import SettingError
from common.materialise import materialise
from common.model import ModelConfig, Transformer, next_token_loss, wrap_layers
from common.options import option_parser, parse_options
from common.services import checkpoint_files
from common.services.settings import fingerprint
from common.services.validation import Validation
from common.step import count_targets, seed_step, set_learning_rate
from tests.support.edits import edited as edited_in
from tests.support.on_ranks import on_ranks
from tests.support.processes import ROOT
from tests.support.sample import sampled, thorough
from tests.support.table import ONE_REPLICA
from tests.test_same_run import furthest, resumed

OPTIONS = ("--hidden-size 48 --intermediate-size 80 --num-hidden-layers 2 --num-attention-heads 4 "
           "--num-key-value-heads 2 --seq-len 32 --batch-size 24 --steps 6 --log-every 1 "
           "--warmup-steps 3 --save-every 4 --dtype float64")
UNSAVED = f"{OPTIONS} --save-every 0"
SCRIPTS = [
    ("ddp.py", 2), ("zero.py", 2), ("fsdp.py", 2), ("tp.py", 2), ("cp.py", 2), ("pp.py", 2),
    ("hybrid_3d.py --tp 2 --cp 2", 4), (f"{ONE_REPLICA} --inner-steps 4", 2),
]


def meta_model():
    with torch.device("meta"):
        return Transformer(ModelConfig(96, 48, 80, 2, 6, 2))


def test_a_buffer_is_refused_by_name():
    model = meta_model()
    model.model.register_buffer("inv_freq", torch.empty(4, device="meta"), persistent=False)
    with pytest.raises(SettingError, match="does not know the buffer model.inv_freq"):
        materialise(model, "cpu", 0)


def test_an_unknown_parameter_is_refused_by_name():
    model = meta_model()
    model.model.norm.register_parameter("gate", nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(SettingError, match="the parameter model.norm.gate of a RMSNorm"):
        materialise(model, "cpu", 0)


def test_biases_are_zero_norms_one_and_ties_stay():
    model = meta_model()
    layer = model.model.layers["0"]
    with torch.device("meta"):
        layer.mlp.up_proj, layer.input_layernorm = nn.Linear(48, 80), nn.LayerNorm(48)
    model.lm_head.weight = model.model.embed_tokens.weight
    materialise(model, "cpu", 0)
    assert (layer.mlp.up_proj.bias == 0).all() and (layer.input_layernorm.bias == 0).all()
    assert (layer.input_layernorm.weight == 1).all() and layer.mlp.up_proj.weight.std() > 0.01
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_checkpointed_layers_repeat_their_dropout():
    """The same gradients with and without activation checkpointing."""
    gradients = []
    for checkpointed in (False, True):
        model = meta_model()
        materialise(model, "cpu", 0)
        for layer in model.model.layers.values():
            layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(0.3))
        wrap_layers(model.model.layers.values(), False, checkpointed)
        seed_step(0, 5)
        tokens = torch.arange(64).view(2, 32)
        next_token_loss(model(tokens), tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_the_seed_of_a_step_is_a_function_of_its_numbers():
    def draw(*numbers):
        seed_step(*numbers)
        return tuple(torch.rand(8).tolist())

    assert draw(0, 3, 1) == draw(0, 3, 1)
    assert len({draw(*map(int, f"{i:03b}")) for i in range(8)}) == 8  # seed, step, rank: 0 or 1


@pytest.mark.parametrize("command, world", sampled(
    [("single.py", 0), *SCRIPTS], [("tp.py", 2)]
))
def test_dropout_repeats_itself_after_a_resume(once, command, world):
    """Bit for bit, at the same number of ranks; and it is not what they do without dropout."""
    result = once(command, world, f"{OPTIONS} --activation-checkpointing --grad-accum 2",
                  inject="dropout(); resumed([])")
    resumed(command, lambda _: result)
    assert furthest(result.curve(), once("single.py", 0, UNSAVED).curve()) > 1e-3


ODD = [("frozen", *script) for script in SCRIPTS] + [
    ("tied", *script) for script in SCRIPTS if script[0][:2] in ("dd", "tp", "cp")
]


@pytest.mark.parametrize("kind, command, world", sampled(ODD, [ODD[1], ODD[9]]))
def test_frozen_and_tied_parameters(once, kind, command, world):
    """Every script trains them as one process does; and that is not what it does without them."""
    expected, plain, found = (torch.tensor(result.curve()) for result in (
        once("single.py", 0, UNSAVED, inject=f"{kind}()"), once("single.py", 0, UNSAVED),
        once(command, world, UNSAVED, inject=f"{kind}()"),
    ))
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("command", ["zero.py", "fsdp.py"])
def test_tied_parameters_in_two_units_are_refused(run, corpus, command):
    """In two units of FSDP they are an error on new torch, and untied in silence on 2.11."""
    result = run(command, 2, f"{OPTIONS} --data {corpus}", inject="tied()", expect_ok=False)
    (line,) = result.lines
    assert all(result.statuses) and ("in 2 of the units" in line or "two units share" in line)


LOOK = """
types, rotate = set(), common.model.rotate
def look(x, cos, sin):
    types.add((x.dtype, cos.dtype, sin.dtype))
    assert (cos.double() ** 2 + sin.double() ** 2 - 1).abs().max() < 1e-6  # bfloat16: 4e-3
    return rotate(x, cos, sin)
common.model.rotate = look
before(Report, "close", lambda *_: print("types", types))
"""


@pytest.mark.parametrize("command, world", sampled(
    [("fsdp.py", 2), ("hybrid_3d.py", 2)], [("fsdp.py", 2)]
))
def test_rotary_angles_stay_in_float32(run, corpus, command, world):
    """Also where FSDP casts the parameters, and would cast the inputs of each layer."""
    result = run(command, world, "--dtype bfloat16 --steps 1 --seq-len 32 --batch-size 4 "
                 f"--save-every 0 --data {corpus}", inject=LOOK)
    assert result.output.count("types {(torch.bfloat16, torch.float32, torch.float32)}") == world


@pytest.mark.parametrize("command", [
    "zero.py", "tp.py", "cp.py", "pp.py", "ep.py --num-experts 4", "hybrid_3d.py --pp 2",
    "hybrid_3d.py --tp 2", "hybrid_3d.py --cp 2", "hybrid_3d.py --dp 2", "diloco.py",
])
def test_ranks_with_other_activations_draw_their_own_dropout(run, corpus, command):
    """Of other samples, parts of the sequence or layers."""
    result = run(command, 2, f"{OPTIONS} --steps 1 --save-every 0 --data {corpus}",
                 inject="before(Report, 'log', "
                        "lambda *_, **__: print('seed', torch.initial_seed()))")
    seeds = re.findall(r"seed \d+", result.output)
    assert len(seeds) == len(set(seeds)) == 2


def test_tied_parameters_stay_tied_in_one_stage(once):
    found = once("pp.py", 1, UNSAVED, inject="tied()")
    expected = once("single.py", 0, UNSAVED, inject="tied()")
    torch.testing.assert_close(found.curve(), expected.curve(), rtol=0, atol=1e-10)


def test_no_clipping_is_an_infinite_norm():
    assert parse_options(option_parser(""), ["--grad-clip", "0"]).max_norm == float("inf")
    assert parse_options(option_parser(""), ["--grad-clip", "0.5"]).max_norm == 0.5


def test_each_parameter_group_keeps_its_own_rate():
    """Times the schedule; with --lr 0 there is no schedule."""
    def rates(lr, own=(0.02, 3e-4), min_lr=0.0):
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        groups = [{"params": [p], "lr": rate} for p, rate in zip(parameters, own)]
        optimizers = [torch.optim.SGD(groups, 0.5), torch.optim.AdamW(parameters[2:], lr)]
        args = argparse.Namespace(lr=lr, min_lr=min_lr, warmup_steps=3, steps=9)
        for step in range(9):
            set_learning_rate(optimizers, step, args)
            yield [group["lr"] for each in optimizers for group in each.param_groups]

    found, low, none = list(rates(1e-3)), list(rates(1e-3, min_lr=5e-4)), list(rates(0.0))
    assert found[2] == [0.02, 3e-4, 1e-3] and found[0] == pytest.approx([0.02 / 3, 1e-4, 1e-3 / 3])
    for one, two, three in found + low:
        assert one / two == pytest.approx(0.02 / 3e-4) and one / three == pytest.approx(20)
    assert low[8][0] > 0.5 * 0.02 > found[8][0] > 0
    assert none == [[0.02, 3e-4, 0.0]] * 9


def test_the_fingerprint_is_of_the_values():
    """Of any structure; a dict is not its keys. Tuples of tokens have the hash that they had."""
    def hash_of(*samples):
        return fingerprint(samples)["the hash of some samples in --data"]

    tokens = torch.arange(12).view(2, 2, 3)
    assert hash_of(*map(tuple, tokens)) == "700a4498438a801b"
    values = [torch.ones(2, dtype=torch.bfloat16), np.ones((2, 2), np.uint16), 1.5, 2, "text", None,
              [torch.tensor(True)], {"deep": torch.zeros((), requires_grad=True)}]
    others = [torch.ones(2, dtype=torch.bfloat16) + 1, np.ones((2, 2), np.uint16) * 2, 2.5, 3,
              "test", 0, [torch.tensor(False)], {"deep": torch.ones(())}]
    hashes = {hash_of({"x": tokens, "y": value}) for value in [*values, *others]}
    assert len(hashes) == 16 and hash_of({"x": tokens, "y": values[0]}) in hashes


class Dicts:
    """Images with labels, some of which do not count."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(24, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randint(-1, 3, (24,), generator=generator)
        self.y[self.y == -1] = -100

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"image": self.x[index], "label": self.y[index]}


def test_a_dataset_of_dicts_is_evaluated_as_it_is_trained_on():
    torch.manual_seed(0)
    model, dataset, cpu = nn.Linear(5, 3).double(), Dicts(0), torch.device("cpu")

    def compute_loss(micro_batch):
        targets = micro_batch["label"]
        loss = F.cross_entropy(model(micro_batch["image"]), targets, reduction="sum")
        return loss, (targets != -100).sum()

    sampler = BatchSampler(24, 24, 3, stop=1)
    ((_, batch),) = load_steps(dataset, sampler, cpu, 0)
    count = count_targets([(part, part["label"]) for part in batch])
    trained = sum(compute_loss(part)[0] / count for part in batch)
    found = Validation(dataset, sampler, cpu, 1, 1).loss(model, compute_loss)
    assert 0 < count < 24 and found == pytest.approx(trained.item(), abs=1e-12)


# Copies of scripts with optimizers of one's own

ADAMW = """    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )
"""
EDITS = [
    (ADAMW, """    optimizer = [
        torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], 0.05, 0.9, nesterov=True),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], args.lr),
    ]
"""),
    ("        optimizer.step()\n", "        [each.step() for each in optimizer]\n"),
    ("        optimizer.zero_grad()\n", "        [each.zero_grad() for each in optimizer]\n"),
]


@pytest.fixture
def edited(tmp_path):
    """Write a copy of a script, with edits; returns its path."""
    return lambda name, *edits, script="single.py": edited_in(
        tmp_path / "copy", script, *edits, name=name)


def test_two_optimizers_are_counted_saved_and_resumed(run, edited, corpus, tmp_path):
    """Bit for bit; and a setting of theirs that changes is printed."""
    options = f"{OPTIONS} --data {corpus}"
    two = edited("two.py", *EDITS)
    whole = run(two, 0, options, out="whole")
    shutil.copytree(whole.out, tmp_path / "out")
    again = run(two, 0, f"{options} --resume-from 4")
    assert "resuming after step 4" in again.output and again.curve() == whole.curve()
    found, expected = (
        checkpoint_files.read(out / "step-00000006", prefix="") for out in (again.out, whole.out)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    sizes = {name: tensor.nbytes for name, tensor in found.items() if name.startswith("optimizer.")}
    assert {name.rpartition(".")[2] for name in sizes} == {
        "momentum_buffer", "exp_avg", "exp_avg_sq", "step"
    }
    assert whole.summary["held"]["optimizer states"] == sum(sizes.values())
    assert whole.history[2]["lr"] == 0.05  # that of the first group, at the peak

    changed = edited("changed.py", *EDITS, ("0.05, 0.9, nesterov=True", "0.05, 0.5"))
    result = run(changed, 0, f"{options} --steps 8")
    (line,) = [line for line in result.lines if "changed since" in line]
    assert line.endswith(": --steps was 6, is 8; momentum was [0.9, None], is [0.5, None]; "
                         "nesterov was [True, None], is [False, None]")


@thorough
@pytest.mark.parametrize("edits", [
    [(ADAMW, "    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=False)\n")],
    [(ADAMW, "    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)\n")],
    EDITS,
], ids=["unfused", "SGD", "two"])
def test_any_optimizer_trains_as_on_one_process(run, edited, corpus, edits):
    options = f"{OPTIONS} --data {corpus}"
    expected = run(edited("one.py", *edits), 0, options, out="one").curve()
    for script in ("ddp.py", "fsdp.py"):
        curve = run(edited(script, *edits, script=script), 2, options, out=script).curve()
        assert furthest(curve, expected) < 1e-10


TIE = ("""        model = Transformer(args.config).to(args.param_dtype)
""", """        model = Transformer(args.config).to(args.param_dtype)
        model.lm_head.weight = model.model.embed_tokens.weight
""")
UNITS = ("""        [model.model.embed_tokens], *([layer] for layer in layers),
        [model.model.norm, model.lm_head],
""", """        *([layer] for layer in layers),
        [model.model.embed_tokens, model.model.norm, model.lm_head],
""")


@thorough
@pytest.mark.parametrize("script", ["zero.py", "fsdp.py"])
def test_tied_parameters_in_one_unit(run, edited, corpus, script):
    """They train as on one process, and another script resumes them."""
    options = f"{OPTIONS} --data {corpus}"
    expected = run(edited("one.py", TIE), 0, options, out="one").curve()
    copy = edited(script, TIE, UNITS, script=script)
    assert furthest(run(copy, 2, options).curve(), expected) < 1e-10
    other = edited("ddp.py", TIE, script="ddp.py")
    again = run(other, 2, f"{options} --resume-from 4")
    assert "resuming after step 4" in again.output and furthest(again.curve(), expected) < 1e-10


# Functions of the scripts, with other models


class Patches(nn.Module):
    """Images (B, 1, 4, 4) and float angles; the angles go into the layer."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Conv2d(1, 8, 2, 2), Turn()
        self.cls_token = nn.Parameter(torch.zeros(8))

    def forward(self, images):
        angles = torch.arange(4, dtype=torch.float32) + 256.5  # bfloat16 has no such numbers
        return self.layer(self.first(images).flatten(2).mT + self.cls_token, angles)


class Turn(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.types = set()

    def forward(self, x, angles):
        self.types.add((x.dtype, angles.dtype))
        return super().forward(x) * angles.cos()[:, None].to(x.dtype)


@on_ranks(2)
def test_fsdp_casts_images_once(mesh):
    """The images of a user are float32. Angles that the model gives to its layer stay float32."""
    torch.manual_seed(0)
    model = Patches()
    fsdp.shard(model, [[model.layer]], mesh, dtype=torch.bfloat16)
    images = torch.randn(2, 1, 4, 4)
    out = model(images)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and images.dtype == torch.float32
    assert model.layer.types == {(torch.bfloat16, torch.float32)}
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in "ab")

    def forward(self, x):
        x = self.embed(x)
        for up, down in self.blocks:
            x = x + down(up(x))
        return x


@on_ranks(2)
def test_a_plan_reaches_all_of_the_model(mesh):
    good = {"embed": tp.Replicated(), "blocks.*.0": ColwiseParallel(),
            "blocks.*.1": RowwiseParallel()}

    def refused(match, plan, model=None, whole=None):
        with pytest.raises(SettingError, match=match):
            tp.parallelize(model or Net(), mesh, plan, whole)

    tp.parallelize(Net(), mesh, good)
    stage = Net()
    del stage.blocks[0]
    stage.embed = nn.Identity()  # as pp.keep_stage leaves a stage
    tp.parallelize(stage, mesh, good, Net())
    refused("the plan names block.1.0, but the model has no such", good | {"block.1.0": None})
    refused(r"the plan names b\*0.1, but the model has", good | {"b*0.1": None})  # * is no dot
    refused("the plan does not reach embed.weight: add its module", {
        pattern: style for pattern, style in good.items() if pattern != "embed"
    })
    model = Net()
    model.blocks[1].gate = nn.Parameter(torch.ones(4))
    refused("the plan does not reach blocks.1.gate: add its module", good, model)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, *inputs):  # tensors, and a number that is none
        return self.weight if not inputs else inputs[0] * self.weight + inputs[1] * inputs[2]


@on_ranks(2)
def test_replicated_modules_take_all_inputs(mesh):
    model = nn.Sequential(Shift())
    tp.parallelize(model, mesh, {"0": tp.Replicated()})
    x = torch.tensor([1.0, 2.0])
    assert model[0](x, x, 10).tolist() == [13, 26] and model[0]().tolist() == [3, 3]


@on_ranks(2)
def test_replicated_modules_take_dtensors(mesh):
    """Whatever their layout: all ranks compute the same."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 6, 4)
    expected = model(x)
    tp.parallelize(model, mesh, {"0": tp.Replicated()})
    for placement in (Replicate(), Shard(1), Shard(2)):
        torch.testing.assert_close(model(distribute_tensor(x, mesh, [placement])), expected)


@on_ranks(2)
def test_a_mean_over_positions_that_are_split(mesh):
    """Each rank computes the loss from all positions, so its part of the loss is 1/n."""
    torch.manual_seed(0)
    whole, x, n = nn.Linear(4, 4).double(), torch.randn(2, 12, 4).double(), mesh.size()
    model = copy.deepcopy(whole)
    whole(x).mean(1).square().sum().backward()
    part = x.chunk(n, dim=1)[mesh.get_local_rank()]
    sums = DTensor.from_local(model(part).sum(1), mesh, [Partial()])
    mean = sums.full_tensor(grad_placements=[Partial()]) / x.shape[1]
    (mean.square().sum() / n).backward()
    dist.all_reduce(model.weight.grad)  # as cp.py does
    torch.testing.assert_close(model.weight.grad, whole.weight.grad)


class Scaled(nn.Linear):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


@on_ranks(2)
def test_inputs_that_a_style_would_drop_are_refused(mesh):
    """PyTorch's styles pass on the first positional input only, and all keywords."""
    for style in (ColwiseParallel(), RowwiseParallel(),
                  SequenceParallel(sequence_dim=0, use_local_output=True)):
        model = nn.Sequential(Scaled(4, 4))
        tp.parallelize(model, mesh, {"0": style})
        x = torch.ones(6, 2 if isinstance(style, RowwiseParallel) else 4)
        torch.testing.assert_close(model[0](x, scale=3.0), 3 * model[0](x))
        with pytest.raises(SettingError, match="Scaled was called with 2 inputs by position"):
            model[0](x, 3.0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.norm = nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.norm(self.middle(x))
        return F.linear(x, self.embed.weight)


@on_ranks(2)
def test_what_torch_says_is_in_the_table(mesh):
    """docs/when-it-fails.md has these messages, and what to do. Then the gradients are right."""
    tokens = torch.arange(8).view(2, 4)
    table = (ROOT / "docs" / "when-it-fails.md").read_text()

    def refused(kind, words, do):
        assert f"`{words}`" in table, words
        with pytest.raises(kind, match=words):
            do()

    model = Tied()
    fsdp.shard(model, [[model.embed], [model.middle, model.norm]], mesh)
    refused(RuntimeError, "got mixed torch.Tensor and DTensor", lambda: model(tokens))
    whole = Tied()
    model = copy.deepcopy(whole)
    fsdp.shard(model, [[model.middle, model.norm]], mesh)  # the rest stays gathered
    model(tokens).square().sum().backward()
    whole(tokens).square().sum().backward()
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), whole.embed.weight.grad)

    refused(RuntimeError, "local_tensor argument only accepts torch.Tensor but got",
            lambda: DTensor.from_local(model.embed.weight, mesh))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    refused(NotImplementedError, "does not have a sharding strategy", optimizer.step)

    class PostNorm(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    whole, x = PostNorm(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)), torch.randn(2, 4, 4)
    for norm in (SequenceParallel(), SequenceParallel(use_local_output=True)):
        model = copy.deepcopy(whole)
        tp.parallelize(model, mesh, {
            "0": ColwiseParallel(input_layouts=Shard(1)),
            "1": RowwiseParallel(output_layouts=Shard(1)), "2": norm,
        })
        part = x.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
        if not norm.use_local_output:
            refused(RuntimeError, "got mixed torch.Tensor and DTensor", lambda: model(part))
    model(part).square().sum().backward()
    tp.redistribute_gradients(model, mesh.get_group())
    whole(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


@on_ranks(2)
def test_positions_that_cannot_be_split_are_refused(mesh):
    for pattern, style in (
        ("embed", RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))),
        ("blocks.*.1", RowwiseParallel(output_layouts=Shard(1))),
    ):
        model = Net()
        tp.parallelize(model, mesh, {
            "embed": tp.Replicated(), "blocks.*.0": ColwiseParallel(),
            "blocks.*.1": RowwiseParallel(), pattern: style,
        })
        module = model.embed if pattern == "embed" else model.blocks[1]
        inputs = (lambda T: torch.zeros(2, T, dtype=torch.int64)) if pattern == "embed" else (
            lambda T: torch.zeros(2, T, 4))
        assert module(inputs(16)).shape[1] == 8
        with pytest.raises(SettingError, match="15 positions cannot be split over 2 tensor-para"):
            module(inputs(15))
