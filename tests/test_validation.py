"""--val-data: what is evaluated and when, and that it is no part of training. That it is the same
number everywhere: test_same_run.py."""

import time

import pytest
import torch
from torch import nn

from tests.support.words import refused
from tests.test_checkpoint import run_of, train


class Model(nn.Module):
    """Its loss is the sum of the inputs."""

    def __init__(self):
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(1), nn.BatchNorm1d(1).eval()
        self.weight, self.first = nn.Parameter(torch.ones(())), []

    def forward(self, inputs, targets):
        assert not (self.training or self.norm.training or torch.is_grad_enabled())
        self.first += inputs[:, 0].tolist()
        return inputs.double().sum()


def samples(number):
    """Each has four numbers in a row."""
    return [(torch.arange(i, i + 4), torch.ones(4)) for i in range(1, 1 + 4 * number, 4)]


def evaluating(folder, held_out, options="", **more):
    """A Run and its model."""
    model = Model()
    return run_of(folder, model, options=f"--batch-size 8 --val-data x --val-every 3 {options}",
                  held_out=held_out, **more), model


def test_what_it_evaluates(tmp_path):
    """Whole batches of 31 samples, each sample once, the same ones in each evaluation and with any
    seed and micro-batches, in eval mode; and training does not notice it."""
    random_state = torch.get_rng_state()
    run, model = evaluating(tmp_path, samples(31))
    found = [run.validation_loss() for _ in range(2)]
    first = model.first[:24]
    assert model.first == 2 * first and len({*first}) == 24
    assert found == [pytest.approx(sum(first) / 24 + 1.5, rel=1e-12)] * 2
    assert model.training and model.norm.training and not model.frozen.training
    assert torch.equal(torch.get_rng_state(), random_state)
    other, of_other = evaluating(
        tmp_path, samples(31), "--seed 5 --grad-accum 2 --val-batches 2 --workers 1")
    other.validation_loss()
    assert of_other.first == first[:16]
    for held_out, options, words in (
        (samples(31), {"loss_of": lambda batch: (0, 0)}, "no held-out sample has a target"),
        (samples(7), {}, "less than one batch of --batch-size 8: give more data"),
        ([], {}, "held-out data .--val-data. has 0 samples, less than one batch"),
        (None, {}, "--val-data: this script gives Run no held-out data"),
    ):
        with refused(words):
            evaluating(tmp_path, held_out, **options)[0].validation_loss()


def test_own_data_needs_no_option(tmp_path):
    run = run_of(tmp_path, Model(), options="--batch-size 8 --steps 1", held_out=samples(8))
    train(run, 1)
    assert "val_loss" in run.history[-1]


def test_when_it_is_due(tmp_path):
    """Every 3 steps and after the last; its time counts as no training, nor does that of a save."""
    run, _ = evaluating(tmp_path, samples(8), "--steps 7 --save-every 3 --log-every 1",
                        after_evaluation=lambda: time.sleep(0.2))
    train(run, 7)
    assert [record["step"] for record in run.history if "val_loss" in record] == [3, 6, 7]
    rates = [record["tokens_per_second"] for record in run.history if "loss" in record]
    assert len(rates) == 7 and min(rates) > 8 * 128 / 0.2
