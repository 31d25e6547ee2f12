"""examples/diloco.py: its reference is one process that runs the replicas in turn. And its
checkpoints."""

import argparse
import shutil

import pytest
import torch

from common.data import BatchSampler, TokenDataset
from common.materialise import materialise
from common.model import ModelConfig, Transformer
from common.step import decay_groups, set_learning_rate
from tests.support import inject
from tests.support.compare import assert_bit_equal, assert_near, furthest, saved
from tests.support.sample import thorough
from tools.counting import theory

pytestmark = thorough
T, B, STEPS, H, R, SEED = 24, 16, 8, 3, 2, 4
MODEL = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 2 --num-attention-heads 4 "
         f"--num-key-value-heads 2 --seq-len {T} --batch-size {B} --dtype float64")
OPTIONS = f"{MODEL} --steps {STEPS} --log-every 1 --warmup-steps 3 --lr 0.01 --seed {SEED}"
# Steps 4 and 8 are between two meetings.
WHOLE = (f"{OPTIONS} --save-every 4 --grad-accum 2 --val-data {{val}} "
         "--val-every 4 --val-batches 1")
COMMAND = f"examples/diloco.py --replicas {R} --inner-steps {H}"


@pytest.fixture
def whole(once):
    """A run of two replicas, each on two ranks. It also resumes its checkpoint of step 4."""
    return once(COMMAND, 4, WHOLE, inject="write_counts(); ignored(); resumed([], step=4)")


def make_model():
    with torch.device("meta"):
        model = Transformer(ModelConfig(256, 32, 48, 2, 4, 2)).double()
    materialise(model, torch.device("cpu"), SEED)
    return model


def share_of(replica, size, seed, steps):
    """The sample indices of a replica, step by step."""
    sampler = BatchSampler(size, B, seed=seed, stop=steps)
    sampler.rank, sampler.ranks = replica, R
    return iter(sampler)


def sums(model, dataset, share):
    """The summed loss of the next batch, and its number of targets."""
    inputs, targets = map(torch.stack, zip(*(dataset[index] for index in next(share))))
    return model(inputs, targets), (targets != -100).sum()


def test_one_process_runs_the_replicas_in_turn(whole, corpus, held_out, monkeypatch):
    """The curve, the common weights and those of each replica, and the loss of each on its part of
    the held-out text. In the samples some targets are ignored, so that the replicas have different
    numbers of them."""
    monkeypatch.setattr(TokenDataset, "__getitem__", TokenDataset.__getitem__)  # undone at the end
    inject.ignored()
    args = argparse.Namespace(lr=0.01, min_lr=0, warmup_steps=3, steps=STEPS)
    dataset, models = TokenDataset(corpus, T, "auto", 256), [make_model() for _ in range(R)]
    optimizers = [torch.optim.AdamW(decay_groups(model.parameters(), 0.1), 0.01, (0.9, 0.95))
                  for model in models]
    shares = [share_of(i, len(dataset), SEED, STEPS) for i in range(R)]
    common = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in common.items()}
    curve = []
    for step in range(STEPS):
        found = []
        for model, optimizer, share in zip(models, optimizers, shares):
            set_learning_rate(optimizer, step, args)
            loss = torch.div(*sums(model, dataset, share))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), norm.item()))
        curve.append([sum(loss for loss, _ in found) / R, found[0][1]])
        if (step + 1) % H == 0:
            for name, value in common.items():
                own = [model.get_parameter(name).detach() for model in models]
                difference = value - sum(own) / R
                momentum[name] = 0.9 * momentum[name] + difference
                value -= 0.7 * (difference + 0.9 * momentum[name])
                for weights in own:
                    weights.copy_(value)
    assert furthest(whole.curve(), curve) < 1e-10
    held = TokenDataset(held_out, T, "auto", 256)
    of_all = zip(*(sums(model, held, share_of(i, len(held), 0, 1))
                   for i, model in enumerate(models)))
    expected = torch.div(*map(sum, of_all)).item()
    assert furthest(whole.curve("step", "val_loss")[-1:], [[STEPS, expected]]) < 1e-10
    found = saved(whole, STEPS)
    expected = {f"model.{name}": value for name, value in common.items()} | {
        f"optimizer.{name}.momentum_buffer": value for name, value in momentum.items()
    } | {
        f"model.replica{i}.{name}": p.detach() for i, model in enumerate(models)
        for name, p in model.named_parameters()
    }
    assert_near({name: found[name] for name in expected}, expected)
    assert not torch.equal(found["model.replica0.lm_head.weight"],
                           found["model.replica1.lm_head.weight"])


# Checkpoints


def test_a_run_resumes_between_two_meetings(whole):
    """Bit for bit the same weights in the same replicas. The bytes."""
    again = whole.again()
    assert_bit_equal(saved(again, STEPS), saved(whole, STEPS))
    assert again.curve() == whole.curve()[4:]
    assert again.curve("step", "val_loss")[1:] == whole.curve("step", "val_loss")[1:]  # step 8
    holds_and_sends(whole, 4, met=1)


def test_it_resumes_on_another_number_of_ranks(run, whole, corpus, held_out, tmp_path):
    shutil.copytree(whole.out, tmp_path / "again", ignore=lambda *_: ["step-00000008"])
    found = run(COMMAND, 2, f"{WHOLE} --data {corpus}".format(val=held_out), out="again",
                inject="write_counts(); ignored()")
    assert "after step 4" in found.output
    assert furthest(found.curve(), whole.curve()) < 1e-10
    assert_near(saved(found, STEPS), saved(whole, STEPS))
    holds_and_sends(found, 2, met=0)


def holds_and_sends(result, n, met):
    """What fsdp.py sends within a replica. And the norm: a number for each of 21 tensors. The
    momentum is held from the start. The counted step ends in a meeting, if the run has one that
    late."""
    counts, s = result.counts(), n // R
    P = theory.bytes_of(make_model())
    assert counts["held"]["parameters"] == 2 * P / s
    assert counts["held"]["gradients"] == P / s
    assert counts["held"]["optimizer states"] == 3 * P / s + 84
    F = theory.bytes_of(make_model().model.norm, make_model().lm_head)  # gathered once
    within = (2 * (3 * P - F) + 16 + 2 * 8 * 21) * (s - 1) / s
    meeting = 2 * P / s * (R - 1) / R
    assert counts["sent"] == pytest.approx(within + meeting * met, abs=1)
    between = [(part["collective"], part["calls"], part["bytes"])
               for part in counts["collectives"] if part["group"] == "replica"]
    assert between == [("all-reduce", 21, meeting)] * met
