"""examples/diloco.py: its reference is one process that runs the replicas in turn. And its
checkpoints."""

import argparse
import shutil

import pytest
import torch

import single
from common.data import BatchSampler
from common.errors import SettingError
from common.materialise import materialise
from common.model import ModelConfig, Transformer
from common.step import decay_groups, set_learning_rate
from common.tokens import TokenDataset
from tests.support import inject
from tests.support.processes import Result
from tests.test_checkpoint import assert_bit_equal, tensors
from tests.test_same_run import assert_near, furthest
from tools.huggingface.export import export

T, B, STEPS, H, R, SEED = 24, 16, 8, 3, 2, 4
MODEL = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 2 --num-attention-heads 4 "
         f"--num-key-value-heads 2 --seq-len {T} --batch-size {B} --dtype float64")
OPTIONS = f"{MODEL} --steps {STEPS} --log-every 1 --warmup-steps 3 --lr 0.01 --seed {SEED}"
# Steps 4 and 8 are between two meetings.
WHOLE = (f"{OPTIONS} --save-every 4 --grad-accum 2 --no-reshard-after-forward --val-data {{val}} "
         "--val-every 4 --val-batches 1")
COMMAND = f"examples/diloco.py --replicas {R} --inner-steps {H}"


@pytest.fixture
def whole(once):
    """A run of two replicas, each on two ranks. It also resumes its checkpoint of step 4."""
    return once(COMMAND, 4, WHOLE, inject="ignored(); resumed([], step=4)")


def make_model():
    with torch.device("meta"):
        model = Transformer(ModelConfig(256, 32, 48, 2, 4, 2)).double()
    materialise(model, torch.device("cpu"), SEED)
    return model


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
    shares = [iter(BatchSampler(len(dataset), B, seed=SEED, stop=STEPS, rank=i, world_size=R))
              for i in range(R)]
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
    of_all = zip(*(sums(model, held, iter(BatchSampler(len(held), B, rank=i, world_size=R)))
                   for i, model in enumerate(models)))
    expected = torch.div(*map(sum, of_all)).item()
    assert furthest(whole.curve("step", "val_loss")[-1:], [[STEPS, expected]]) < 1e-10
    saved = tensors(whole.out)
    expected = {f"model.{name}": value for name, value in common.items()} | {
        f"optimizer.{name}.momentum_buffer": value for name, value in momentum.items()
    } | {
        f"model.replica{i}.{name}": p.detach() for i, model in enumerate(models)
        for name, p in model.named_parameters()
    }
    assert_near({name: saved[name] for name in expected}, expected)
    assert not torch.equal(saved["model.replica0.lm_head.weight"],
                           saved["model.replica1.lm_head.weight"])


# Checkpoints


def test_a_run_resumes_between_two_meetings(whole):
    """Bit for bit the same weights in the same replicas. The bytes."""
    again = Result([0], "", whole.out / "again-0")
    assert_bit_equal(tensors(again.out), tensors(whole.out))
    assert again.curve() == whole.curve()[4:]
    assert again.curve("step", "val_loss")[1:] == whole.curve("step", "val_loss")[1:]  # step 8
    holds_and_sends(whole, 4, met=1)


def test_it_resumes_on_another_number_of_ranks(run, whole, corpus, held_out, tmp_path):
    shutil.copytree(whole.out, tmp_path / "again", ignore=lambda *_: ["step-00000008"])
    found = run(COMMAND, 2, f"{WHOLE} --data {corpus}".format(val=held_out), inject="ignored()",
                out="again")
    assert "resuming after step 4" in found.output
    assert furthest(found.curve(), whole.curve()) < 1e-10
    assert_near(tensors(found.out), tensors(whole.out))
    holds_and_sends(found, 2, met=0)


def test_the_common_weights_are_exported(run, whole, corpus, tmp_path):
    """Also between two meetings. A new run starts from them: with a rate of 0 they stay."""
    export(whole.out / "step-00000004", tmp_path / "exported")
    safetensors = pytest.importorskip("safetensors.torch")
    found = safetensors.load_file(tmp_path / "exported" / "model.safetensors")
    expected = tensors(whole.out, 4)
    assert len(found) == 21
    assert all(torch.equal(found[name], expected[f"model.{name}"]) for name in found)
    new = run(COMMAND, 2, f"{OPTIONS} --steps 3 --lr 0 --from-pretrained exported --data {corpus}")
    saved = tensors(new.out, 3)
    for prefix in ("model", "model.replica0", "model.replica1"):
        assert all(torch.equal(found[name], saved[f"{prefix}.{name}"]) for name in found)


def test_others_refuse_it(whole, corpus, monkeypatch):
    monkeypatch.setattr(TokenDataset, "__getitem__", TokenDataset.__getitem__)  # undone at the end
    inject.ignored()
    with pytest.raises(SettingError, match="--replicas is 2 in .*and None in this run"):
        single.main(f"{OPTIONS} --steps 9 --data {corpus} --out {whole.out}".split())


def holds_and_sends(result, n, met):
    """What the theory says, and the norm: a number for each of 21 tensors. The momentum is held
    from the start. The counted step ends in a meeting, if the run has one that late."""
    summary, s = result.summary, n // R
    theory = {kind: entry["bytes"] for kind, entry in summary["theory"].items()}
    held = {kind: summary["held"][kind.replace("_", " ")] for kind in theory if kind != "sent"}
    P = sum(p.nbytes for p in make_model().parameters())
    assert held["parameters"] == theory["parameters"] == 2 * P / s
    assert held["gradients"] == theory["gradients"] == P / s
    assert held["optimizer_states"] == theory["optimizer_states"] + 4 * 21 == 3 * P / s + 84
    norm = 2 * 8 * 21 * (s - 1) / s
    assert summary["sent"] == pytest.approx(theory["sent"] + norm, abs=1)
    between = [(part["collective"], part["calls"], part["bytes"])
               for part in summary["collectives"] if part["group"] == "replica"]
    assert between == [("all-reduce", 21, 2 * P / s * (R - 1) / R)] * met
