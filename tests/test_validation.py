"""--val-data: what is evaluated and when, and that it is no part of training. That it is the same
number everywhere: test_same_run.py."""

import argparse
import multiprocessing

import pytest
import torch
from torch import nn

from common.services import report
from common.data import BatchSampler
from common.errors import SettingError
from common.services.validation import Validation
from tests.support.processes import SMALL, Result
from tests.support.sample import sampled


def test_resume_with_other_held_out_data(run, corpus, held_out):
    options = (f"{SMALL} --data {corpus} --steps 6 --save-every 2 --keep 9 --val-every 2 "
               "--log-every 1")
    first = run("single.py", 0, f"{options} --val-data {held_out}")
    lines, in_float32 = first.curve("step", "val_loss"), first.curve("loss")[2][0]
    assert [step for step, _ in lines] == [2, 4, 6]
    again = run("single.py", 0, f"{options} --val-data {held_out} --from {first.out}/step-00000004",
                out="again")
    assert again.curve("step", "val_loss") == lines[2:]  # step 4 is not evaluated again
    other = run("single.py", 0, f"{options} --val-data {corpus} --from {first.out}/step-00000002 "
                "--val-every 3 --dtype bfloat16 --log-every 5", out="other")
    assert [step for step, _ in other.curve("step", "loss")] == [3, 5, 6]
    for changed in ("the hash of some samples in --val-data was ", "--dtype was float32"):
        assert changed in other.output
    assert 0 < abs(other.curve("loss")[0][0] - in_float32) < 0.05
    found = other.curve("step", "val_loss")
    assert [step for step, _ in found] == [3, 6] and found[-1] != lines[-1]


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
        self.weight, self.modes = nn.Parameter(torch.ones(())), []

    def forward(self, inputs, targets):
        self.modes.append((self.training, self.norm.training, self.frozen.training))
        assert not (inputs * self.weight).requires_grad
        return inputs[targets != -100].sum()


def evaluation(size, grad_accum=1, seed=0, rank=0, ranks=1, **kwargs):
    sampler = BatchSampler(50, 8, grad_accum, seed=seed, stop=7, rank=rank, world_size=ranks)
    dataset = Numbers(size)
    return Validation(dataset, sampler, torch.device("cpu"), **kwargs), dataset


def test_what_it_evaluates():
    model = Model()
    random_state = torch.get_rng_state()
    validation, dataset = evaluation(size=31, batches=10)
    first = dataset.read[:]  # before training, for the errors of samples
    found = [validation.loss(model) for _ in range(3)]
    assert dataset.read == 4 * first and len(set(first)) == 24  # of 31: whole batches
    counted = [index for index in first if index % 5 <= 2]
    assert found == [pytest.approx(sum(counted) / len(counted), rel=1e-6)] * 3
    assert model.modes == 9 * [(False, False, False)]
    assert model.training and model.norm.training and not model.frozen.training
    assert torch.equal(torch.get_rng_state(), random_state)

    # The same samples with another seed, micro-batches and ranks, but fewer batches
    reads = []
    for rank in range(2):
        other, dataset = evaluation(31, grad_accum=2, seed=5, rank=rank, ranks=2, batches=2)
        dataset.read.clear()
        other.loss(model)
        reads += dataset.read
    assert sorted(reads) == sorted(first[:16])
    part, _ = evaluation(31)
    expected = sum(sum(first[i : i + 3]) for i in (0, 8, 16)) / 9
    assert part.loss(model, lambda batch: (batch[0][:3].sum(), 3)) == pytest.approx(expected)
    with pytest.raises(SettingError, match="no held-out sample has a target"):
        part.loss(model, lambda batch: (0, 0))

    # Last: after a failure the workers would live as long as the traceback
    with_workers, _ = evaluation(31, workers=2)
    assert [with_workers.loss(model) for _ in range(3)] == found
    assert len(multiprocessing.active_children()) == 2


def test_when_it_is_due():
    validation, _ = evaluation(31, every=3)
    assert [step + 1 for step in range(7) if validation.due(step)] == [3, 6, 7]
    none = Validation(None, BatchSampler(9, 1, stop=7), torch.device("cpu"), 1, 1)
    assert not any(none.due(step) for step in range(7))
    with pytest.raises(SettingError, match="less than one batch of --batch-size 8: give more"):
        evaluation(7)
    assert evaluation(8, workers=1)[0].number == 1


def test_its_time_does_not_count(tmp_path, monkeypatch):
    """A step takes 1 second, each of the first three 10, an evaluation 50, by the clock that the
    report reads. It waits for a GPU's queue in what is logged, in the steps of the warm-up, and
    before evaluations and saves; for a thread of gloo in one step."""
    now, waits, sleeps = [0.0], set(), []
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(report.time, "sleep", sleeps.append)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    args = argparse.Namespace(steps=8, log_every=4, out=tmp_path, compute_dtype=torch.float32,
                              count=True, profile=False, val_data="held out", val_every=6,
                              save_every=5)
    reported = report.Report(args, model, optimizer, [], torch.device("cpu"), units=10)
    reported.synchronize = lambda: waits.add(reported.done)
    for step, _ in reported.steps((step, None) for step in range(8)):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        torch.ones(1 if step < 4 else 10**6)  # one of the first steps is counted
        now[0] += 1 if step > 2 else 10
        reported.log(step, 1.5, 0.5)
        if step % 2:
            now[0] += 50
            reported.log_validation(step, 2.5)
            assert "loss 1.500, val loss 2.500, grad norm 0.500" in reported.bar.postfix
    assert waits == {0, 1, 2, 3, 4, 5, 6, 8} and len(sleeps) == 1
    history = reported.close()
    rates = [record["tokens_per_second"] for record in history if "loss" in record]
    assert rates == pytest.approx([1, 30 / 21, 10])
    result = Result([0], "", tmp_path)
    assert result.history == history
    assert result.curve("step", "val_loss") == [[step, 2.5] for step in (2, 4, 6, 8)]
    summary = result.summary
    assert summary["tokens_per_second"] == 10
    assert summary["loss"] == 1.5 and summary["val_loss"] == 2.5
    assert summary["peak"]["activations"] < 1000
    (tmp_path / "summary.json").unlink()
    reported.rank = 1
    reported.loggers.append(sleeps.append)
    reported.write(8, {})
    assert len(sleeps) == 1
    assert reported.close() == history and not (tmp_path / "summary.json").exists()


# A step that is trained is saved


@pytest.mark.parametrize("command, world, stop", sampled(
    RUNS := [("single.py", 0, 4), ("ddp.py", 2, 2), ("pp.py", 2, 4)], RUNS[:2]))
def test_a_step_is_saved_before_it_is_evaluated(run, once, corpus, held_out, command, world, stop):
    """The run dies while it evaluates. It goes on from that step, and only the evaluation is lost;
    also after its last step, of which it then has no summary."""
    options = (f"{SMALL} --steps 4 --log-every 1 --save-every 2 "
               "--val-data {val} --val-every 2 --val-batches 1")
    whole = once(command, world, options)
    options = f"{options} --data {corpus}".replace("{val}", held_out)
    dead = run(command, world, options, expect_ok=False, inject=(
        "before(Validation, 'loss', lambda *_, calls=[]: "
        f"calls.append(1) or len(calls) == {stop // 2} and signal_self('SIGKILL'))"))
    assert not dead.ok and dead.curve("val_loss") == whole.curve("val_loss")[: stop == 4]
    again = run(command, world, options)
    assert again.curve() == whole.curve()
    others = [line for line in whole.curve("step", "val_loss") if line[0] != stop]
    assert again.curve("step", "val_loss") == others and len(others) == 1
    assert (again.out / "summary.json").exists() == (stop < 4)
