"""examples/fsdp_muon.py trains what torch.optim.Muon would train in one process without rounding to
bfloat16, and sends what its docstring says."""

import pytest
import torch

from common.data import BatchSampler
from common.materialise import materialise
from common.model import Transformer
from common.options import option_parser, parse_options
from common.step import decay_groups, set_learning_rate
from common.tokens import TokenDataset
from examples.fsdp_muon import newton_schulz, share_out
from tests.support.sample import sampled
from tests.test_same_run import furthest

SCRIPT = "examples/fsdp_muon.py"
OPTIONS = ("--batch-size 24 --seq-len 24 --steps 6 --lr 0.02 --warmup-steps 2 --hidden-size 32 "
           "--intermediate-size 48 --num-attention-heads 8 --num-hidden-layers")


@pytest.fixture
def muon(run, corpus):
    """Run the example: ``muon(world, options)``. Evaluations between the steps change nothing."""

    def muon(world, options="", layers=2):
        data = f"--data {corpus} --val-data {corpus} --val-every 2 --val-batches 1"
        return run(f"{SCRIPT} {data} {OPTIONS} {layers} --dtype float64 --log-every 1 {options}",
                   world)

    return muon


def plain_curve(corpus, monkeypatch, options):
    """The losses and norms of a loop in one process, with torch's Muon, which would compute in
    bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    to = torch.Tensor.to  # 2.15 converts by it, 2.13 by ``bfloat16``
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **kwargs: (
        tensor.clone() if kwargs.get("dtype") == torch.bfloat16 else to(tensor, *args, **kwargs)))
    args = parse_options(option_parser(""), f"{OPTIONS} {options}".split())
    with torch.device("meta"):
        model = Transformer(args.config).double()
    materialise(model, "cpu", args.seed)
    matrices, rest = ([p for name, p in model.named_parameters() if ("_proj." in name) == within]
                      for within in (True, False))
    optimizers = [
        torch.optim.Muon(matrices, args.lr, args.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(decay_groups(rest, args.weight_decay), args.lr, args.betas),
    ]
    dataset, curve = TokenDataset(corpus, args.seq_len), []
    for step, rows in enumerate(BatchSampler(len(dataset), 24, stop=args.steps)):
        set_learning_rate(optimizers, step, args)
        inputs, targets = map(torch.stack, zip(*(dataset[row] for row in rows)))
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        curve.append([loss.item(), norm.item()])
    return curve


@pytest.mark.parametrize("world, layers, more", sampled([
    (2, "2", "--grad-accum 3"), (3, "2", ""), (4, "2", "--replicate 2"),
    (8, "1 --num-key-value-heads 1", ""),  # a rank owns no matrix; some have no rows of one
], [(3, "2", "")]))
def test_follows_one_process(muon, corpus, monkeypatch, world, layers, more):
    """It resumes too: test_examples.py."""
    expected = plain_curve(corpus, monkeypatch, layers)
    assert expected[0][0] - expected[-1][0] > 0.5
    assert furthest(muon(world, more, layers).curve(), expected) < 1e-10


@pytest.mark.parametrize("world, more", sampled(
    [(2, ""), (2, "--grad-accum 2 --dtype bfloat16"), (4, ""), (4, "--replicate 2")], [(2, "")]
))
def test_bytes_and_collectives(muon, world, more):
    """Beside the formulas. On top come AdamW's count of steps, and the norm for clipping, a number
    per tensor. Before the counted step nothing is evaluated: see ``reshard`` on torch 2.11."""
    layers = 4  # of which 4 ranks own equally much
    summary = muon(world, f"--save-every 0 --val-every 9 {more}", layers).summary
    theory = {kind: size["bytes"] for kind, size in summary["theory"].items()}
    held = {kind: summary["held"][kind.replace("_", " ")] for kind in theory if kind != "sent"}
    held["optimizer_states"] -= 4 * (2 * layers + 3)
    assert held == {kind: theory[kind] for kind in held} and min(held.values()) > 0
    size, n = 4 if "bfloat16" in more else 8, 2 if "--replicate" in more else world
    norms = 2 * (9 * layers + 3) * size * (n - 1) / n
    assert summary["sent"] - theory["sent"] == pytest.approx(norms, abs=1)
    (exchanged,) = [c for c in summary["collectives"] if c["collective"] == "all-to-all"]
    assert exchanged["calls"] == 2
    M = size * layers * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)  # 4 of 8 heads have keys
    assert exchanged["bytes"] == 2 * M / n * (n - 1) / n


def test_owners_have_about_equally_much():
    sizes = [4096, 1024, 1024, 4096, 11264, 11264, 11264] * 32
    for n in (1, 3, 8, 64):
        owned = share_out(sizes, n)
        assert sorted(i for indices in owned for i in indices) == list(range(len(sizes)))
        loads = [sum(sizes[i] for i in indices) for indices in owned]
        assert max(loads) <= sum(sizes) / n * 1.06
    assert share_out([5, 7], 3) == [[1], [0], []]


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_newton_schulz(shape):
    """It keeps the singular vectors, and brings the singular values close to 1."""
    torch.manual_seed(0)
    X = torch.randn(shape, dtype=torch.float64)
    U, _, V = torch.linalg.svd(X, full_matrices=False)
    found = newton_schulz(X)
    values = U.mT @ found @ V.mT
    assert found.dtype == torch.float64 and found.shape == shape
    assert (values - values.diag().diag()).abs().max() < 1e-12
    assert 0.6 < values.diag().min() <= values.diag().max() < 1.3
