"""--val-data: what is evaluated and when, and that it is no part of training. That it is the same
number everywhere: test_same_run.py."""

import argparse
import time

import pytest
import torch
from torch import nn

from common.data import BatchSampler, open_dataset, open_held_out
from common.options import SettingError
from common.run import Run
from tests.support.lifted import arguments


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


def run_of(folder, held_out, options="", has=True, **more):
    """A Run of 7 steps on bytes, with samples of 4 of them, and its model."""
    (folder / "data").write_bytes(bytes(range(1, 201)))
    (folder / "held-out").write_bytes(bytes(range(1, 2 + 4 * held_out)))
    args = arguments(f"--data {folder}/data --val-data {folder}/held-out --seq-len 4 "
                     f"--batch-size 8 --steps 7 --val-every 3 {options}")
    args.config = argparse.Namespace(vocab_size=256)
    dataset, model = open_dataset(args), Model()
    sampler = BatchSampler(len(dataset), 8, args.grad_accum, seed=args.seed, stop=7)
    run = Run(args, model, torch.optim.SGD(model.parameters()), sampler, dataset,
              torch.device("cpu"), held_out=open_held_out(args) if has else None, **more)
    return run, model


def test_what_it_evaluates(tmp_path):
    """Whole batches of 31 samples, each sample once, the same ones in each evaluation and with any
    seed and micro-batches, in eval mode; and training does not notice it."""
    random_state = torch.get_rng_state()
    run, model = run_of(tmp_path, 31)
    found = [run.validation_loss() for _ in range(2)]
    first = model.first[:24]
    assert model.first == 2 * first and len({*first}) == 24
    assert found == [pytest.approx(sum(first) / 24 + 1.5, rel=1e-12)] * 2  # of 4 bytes in a row
    assert model.training and model.norm.training and not model.frozen.training
    assert torch.equal(torch.get_rng_state(), random_state)
    other, of_other = run_of(tmp_path, 31, "--seed 5 --grad-accum 2 --val-batches 2 --workers 1")
    other.validation_loss()
    assert of_other.first == first[:16]
    for held_out, options, words in (
        (31, {"loss_of": lambda batch: (0, 0)}, "no held-out sample has a target: all are -100"),
        (7, {}, "less than one batch of --batch-size 8: give more data"),
        (31, {"has": False}, "--val-data: this script gives Run no held-out data"),
    ):
        with pytest.raises(SettingError, match=words):
            run_of(tmp_path, held_out, **options)[0].validation_loss()


def test_when_it_is_due(tmp_path):
    """Every 3 steps and after the last; its time counts as no training, nor does that of a save."""
    run, _ = run_of(tmp_path, 8, f"--out {tmp_path}/out --save-every 3 --log-every 1",
                    after_evaluation=lambda: time.sleep(0.2))
    run.resume()
    for step, _ in run.steps((step, None) for step in range(7)):
        run.after_step(step, 1.0, 1.0)
    assert [record["step"] for record in run.history if "val_loss" in record] == [3, 6, 7]
    rates = [record["tokens_per_second"] for record in run.history if "loss" in record]
    assert len(rates) == 7 and min(rates) > 8 * 4 / 0.2
