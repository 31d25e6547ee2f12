"""--val-data: the loss on held-out data is the same number everywhere, and changes no training."""

import json
import random

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from common import checkpoint, metrics
from common.data import BatchSampler
from common.errors import SettingError
from common.metrics import Metrics
from common.validation import Validation
from tests.sample import sampled, thorough

MODEL = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 6 --num-attention-heads 4 "
         "--num-key-value-heads 2")
OPTIONS = f"{MODEL} --seq-len 16 --batch-size 24 --steps 5 --log-every 1 --warmup-steps 2 --lr 0.01"
EXACT = f"{OPTIONS} --dtype float64"
RUNS = [
    ("single.py --grad-accum 3", 0),
    ("ddp.py --grad-accum 2", 3), ("ddp.py", 4),
    ("zero.py --stage 1", 2), ("zero.py --stage 2 --grad-accum 2", 3),
    ("fsdp.py", 2), ("fsdp.py --grad-accum 2 --no-reshard-after-forward", 3),
    ("fsdp.py --replicate 2", 4),
    ("tp.py", 2), ("tp.py --no-sequence-parallel --grad-accum 2", 2),
    ("cp.py --attention ring --grad-accum 2", 4), ("cp.py --attention ulysses", 2),
    ("cp.py --attention allgather", 2), ("cp.py", 1),
    ("pp.py --schedule gpipe --grad-accum 2", 4), ("pp.py --schedule 1f1b --microbatches 6", 3),
    ("pp.py --schedule interleaved1f1b --microbatches 6", 3),
    ("pp.py --schedule loopedbfs --stages-per-rank 3 --microbatches 3", 2),
    ("pp.py --schedule zerobubble --microbatches 8", 4), ("pp.py --schedule zerobubble", 1),
    ("pp.py --schedule zbv --microbatches 3", 4), ("pp.py --schedule zbv", 1),
    ("pp.py --schedule dualpipev --microbatches 8", 3),
    ("hybrid_3d.py --tp 2 --pp 2 --microbatches 3", 4), ("hybrid_3d.py --cp 2 --replicate 2", 4),
    ("hybrid_3d.py --dp 2 --pp 2 --grad-accum 2", 4), ("hybrid_3d.py --dp 2 --cp 2 --tp 2", 8),
    ("hybrid_3d.py --cp 2 --tp 2 --pp 2 --no-sequence-parallel", 8),
]
LIST = {command: world for command, world in RUNS}
# Those that a run without validation is compared with, one of each kind
COMPARED = (
    "single.py --grad-accum 3", "ddp.py --grad-accum 2", "zero.py --stage 1",
    "zero.py --stage 2 --grad-accum 2", "fsdp.py",
    "fsdp.py --grad-accum 2 --no-reshard-after-forward", "tp.py",
    "cp.py --attention ring --grad-accum 2", "pp.py --schedule interleaved1f1b --microbatches 6",
    "pp.py --schedule zbv --microbatches 3", "hybrid_3d.py --tp 2 --pp 2 --microbatches 3",
    "hybrid_3d.py --cp 2 --replicate 2",
)
assert all(command in LIST for command in COMPARED)
SAMPLE = [(command, LIST[command]) for command in (
    "fsdp.py", "pp.py --schedule zbv --microbatches 3",
)]


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """Text of other words than the corpus, for 4 batches of 24 samples and a little more."""
    path = tmp_path_factory.mktemp("held-out") / "text"
    words = "every box of wine needs a lazy wizard and quick foxes".split()
    path.write_text(" ".join(random.Random(0).choices(words, k=400))[: 100 * 16 + 5])
    return str(path)


@pytest.fixture(scope="module")
def reference(server, corpus, held_out, tmp_path_factory):
    """[[step, val_loss]] of single.py, by its command and options."""
    found = {}

    def curve(command, options):
        if (command, options) not in found:
            found[command, options] = server.run(
                command, 0, f"{options} --data {corpus} --val-data {held_out}",
                folder=tmp_path_factory.mktemp("reference"),
            ).curve("step", "val_loss")
        return found[command, options]

    return curve


def furthest(curve, other):
    assert [step for step, _ in curve] == [step for step, _ in other] and len(curve) > 1
    return max(abs(a - b) for (_, a), (_, b) in zip(curve, other))


@pytest.mark.parametrize("command, world", sampled(RUNS, SAMPLE))
def test_equal_in_every_script_and_no_part_of_training(
    run, reference, corpus, held_out, command, world
):
    """Samples have different numbers of ignored targets. Step 3 is counted, right after an
    evaluation, and steps 2 and 4 are saved right after one: all of it as without validation."""
    script = f"tests/odd_models.py ignored {command}"
    every = "--val-every 2 --val-batches 3"
    plain = f"{EXACT} --data {corpus} --save-every 2 --keep 3"
    result = run(script, world, f"{plain} --val-data {held_out} {every}")
    expected = reference("tests/odd_models.py ignored single.py", f"{EXACT} {every}")
    assert [step for step, _ in expected] == [2, 4, 5]
    assert furthest(result.curve("step", "val_loss"), expected) < 1e-10
    assert result.summary["val_loss"] == result.curve("val_loss")[-1][0]

    if command not in COMPARED:
        return
    without = run(script, world, plain, out="without")
    assert result.curve("step", "loss", "grad_norm") == without.curve("step", "loss", "grad_norm")
    for step in (2, 4, 5):
        found, other = (checkpoint.read(out / f"step-{step:08d}", prefix="")
                        for out in (result.out, without.out))
        assert found.keys() == other.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in other.items())
    assert without.summary["val_loss"] is None
    sharded = command.startswith(("fsdp.py", "hybrid_3d.py"))
    if sharded and not hasattr(FSDPModule, "reset_iter_state"):
        return  # torch 2.11 gathers one group too many after an evaluation
    found, other = result.summary, without.summary
    assert found["sent"] == other["sent"]
    for kind in ("parameters", "gradients", "optimizer states"):
        assert found["held"][kind] == other["held"][kind], kind


FURTHER = [
    ("single.py --workers 2", 0, EXACT, 1e-10), ("ddp.py --workers 1", 2, EXACT, 1e-10),
    ("tests/loss_in_chunks.py fsdp.py --activation-checkpointing", 2, EXACT, 1e-10),
    ("tests/loss_in_chunks.py tp.py --activation-checkpointing", 2, EXACT, 1e-10),
    ("tests/loss_in_chunks.py hybrid_3d.py --tp 2 --pp 2", 4, EXACT, 1e-10),
    ("fsdp.py --compile", 2, OPTIONS, 1e-4), ("pp.py --compile", 2, OPTIONS, 1e-4),
    ("zero.py --dtype bfloat16", 2, OPTIONS, 0.02),
    ("fsdp.py --dtype bfloat16", 2, OPTIONS, 0.02),
    ("hybrid_3d.py --tp 2 --pp 2 --dtype bfloat16", 4, OPTIONS, 0.02),
]


@thorough
@pytest.mark.parametrize("command, world, options, within", FURTHER)
def test_other_arithmetic(run, reference, corpus, held_out, command, world, options, within):
    every = "--val-every 2 --val-batches 3"
    result = run(command, world, f"{options} --data {corpus} --val-data {held_out} {every}")
    expected = reference("single.py", f"{options} {every}")
    assert furthest(result.curve("step", "val_loss"), expected) < within


@thorough
@pytest.mark.parametrize("script, world", [("single.py", 0), ("fsdp.py", 2), ("pp.py", 2)])
def test_without_dropout(run, reference, corpus, held_out, script, world):
    """Weights stay as they are drawn: so each evaluation gives what it gives without dropout."""
    frozen = f"{EXACT} --lr 0 --steps 3 --val-every 1 --val-batches 2"
    data = f"--data {corpus} --save-every 0"
    result = run(f"tests/odd_models.py dropout {script}", world,
                 f"{frozen} {data} --val-data {held_out}")
    plain = run(script, world, f"{frozen} {data}", out="plain")
    assert result.curve("loss") != plain.curve("loss")  # dropout is on in training
    expected = reference("single.py", frozen)
    assert furthest(result.curve("step", "val_loss"), expected) < 1e-10
    without = run(f"tests/odd_models.py dropout {script}", world, f"{frozen} {data}", out="without")
    assert result.curve() == without.curve()


@thorough
def test_one_more_compilation(run, corpus, held_out):
    """A compiled layer has a graph for training, and one without gradients for all evaluations."""
    options = f"{OPTIONS} --data {corpus} --compile --val-data {held_out} --val-every 2"
    assert "2 graphs" in run("tests/compiled_graphs.py", 0, options).output


@thorough
def test_resume_also_with_other_held_out_data(run, corpus, held_out):
    options = f"{EXACT} --data {corpus} --steps 6 --save-every 2 --keep 9 --val-every 2"
    first = run("single.py", 0, f"{options} --val-data {held_out}")
    lines = [(record["step"], record.get("loss"), record.get("val_loss"))
             for record in first.history]
    assert [step for step, _, loss in lines if loss] == [2, 4, 6]
    (end,) = [line for line in first.lines if line.startswith("final loss")]
    assert f" | val loss {lines[-1][2]:.4f} | " in end
    again = run("single.py", 0, f"{options} --val-data {held_out} --resume-from 2")
    assert "resuming after step 2" in again.output
    assert lines == [(record["step"], record.get("loss"), record.get("val_loss"))
                     for record in again.history]
    other = run("single.py", 0, f"{options} --val-data {corpus} --resume-from 2 --val-every 3")
    found = other.curve("step", "val_loss")
    assert [step for step, _ in found] == [2, 3, 6] and found[0][1] == lines[2][2]
    assert found[-1][1] != lines[-1][2]
    none = run("single.py", 0, f"{options} --resume-from 4")
    assert [step for step, _ in none.curve("step", "val_loss")] == [2, 3]


# In this process


class Numbers:
    """Sample i is (i, target i); the last two of each five targets are -100."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor([float(index)]), torch.tensor([-100 if index % 5 > 2 else index])


class Model(nn.Module):
    """Its loss is the sum of the inputs whose targets count."""

    def __init__(self):
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(1), nn.BatchNorm1d(1).eval()
        self.dropout, self.weight = nn.Dropout(0.5), nn.Parameter(torch.ones(()))
        self.modes = []

    def forward(self, inputs, targets):
        self.modes.append((self.training, self.norm.training, self.frozen.training))
        self.frozen(self.norm(inputs))
        kept = self.dropout(inputs * self.weight)
        assert not kept.requires_grad
        return kept[targets != -100].sum()


def evaluation(size, batch_size=8, grad_accum=1, seed=0, steps=7, rank=0, ranks=1, **kwargs):
    sampler = BatchSampler(50, batch_size, grad_accum, seed=seed, stop=steps, rank=rank,
                           world_size=ranks)
    dataset = Numbers(size)
    return Validation(dataset, sampler, torch.device("cpu"), **kwargs), dataset


def test_what_it_evaluates():
    model = Model()
    before = torch.get_rng_state(), model.norm.running_mean.clone()
    validation, dataset = evaluation(size=31, batches=10)
    dataset.read.clear()
    found = [validation.loss(model) for _ in range(3)]
    first = dataset.read[:24]
    assert dataset.read == 3 * first and len(set(first)) == 24  # of 31: whole batches
    counted = [index for index in first if index % 5 <= 2]
    assert found == [pytest.approx(sum(counted) / len(counted), rel=1e-6)] * 3
    assert model.modes == 9 * [(False, False, False)]
    assert model.training and model.norm.training and not model.frozen.training
    assert model.weight.grad is None and torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(model.norm.running_mean, before[1])

    # The same samples with another seed, micro-batches, ranks and workers, but fewer batches
    reads = []
    for rank in range(2):
        other, dataset = evaluation(31, grad_accum=2, seed=5, rank=rank, ranks=2, batches=2)
        dataset.read.clear()
        other.loss(model)
        reads += dataset.read
    assert sorted(reads) == sorted(first[:16])
    with_workers, _ = evaluation(31, workers=2)
    assert [with_workers.loss(model) for _ in range(3)] == found

    part, _ = evaluation(31)
    assert part.loss(model, lambda x, y: (x[:3].sum(), x[:3])) == pytest.approx(
        sum(sum(first[i : i + 3]) for i in (0, 8, 16)) / 9
    )
    assert part.loss(model, lambda x, y: (x[:0].sum(), y[:0])) == 0


def test_when_it_is_due():
    validation, _ = evaluation(31, every=3)
    assert [step + 1 for step in range(7) if validation.due(step)] == [3, 6, 7]
    none = Validation(None, BatchSampler(9, 1, stop=7), torch.device("cpu"), 1, 1)
    assert not any(none.due(step) for step in range(7))
    with pytest.raises(SettingError, match="less than one batch of --batch-size 8: give more"):
        evaluation(7)
    assert evaluation(8, workers=1)[0].number == 1


def test_its_time_does_not_count(tmp_path, monkeypatch):
    """A step takes 1 second, an evaluation 50, by the clock that the metrics read."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    report = Metrics(tmp_path, optimizer, [model], [], start=0, stop=8, tokens_per_step=10,
                     device=torch.device("cpu"), log_every=3)
    for step in range(8):
        report.begin_step(step)
        model(torch.ones(2)).sum().backward()
        report.after_backward(step)
        now[0] += 1
        if report.due(step):
            report.log(step, 1.5, 0.5, 0.1)
        report.end_step(step)
        if step % 2:
            with report.pause():
                now[0] += 50
            report.log_validation(step, 2.5)
            assert "loss 1.500, val loss 2.500, grad norm 0.50, 10 tokens/s" in report.bar.postfix
    history = report.close()
    assert [record["tokens_per_second"] for record in history if "loss" in record] == [10] * 4
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == history
    assert [record for record in history if "val_loss" in record] == [
        {"step": step, "val_loss": 2.5} for step in (2, 4, 6, 8)
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tokens_per_second"] == 10
    assert summary["loss"] == 1.5 and summary["val_loss"] == 2.5
