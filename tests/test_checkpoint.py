"""Promises 4 and 5, of Run alone: what a checkpoint holds, what is damaged, what another run or a
stranger has written. Whole scripts: test_run.py; each script's resume: test_same_run.py."""

import argparse
import os
import pickle
import random
import shutil
import subprocess

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.metadata import BytesStorageMetadata  # noqa: F401  for a row
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from common.checkpoint import hash_of, list_checkpoints, open_checkpoint
from common.data import BatchSampler
from common.options import SettingError
from common.run import Run
from common.step import set_learning_rate
from tests.support.compare import read
from tests.support.lifted import arguments
from tests.support.on_ranks import on_ranks
from tests.support.sample import rows
from tests.support.words import refused


def tensors(folder, step=8):
    """All tensors of a checkpoint: weights and optimizer states."""
    return read(folder / f"step-{step:08d}")


def steps(folder):
    """Of the complete checkpoints in a run folder."""
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)]


def small():
    torch.manual_seed(0)  # on each rank
    return nn.ModuleDict({"linear": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)})


def run_of(folder, model, optimizer=None, options="", dataset=range(9), **more):
    """A Run of at most 9 steps that saves each of them."""
    args = arguments(f"--batch-size 2 --steps 9 --save-every 1 --keep 9 --out {folder} {options}")
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, 0.9)
    sampler = BatchSampler(len(dataset), args.batch_size, args.grad_accum, seed=args.seed,
                           stop=args.steps)
    run = Run(args, model, optimizer, sampler, dataset, torch.device("cpu"), **more)
    sampler.start = run.resume()
    return run


def train(run, last, change=lambda step: None,
          figures=lambda step: (1.0, 1.0)):
    """Train up to step ``last``: ``change(step)`` stands for a step, counted from 1. ``figures``:
    its loss and norm."""
    for step, _ in run.steps((step, None) for step in range(run.sampler.start, last)):
        change(step + 1)
        run.after_step(step, *figures(step + 1))


# On several ranks


@on_ranks(2)
def test_an_average_of_sharded_weights(folder, mesh):
    """It is sharded as they are, and saved whole, beside them, also as views of one storage while
    training goes on. Of one number rank 1 has nothing."""
    model = nn.Module()
    model.weight, model.scale = (nn.Parameter(distribute_tensor(x, mesh, [Shard(0)]))
                                 for x in (torch.arange(5.0), torch.ones(1)))
    state = model.state_dict(keep_vars=True)
    half = model.weight.detach().to_local().div(2).repeat(2)[len(model.weight.to_local()) :]
    half = DTensor.from_local(half, mesh, [Shard(0)], shape=(5,), stride=(1,))
    train(run_of(folder, model, options="--async-save", tensors=state | {"ema": half}), 1)
    average = torch.zeros_like(model.weight).detach()
    assert run_of(folder, model, tensors=state | {"ema": average}).sampler.start == 1
    assert average.full_tensor().tolist() == [0, 0.5, 1, 1.5, 2]


@on_ranks(2)
def test_a_part_that_would_be_saved_as_the_whole_is_refused(folder, rank):
    """An average of the rows of a rank, as a plain tensor: rank 0's rows would be saved alone. A
    buffer that differs: DCP would save some ranks' running_mean, and others' running_var."""
    model, other, long = small(), torch.tensor([[1.0], [1.0 + rank]]).T, torch.zeros(9000)
    long[-2] = rank  # it looks at some numbers of a large one
    for name, tensor in {"ema": other, "bits": other > 1, "copy": nn.Parameter(other[0]),
                         "long": long}.items():
        state = model.state_dict(keep_vars=True) | {name: tensor}
        optimizer = torch.optim.SGD([x for x in state.values() if x.requires_grad])
        with refused(f"model.{name} has other values on another rank.*"
                                               f"part of each rank a DTensor"):
            train(run_of(folder, model, optimizer, tensors=state), 1)
        assert steps(folder) == []
    train(run_of(folder, model), 1)
    model.norm.running_var.fill_(1 + rank)
    with refused("norm.running_var has other values.*broadcast"):
        train(run_of(folder / "own", model), 1)


@on_ranks(2)
def test_each_rank_with_a_folder_of_its_own(folder, rank):
    with refused("is not one folder for all machines: here it has no"):
        train(run_of(folder / str(rank), small()), 1)


@on_ranks(2)
def test_each_rank_checks_a_share_of_the_files(folder, rank):
    """And all hear what one of them finds. What all hear of a signal or a disk: test_run.py."""
    train(run_of(folder, small()), 1)
    dist.barrier()
    if rank == 0:
        with open(folder / "step-00000001/SHA256SUMS", "a") as file:
            file.write("0  third\n")
    dist.barrier()
    with refused("/third is damaged or missing"):
        run_of(folder, small())


# Alone


NAMES = """model.linear.bias model.linear.weight
model.norm.bias model.norm.num_batches_tracked model.norm.running_mean model.norm.running_var
model.norm.weight
optimizer.linear.bias.exp_avg optimizer.linear.bias.exp_avg_sq optimizer.linear.bias.step
optimizer.linear.weight.exp_avg optimizer.linear.weight.exp_avg_sq optimizer.linear.weight.step
optimizer.norm.bias.exp_avg optimizer.norm.bias.exp_avg_sq optimizer.norm.bias.step
optimizer.norm.weight.exp_avg optimizer.norm.weight.exp_avg_sq optimizer.norm.weight.step"""


def test_files_of_a_checkpoint(tmp_path):
    """Each has its hash, in the form that sha256sum reads; and states have their tensor's name."""
    model = small()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    train(run_of(tmp_path, model, optimizer), 1, lambda step: optimizer.step())
    (checkpoint,) = list_checkpoints(tmp_path)
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=checkpoint, check=True)
    assert sorted(tensors(tmp_path, 1)) == NAMES.split()


def test_the_newest_is_the_one_of_the_latest_step(tmp_path):
    """Names of more than eight digits sort as numbers, not as text."""
    for step in 100_000_000, 99_999_999, 7:
        (tmp_path / f"step-{step:08d}").mkdir()
    assert steps(tmp_path) == [7, 99_999_999, 100_000_000]


def test_a_norm_in_a_step_that_is_not_logged(tmp_path):
    run = run_of(tmp_path, small(), options="--log-every 9 --save-every 3")
    with refused("at step 3 the loss is 1.0 .*: .* or a norm since the last line, is not finite"):
        train(run, 3, figures=lambda step: (1.0, torch.nan if step == 2 else 1.0))
    assert steps(tmp_path) == []


def test_what_need_not_be_finite(tmp_path):
    """Of a loss or a norm: test_run.py. The infinity of a mask is saved."""
    model = small()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    train(run_of(tmp_path, model), 1)
    assert tensors(tmp_path, 1)["model.mask"].equal(model.mask)


def test_a_resume_takes_its_own_rate(tmp_path):
    model = small()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr) for lr in (0.1, 0.7))
    arguments = argparse.Namespace(lr=0.1, min_lr=0.0, steps=9, warmup_steps=1)
    train(run_of(tmp_path, model, optimizer), 1,
          lambda step: set_learning_rate(optimizer, step, arguments))
    run_of(tmp_path, model, other)
    set_learning_rate(other, 0, arguments)
    assert other.param_groups[0]["lr"] == 0.7


def test_targets_that_are_masked(tmp_path):
    """All of them in the first step. In a later one there may be none."""
    with refused("first step has neither loss nor gradient: is"):
        train(run_of(tmp_path / "first", small()), 2, figures=lambda step: (step - 1, step - 1))
    train(run_of(tmp_path / "later", small()), 2, figures=lambda step: (2 - step, 2 - step))
    run = run_of(tmp_path / "skipped", small())  # by a recipe of docs/copying.md
    for step, _ in run.steps([(0, None)]):
        run.after_step(step, 0.0, 0.0, skipped=lambda: 1)


def test_async_saves_hold_the_step_that_they_name(tmp_path):
    """However fast the weights change, and also the last one; in order, and no more than --keep."""
    model = nn.Linear(700, 1100, bias=False)
    train(run_of(tmp_path, model, options="--async-save --keep 4"), 9,
          lambda step: nn.init.constant_(model.weight, step))
    assert steps(tmp_path) == [6, 7, 8, 9] and not list(tmp_path.glob("*.tmp"))
    for step in 6, 7, 8, 9:
        assert tensors(tmp_path, step)["model.weight"].unique().tolist() == [step]


def fewer():
    model = small()
    model.linear.bias = model.norm.running_var = None
    return model


# A model, an optimizer, samples and options; the words
@rows("make, optimizer, samples, options, words", """
small() | AdamW | range(9) | --seed 1
  | --seed is 0 in .*step-00000002 and 1 in this run: resume with the same; for a new
  run take another
small() | AdamW | range(10) | | samples in --data is 9 in .* and 10
small() | AdamW | range(1, 10) | | hash of --data is
small() | SGD | range(9) | | optimizer is AdamW in .* and SGD in this run
fewer() | AdamW | range(9) | | is of another model: see model.(linear.bias|norm.running_var)
nn.ModuleDict({**small(), "x": nn.Linear(1, 1)}) | AdamW | range(9) |
  | is of another model: see model.x
nn.ModuleDict({**small(), "linear": nn.Linear(4, 5)}) | AdamW | range(9) |
  | is of another model: see model.linear
""")
def test_a_checkpoint_of_another_run(tmp_path, make, optimizer, samples, options, words):
    first, model = small(), eval(make)
    train(run_of(tmp_path, first, torch.optim.AdamW(first.parameters())), 2)
    own = getattr(torch.optim, optimizer)(model.parameters())
    for source in "", f" --from {tmp_path}/step-00000002 --out {tmp_path}/new":
        with refused(words):
            run_of(tmp_path, model, own, options + source, eval(samples))
    assert steps(tmp_path) == [1, 2]


def test_tensors_and_optimizers_that_do_not_belong_together(tmp_path):
    model = small()
    for other, trained, words in [
        (model, model.linear, "norm.weight is trained, but by none of the"),
        (model.norm, model, "updates a tensor that is not among those to be"),
    ]:
        with refused(words):
            run_of(tmp_path, other, torch.optim.SGD(trained.parameters()))
    assert steps(tmp_path) == []


# Damage


def flipped(content, bit):
    content = bytearray(content)
    content[bit // 8] ^= 1 << bit % 8
    return content


@pytest.fixture
def checkpoint(tmp_path):
    """Of step 2; there is one of step 1 too."""
    train(run_of(tmp_path / "out", small()), 2)
    return tmp_path / "out/step-00000002"


def test_damage_is_noticed(checkpoint):
    """Any bit of any file; a file that is short, long or empty."""
    random.seed(0)
    for path in sorted(checkpoint.iterdir()):
        whole = path.read_bytes()
        bits = random.sample(range(8 * len(whole)), 60)
        for content in *(flipped(whole, bit) for bit in bits), whole[:-1], whole + b"0", b"":
            path.write_bytes(content)
            if content.split() != whole.split():  # a line may end by another character too
                with pytest.raises((SettingError, OSError)):
                    open_checkpoint(checkpoint)
        path.write_bytes(whole)
    assert open_checkpoint(checkpoint)


def test_what_to_do_about_damage(checkpoint):
    """The run does not take an older checkpoint without a word: the line says how to. A file that
    is not there is damage too."""
    out, model, words = checkpoint.parent, small(), "is damaged or missing: .*; delete the folder"
    (checkpoint / ".metadata").rename(out / "metadata")
    with refused(rf"\.metadata {words} .*step-00000002, and the same"):
        run_of(out, model)
    (out / "metadata").rename(checkpoint / ".metadata")
    (part,) = checkpoint.glob("*.distcp")
    part.write_bytes(flipped(part.read_bytes(), 4000))
    with refused(f"__0_0.distcp {words}"):
        run_of(out, model)
    run = run_of(out.with_name("new"), model, options=f"--from {out}/step-00000001")
    assert run.sampler.start == 1
    shutil.rmtree(checkpoint)
    assert run_of(out, model).sampler.start == 1


def hash_again(checkpoint):
    """Write the list of hashes of all files in a checkpoint."""
    lines = [f"{hash_of(path)}  {path.name}\n" for path in sorted(checkpoint.iterdir())
             if path.name != "SHA256SUMS"]
    (checkpoint / "SHA256SUMS").write_text("".join(lines))


# In Python. The fifth asks for an attribute of the one Enum, which lacks it.
@rows("index, words", r"""
b"cposix\nsystem\n(S'touch ran'\ntR." | asks for posix.system
b"cbuiltins\neval\n(S'1'\ntR." | asks for builtins.eval
b"ctorch.serialization\nload\n(S'x'\ntR." | asks for torch.serialization.load
b"ctorch\nSize.mro\n." | asks for torch.Size.mro
b"cbuiltins\ngetattr\n(ctorch\nSize\nS'mro'\ntR." | mro
pickle.dumps(BytesStorageMetadata()) | BytesStorageMetadata, which DCP never writes
""")
def test_an_index_runs_no_code(checkpoint, monkeypatch, index, words):
    """A stranger's, with hashes that fit."""
    monkeypatch.chdir(checkpoint)
    (checkpoint / ".metadata").write_bytes(eval(index))
    hash_again(checkpoint)
    with pytest.raises((SettingError, KeyError), match=words):
        run_of(checkpoint.parent, small())
    assert not (checkpoint / "ran").exists()


class OfPython311(pickle.Pickler):
    """Python 3.11.0 to 3.11.3 pickle a member of an Enum by getattr. DCP's index has one."""

    def reducer_override(self, x):
        if isinstance(x, _MEM_FORMAT_ENCODING):
            return getattr, (type(x), x.name)
        return NotImplemented


def test_an_index_that_another_python_has_written(checkpoint):
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    with open(checkpoint / ".metadata", "wb") as file:
        OfPython311(file).dump(metadata)
    assert b"getattr" in (checkpoint / ".metadata").read_bytes()
    hash_again(checkpoint)
    assert run_of(checkpoint.parent, small()).sampler.start == 2


def test_what_is_no_checkpoint(checkpoint, tmp_path):
    """A half one counts for nothing, and is removed."""
    out = checkpoint.parent
    for source in out, tmp_path / "nowhere", out / "step-00000007":
        with refused("is no checkpoint, or this machine does not see it: "
                                               "name one, such as runs/a/step-00000100"):
            run_of(tmp_path / "new", small(), options=f"--from {source}")
    checkpoint.rename(out / "step-00000002.tmp")
    shutil.copytree(out / "step-00000001", out / "step-00000009.tmp")
    assert run_of(out, small()).sampler.start == 1
    assert sorted(os.listdir(out)) == ["lock", "metrics.jsonl", "step-00000001"]
