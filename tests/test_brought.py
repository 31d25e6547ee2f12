"""What people bring: an optimizer, a loop. Each row trains as one process does and resumes in the
same bits, by lines that docs/copying.md has; or it is refused in words."""

import contextlib
import functools
import random
import re
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import fsdp
from common.model import ModelConfig, Transformer
from common.options import SettingError
from common.step import seed_step
from tests.support.brought import Listing, Scattered
from tests.support.compare import assert_near, furthest, read
from tests.support.on_ranks import on_ranks
from tests.support.processes import ROOT, Result, edited
from tests.support.sample import sampled
from tests.test_checkpoint import run_of
from tests.test_checkpoint import train as train_steps
from tests.test_porting import OPTIONS, optimizers

PAGE = (ROOT / "docs" / "copying.md").read_text()


def recipe(words, number=0):
    """The block of code below these words of docs/copying.md, or a later one."""
    return re.findall(r"(?s)```python\n(.*?)```", PAGE.partition(words)[2])[number]


def brought(new):
    """The edits that put an optimizer of tests/support/brought.py in place of AdamW."""
    return [("\nimport torch\n", "\nimport torch\nfrom tests.support.brought import *\n"),
            *optimizers(f"[{new}(P, args.lr)]")]


IMPORT, RESUME, LAST = "\nimport torch\n", "    sampler.start = run.resume()\n", """\
        optimizer.step()
        optimizer.zero_grad()
        run.after_step(step, loss, grad_norm)
"""
SKIP = [(LAST, recipe("**A step that is skipped**"))]
FLOAT16 = "**float16 with a"
BEFORE, _, BEHIND = recipe(FLOAT16).partition("\n")
SCALED = [
    ("    # Resume:", f"{BEFORE}\n    # Resume:"), (RESUME, RESUME + BEHIND),
    ("held_out=open_held_out(args)", "held_out=open_held_out(args), tensors={"
     "**model.state_dict(keep_vars=True), 'scaling': scaling}"),
    ("micro_loss.backward()", "scaler.scale(micro_loss).backward()"),
    ("        grad_norm =", "        scaler.unscale_(optimizer)\n        grad_norm ="),
    (LAST, recipe(FLOAT16, 1)),
]
AUC = [
    (IMPORT, f"{IMPORT}from common.launch import gather\n"
     "from tests.support.brought import pairs, roc_auc_score\n"),
    (RESUME, RESUME + recipe("**A metric that is no mean")),
    ("loss, grad_norm)\n", "loss, grad_norm, auc=auc)\n"),
]
SCHEDULER = [
    ("        set_learning_rate(optimizer, step, args)\n", ""),
    (IMPORT, f"{IMPORT}from torch.optim.lr_scheduler import ReduceLROnPlateau\n"
     "from common.launch import gather\n"),
    (RESUME, RESUME + recipe("**A scheduler with a state").replace(
        "patience=9", "patience=0, threshold=9")),
    ("        run.after_step", recipe("**A scheduler with a state", 1) + "        run.after_step"),
]
AVERAGE = [
    ("    # Resume:", """\
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def swap():
        for name, p in model.named_parameters():
            kept = p.clone()
            p.copy_(average[name])
            average[name].copy_(kept)

    def of_average(micro_batch):
        swap()
        loss = model(*micro_batch)
        model.reset_iter_state()  # FSDP, ZeRO
        swap()
        return loss, (micro_batch[1] != -100).sum()

    # Resume:"""),
    ("held_out=open_held_out(args)", """held_out=open_held_out(args), loss_of=of_average,
    tensors=model.state_dict(keep_vars=True) | {f"average.{name}": x for name, x in average.items()}
    """),
    ("        run.after_step", """\
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 0.1)
        run.after_step"""),
]
HALVED = [("        grad_norm =",
           "        model.model.norm.weight.grad *= 0.5\n        grad_norm =")]
NOISE = [(IMPORT, f"{IMPORT}from tests.support.brought import normal_like\n"), (
    "        grad_norm =", """\
        g = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad += 0.01 * normal_like(p, g)
        grad_norm ="""), (
    "        run.after_step(step, loss, grad_norm)", """\
        first = model.model.norm.weight.norm()
        run.after_step(step, loss, grad_norm, first=lambda: float(
            first.full_tensor() if hasattr(first, "full_tensor") else first))""")]
WHOLE_MODEL = ("        model.reset_iter_state()  # FSDP, ZeRO\n", "")
MATRICES = """\
    inner = {p for layer in layers for p in layer.parameters() if p.ndim == 2}
    matrices = [p for p in model.parameters() if p in inner]
    rest = [p for p in model.parameters() if p not in inner]
    # Optimizer
"""


def thaw(step):
    """The edits that freeze the first layer until ``step``."""
    line = f"        model.model.layers['0'].requires_grad_(step >= {step})\n"
    return [("        seed_step(", f"{line}        seed_step(")]


FIND = {"ddp.py": [("gradient_as_bucket_view=True",
                    "gradient_as_bucket_view=True, find_unused_parameters=True")]}
INFINITE = "gradients_times(float('inf'), 2)"
SHARDED = "zero.py", "fsdp.py"
DATA_PARALLEL = "ddp.py", *SHARDED
TABLE = {  # edits of all scripts, more edits of one; what is injected; what is logged; the scripts
    "state in many places": (brought("Scattered"), {}, "", [],
                             (*DATA_PARALLEL, "tp.py", "hybrid_3d.py")),
    "a step that is skipped": (SKIP, {}, INFINITE, ["skipped"], (*DATA_PARALLEL, "pp.py")),
    "a scaler": (SCALED, {}, INFINITE, [], SHARDED),
    "a metric that is no mean": (
        AUC, {"single.py": [WHOLE_MODEL], "ddp.py": [WHOLE_MODEL]}, "", ["auc"], DATA_PARALLEL),
    "a scheduler with a state": (SCHEDULER, {}, "", ["lr"], (*DATA_PARALLEL, "tp.py")),
    "an average": (
        AVERAGE, {"single.py": [WHOLE_MODEL], "ddp.py": [WHOLE_MODEL], "tp.py": [WHOLE_MODEL]}, "",
        ["val_loss"], (*DATA_PARALLEL, "tp.py")),
    "noise, and a norm": (NOISE, {}, "", ["first"], DATA_PARALLEL),
    "a gradient that is changed": (HALVED, {}, "", [], (*DATA_PARALLEL, "tp.py")),
    "thawed before the save": (thaw(1), FIND, "", [], (*DATA_PARALLEL, "tp.py")),
    "thawed after the save": (thaw(2), FIND, "", [], (*DATA_PARALLEL, "tp.py")),
}
ROWS = [(kind, script) for kind, row in TABLE.items() for script in row[-1]]


@pytest.mark.parametrize("kind, script", sampled(ROWS, [
    (kind, "fsdp.py") for kind in TABLE if kind != "thawed before the save"]))
def test_it_is_trained_as_by_one_process(once, tmp_path_factory, kind, script):
    """Losses, norms and weights. Then it resumes its own checkpoint of step 2, in the same bits,
    and that of one process."""
    edits, own_edits, inject, logged, _ = TABLE[kind]
    options = OPTIONS
    if edits in (AUC, AVERAGE):
        options += " --val-data {val} --val-batches 1 --val-every 1"
    folder = tmp_path_factory.getbasetemp() / kind.replace(" ", "-")
    single, its_copy = (edited(folder, name, *edits, *own_edits.get(name, []))
                        for name in ("single.py", script))
    expected = once(single, 0, options, inject=inject)
    found = once(its_copy, 2, options,
                 inject=f"{inject}; resumed(['{expected.out}'])".strip("; "))
    assert furthest(found.curve(), expected.curve()) < 1e-10
    for name in logged:
        assert furthest(found.curve(name), expected.curve(name)) < 1e-12
    last = "step-00000003"
    assert_near(*(read(result.out / last) for result in (found, expected)))
    own, of_one = (Result([0], "", found.out / f"again-{i}").curve() for i in (0, 1))
    assert own == found.curve()[2:]  # bit for bit
    assert furthest(of_one, expected.curve()[2:]) < 1e-10


def test_it_ends_early(once, tmp_path):
    """One rank alone asks for it. The step is saved, and the run can go on."""
    line = ("        if (step, sampler.rank) == (1, 1):\n"
            "            signal.raise_signal(signal.SIGTERM)\n")
    copy = edited(tmp_path / "copies", "fsdp.py", (IMPORT, f"\nimport signal\n{IMPORT}"),
                  ("        run.after_step", line + "        run.after_step"))
    found = once(copy, 2, f"{OPTIONS} --save-every 9")
    assert len(found.curve()) == 2 and (found.out / "step-00000002").exists()
    assert "stopped after step 2 of 3, saved" in found.output


@pytest.mark.parametrize("script, world", sampled(
    [("ddp.py", 2), ("zero.py", 2), ("fsdp.py", 2), ("tp.py", 2)], [("fsdp.py", 2)]))
def test_weights_alone_begin_another_run(once, tmp_path, script, world):
    """With other data, batches and lengths, more tokens, and a head that is drawn again."""
    start = once("single.py", 0, OPTIONS)
    dcp_to_torch_save(start.out / "step-00000003", tmp_path / "out.pt")
    begin = recipe("or tokens, from these weights**").replace("out.pt", f"{tmp_path}/out.pt")
    edits = [("    # Optimizer\n", f"{begin}\n    # Optimizer\n"),
             (IMPORT, f"{IMPORT}from torch.distributed.checkpoint.state_dict import "
              "StateDictOptions, set_model_state_dict\n")]
    options = f"{OPTIONS} --seq-len 16 --batch-size 8 --vocab-size"
    curves = []
    for name, n in ("single.py", 0), (script, world):
        copy = edited(tmp_path / "copies", name, *edits)
        curves.append(once(copy, n, f"{options} 300").curve())
    assert furthest(*curves) < 1e-10
    afresh = once("single.py", 0, f"{options} 300").curve()
    assert curves[0][0][0] < afresh[0][0] - 0.02  # what was learnt is there


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


OPTIMIZERS = [getattr(torch.optim, name) for name in (
    "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop").split()]


@pytest.mark.parametrize("make, dtype", [
    *((make, torch.float32) for make in OPTIMIZERS),
    (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.float32),
    (functools.partial(Scattered, lr=0.1), torch.float32),
    (functools.partial(Scattered, lr=0.1), torch.bfloat16),
    (functools.partial(torch.optim.Adam, lr=0.1), torch.bfloat16),
])
def test_an_optimizer_resumes_in_the_same_bits(tmp_path, make, dtype):
    whole = train(tmp_path / "whole", make, 6, dtype)
    train(tmp_path / "again", make, 3, dtype)
    resumed = train(tmp_path / "again", make, 6, dtype)
    assert all(map(torch.equal, whole, resumed))


def test_settings_of_a_group_may_change(tmp_path):
    """On a resume: what the script gives is not forced back."""
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    train(tmp_path, functools.partial(Scattered, lr=0.1), 1)
    model = network()
    optimizer = Scattered(model.parameters(), lr=0.5)
    run_of(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["k"] == 1
    train(tmp_path / "sgd", functools.partial(sgd, lr=0.1), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    run_of(tmp_path / "sgd", model, optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_a_state_that_a_checkpoint_cannot_hold_is_refused(tmp_path):
    """In the first step, not at the first save."""
    with pytest.raises(SettingError, match="past.* of the optimizer cannot be saved: .* not JSON"):
        train(tmp_path, functools.partial(Listing, lr=0.1), 2)


def test_a_parameter_without_gradient_in_the_first_step(tmp_path, capsys):
    """Of some it is said, of all it is refused: the loss does not reach them."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].requires_grad_(False)  # frozen

    def change(step):
        model[2](torch.ones(6)).sum().backward()
        model[2].bias.grad = None
        optimizer.step()

    train_steps(run_of(tmp_path, model, optimizer), 2, change)
    said = capsys.readouterr().out
    assert re.findall("no gradient in the first step: (.*)", said) == ["2.bias"]
    with pytest.raises(SettingError, match="no gradient in the first step: 0.weight, .*; does the"):
        for module in model:
            module.zero_grad()
        model.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train_steps(run_of(tmp_path / "none", model, optimizer), 1, lambda step: optimizer.step())


def test_zero_with_muon(once, tmp_path):
    """Of examples/fsdp_muon.py, beside torch's."""
    curves = []
    for script, world, new in (
        ("single.py", 0, "torch.optim.Muon(matrices, args.lr, args.weight_decay, "
                         "adjust_lr_fn='match_rms_adamw')"),
        ("zero.py", 2, "muon_of_the_example()(matrices, mesh.get_group(), args.lr, "
                       "args.weight_decay)"),
    ):
        edits = optimizers(f"[{new}, torch.optim.AdamW(decay_groups(rest, args.weight_decay), "
                           f"args.lr, args.betas, fused=True)]")
        edits += [("    # Optimizer\n", MATRICES),
                  (IMPORT, f"{IMPORT}from tests.support.brought import muon_of_the_example\n")]
        copy = edited(tmp_path / "copies", script, *edits)
        curves.append(once(copy, world, OPTIONS, inject="unrounded_muon()").curve())
    assert furthest(*curves) < 1e-10


# Functions of the scripts, with other models


class Energy(nn.Module):
    """An energy, and its gradient by the positions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = x.requires_grad_()
        energy = self.last(torch.tanh(self.first(x))).sum(-1)
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]

    def encode(self, x):
        return self.first(x)


def energy_and_data():
    torch.manual_seed(0)
    return Energy().double(), torch.randn(8, 3).double(), torch.randn(8, 3).double()


def loss_of(model, x, forces):
    energy, found = model(x)
    return energy.square().mean() + (found - forces).square().mean()


def whole_gradients(model):
    gradients = {}
    for name, p in model.named_parameters():
        gradients[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    return gradients


@on_ranks(2)
def test_gradients_of_gradients(mesh, rank, folder):
    """A part of the loss is a gradient. Exact if no unit of FSDP is below the module that calls
    autograd.grad; otherwise torch says so, or, if parameters stay gathered, Run does."""
    one, x, forces = energy_and_data()
    loss_of(one, x.clone(), forces).backward()
    x, forces = x.chunk(2)[rank], forces.chunk(2)[rank]
    for units_of in None, lambda model: [], lambda model: [[model]]:
        model = nn.Sequential(energy_and_data()[0])
        if units_of is None:
            called = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            called = model
            fsdp.shard(model, units_of(model[0]), mesh)
        loss_of(called, x.clone(), forces).backward()
        found = whole_gradients(model[0])
        for name, gradient in whole_gradients(one).items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-15)
    for reshard in True, False:
        model = energy_and_data()[0]
        fsdp.shard(model, [[model.first], [model.last]], mesh, reshard_after_forward=reshard)
        model.set_reshard_after_backward(reshard)
        if reshard:
            with pytest.raises(RuntimeError, match="storage of size 0"):
                loss_of(model, x.clone(), forces).backward()
            continue
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = run_of(folder, model, optimizer)
        loss_of(model, x.clone(), forces).backward()
        with pytest.raises(SettingError, match="no gradient in the first step: first.weight, .*;"):
            train_steps(run, 1, lambda step: optimizer.step())


@on_ranks(2)
def test_calls_before_and_beside_the_forward_pass(mesh):
    """Another method than forward; inference before training."""
    one, x, forces = energy_and_data()
    model = energy_and_data()[0]
    fsdp.shard(model, [], mesh)
    with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
        model.encode(x)
    register_fsdp_forward_method(model, "encode")
    torch.testing.assert_close(model.encode(x), one.encode(x))
    for mode, ends in (torch.no_grad(), contextlib.nullcontext()), (
            torch.inference_mode(), pytest.raises(RuntimeError, match="nference tensor")):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
        fsdp.shard(model, [[model[0]]], mesh)
        with mode:
            model(x)
        with ends:
            model(x).sum().backward()


@on_ranks(2)
def test_weights_that_a_forward_pass_changes_are_refused(folder):
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0))
    with pytest.raises(SettingError, match=r"nn.Embedding\(max_norm=\) changes its weights"):
        run_of(folder, model, torch.optim.SGD(model.parameters(), 0.1))


@on_ranks(2)
def test_a_loss_that_is_a_dtensor_is_refused(folder, mesh):
    """As the square of sharded weights is."""
    model = network()
    fsdp.shard(model, [], mesh)
    run = run_of(folder, model, torch.optim.SGD(model.parameters(), 0.1))
    loss = sum(p.square().sum() for p in model.parameters()).detach()
    with pytest.raises(AssertionError):  # of torch, without words: see docs/when-it-fails.md
        torch.tensor(1.0).add_(loss)
    with pytest.raises(SettingError, match="the loss is a DTensor, and after_step takes a rank's"):
        for step, _ in run.steps([(0, None)]):
            run.after_step(step, loss, 1.0)


@on_ranks(2)
def test_numbers_of_a_part_are_refused(folder, rank):
    """An optimizer that measures the weights, of which each rank has other ones: in step 1."""
    model = network()
    optimizer = Scattered(model.parameters(), 0.1)
    run = run_of(folder, model, optimizer, "--save-every 5")

    def change(step):
        optimizer.param_groups[0]["d"] += 1 + rank

    words = "numbers has other values on another rank.* needs them whole"
    with pytest.raises(SettingError, match=words):
        train_steps(run, 1, change)


def test_a_full_disk_is_called_that(tmp_path):
    """torch's writer may say something else: on a real one 12 of 48 saves did."""
    said = OSError("[enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598")
    with (mock.patch("common.run.start_save", side_effect=said),
          pytest.raises(SettingError, match=f"in {tmp_path}: no space left on device")):
        train_steps(run_of(tmp_path, network()), 1)


def test_draws_in_the_loop_are_functions_of_the_step():
    """Of torch, numpy.random and random, as those of a sample are: the same after a resume."""
    def draws(*numbers):
        seed_step(*numbers)
        return torch.rand(()).item(), np.random.rand(), random.random()

    first, *others = draws(0, 3, 1), draws(0, 4, 1), draws(0, 3, 0), draws(1, 3, 1)
    assert draws(0, 3, 1) == first
    for other in others:
        assert all(a != b for a, b in zip(first, other))


@on_ranks(2)
def test_hooks_on_gradients_are_refused(mesh):
    """FSDP would not call them; DDP does."""
    for early in True, False:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with pytest.raises(SettingError, match="never calls a hook on a gradient.* p.grad"):
            if early:
                model[1].weight.register_hook(lambda gradient: gradient / 2)
            fsdp.shard(model, [[model[0]]], mesh)
            model[1].weight.register_hook(lambda gradient: gradient / 2)
            model(torch.ones(2, 3))


class Codebook(nn.Module):
    """It subtracts a running mean of what it has seen, in training. ``whole``: of all ranks."""

    def __init__(self, whole):
        super().__init__()
        self.linear, self.whole = nn.Linear(3, 3), whole
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        x = self.linear(x)
        sums = torch.cat((x.detach().sum(0), torch.tensor([float(len(x))])))
        if self.whole:
            dist.all_reduce(sums)
        self.mean.lerp_(sums[:3] / sums[3], 0.1)
        return x - self.mean


@on_ranks(2)
def test_buffers_that_a_forward_pass_changes(mesh, rank, folder):
    """They must be the same on all ranks, but for those of BatchNorm."""
    found, data = [], torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for kind, whole, x in ("one", False, data), ("part", False, data.chunk(2)[rank]), (
            "ddp", True, data.chunk(2)[rank]), ("fsdp", True, data.chunk(2)[rank]):
        torch.manual_seed(0)
        model = Codebook(whole).double()
        called = model
        if kind == "ddp":
            called = DistributedDataParallel(model)
        elif kind == "fsdp":
            fsdp.shard(model, [], mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = run_of(folder / kind, model, optimizer)

        def change(step):
            called(x.double()).square().mean().backward()
            if kind == "part":
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= 2
            optimizer.step()
            optimizer.zero_grad()

        if kind == "part":
            with pytest.raises(SettingError, match="model.mean has other values.*all_reduce"):
                train_steps(run, 2, change)
            continue
        train_steps(run, 2, change)
        found.append(model.mean)
    for mean in found[1:]:
        torch.testing.assert_close(mean, found[0])


@on_ranks(2)
def test_a_unit_of_several_types(mesh):
    """With the words of docs/when-it-fails.md."""
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    fsdp.shard(mixed, [], mesh)
    with pytest.raises(AssertionError, match="expects uniform original parameter dtype"):
        mixed(torch.ones(2, 3))
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    fsdp.shard(mixed, [[mixed[0]], [mixed[1]]], mesh)
    mixed[1](mixed[0](torch.ones(2, 3)).double()).sum().backward()


class Shifted(nn.Linear):
    """A linear layer on x plus a buffer of one's own."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return super().forward(x + self.shift)


class ShiftedNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return super().forward(x + self.shift)


@on_ranks(2)
def test_a_float32_buffer_meets_bfloat16(mesh):
    """With the words of docs/when-it-fails.md."""
    def loss(layer):
        model = nn.Sequential(layer)
        fsdp.shard(model, [[layer]], mesh, dtype=torch.bfloat16)
        return model(torch.ones(2, 3)).sum()

    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype"):
        loss(Shifted())
    with pytest.raises(RuntimeError, match="mixed dtype"):
        loss(ShiftedNorm())
    with mock.patch.object(Shifted, "forward", lambda layer, x: (
            nn.Linear.forward(layer, x + layer.shift.to(x.dtype)))):
        loss(Shifted()).backward()


def test_heads_may_be_repeated():
    """So that tensor parallelism divides them: the same outputs."""
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    few = Transformer(ModelConfig(**sizes, num_attention_heads=6, num_key_value_heads=2))
    many = Transformer(ModelConfig(**sizes, num_attention_heads=6, num_key_value_heads=6))
    weights = few.state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = weight.unflatten(0, (2, 8))
            weights[name] = heads.repeat_interleave(3, dim=0).flatten(0, 1)
    many.load_state_dict(weights)
    tokens = torch.arange(64).view(2, 32)
    torch.testing.assert_close(many(tokens), few(tokens))
