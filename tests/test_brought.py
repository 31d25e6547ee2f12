"""What people bring: an optimizer, a loop. Each row of one table - what is brought, the script, what
is right - trains as one process does and resumes in the same bits; or it is refused in words; or
docs/copying.md has the lines that the row runs."""

import copy
import functools
import re
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp
from common.options import SettingError
from tests.support.brought import Listing, Scattered
from tests.support.compare import assert_near, furthest, read
from tests.support.on_ranks import on_ranks
from tests.support.processes import ROOT, Result, edited
from tests.support.sample import sampled
from tests.test_checkpoint import run_of, steps, tensors
from tests.test_checkpoint import train as train_steps
from tests.test_porting import OPTIONS, optimizers

PAGE = (ROOT / "docs" / "copying.md").read_text()


def recipe(words):
    """The block of code below the sentence of docs/copying.md with these words."""
    found = re.findall(rf"(?s){re.escape(words)}.*?```python\n(.*?)```", PAGE)
    assert found, words
    return textwrap.dedent(found[0])


def brought(new):
    """The edits that put an optimizer of tests/support/brought.py in place of AdamW."""
    return [("\nimport torch\n", "\nimport torch\nfrom tests.support.brought import *\n"),
            *optimizers(f"[{new}(P, args.lr)]")]


ZERO_TO_MUON = []
STEP = "        optimizer.step()\n"
SKIP = [(STEP, "        ok = grad_norm.isfinite()\n        if ok:\n    " + STEP),
        ("run.after_step(step, loss, grad_norm)",
         "run.after_step(step, loss, grad_norm.nan_to_num(0.0, 0.0), skipped=lambda: int(not ok))")]
THAW = [("        seed_step(", "        model.model.layers[\"0\"].requires_grad_(step >= {})\n"
         "        seed_step(")]


def thaw(step):
    return [(before, after.replace("{}", str(step))) for before, after in THAW]


FIND = {"ddp.py": [("gradient_as_bucket_view=True",
                    "gradient_as_bucket_view=True, find_unused_parameters=True")]}
KINDS = {  # edits of all scripts, more edits of one, what is injected
    "state in many places": (brought("Scattered"), {}, ""),
    "a step that is skipped": (SKIP, {}, "gradients_times(float('inf'), 2)"),
    "thawed before the save": (thaw(1), FIND, ""),
    "thawed after the save": (thaw(2), FIND, ""),
}
PARALLEL = ("ddp.py", "zero.py", "fsdp.py", "tp.py", "pp.py", "hybrid_3d.py")
SAMPLE = [("state in many places", "fsdp.py", 2), ("a step that is skipped", "fsdp.py", 2),
          ("thawed after the save", "fsdp.py", 2)]
ROWS = [(kind, script, 2) for kind in KINDS for script in PARALLEL]


@pytest.mark.parametrize("kind, command, world", sampled(ROWS, SAMPLE))
def test_it_is_trained_as_by_one_process(once, tmp_path_factory, kind, command, world):
    """Losses, norms and weights. Then it resumes its own checkpoint of step 2, in the same bits,
    and that of one process."""
    script, _, more = command.partition(" ")
    edits, own_edits, inject = KINDS[kind]
    folder = tmp_path_factory.getbasetemp() / kind.replace(" ", "-")
    single, its_copy = (edited(folder, name, *edits, *own_edits.get(name, []))
                        for name in ("single.py", script))
    expected = once(single, 0, OPTIONS, inject=inject)
    found = once(its_copy, world, f"{OPTIONS} {more}",
                 inject=f"{inject}; resumed(['{expected.out}'])".strip("; "))
    assert furthest(found.curve(), expected.curve()) < 1e-10
    last = "step-00000003"
    assert_near(*(read(result.out / last) for result in (found, expected)))
    own, of_one = (Result([0], "", found.out / f"again-{i}").curve() for i in (0, 1))
    assert own == found.curve()[2:]  # bit for bit
    assert furthest(of_one, expected.curve()[2:]) < 1e-10


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


def muon_of(parameters):
    return torch.optim.Muon([p for p in parameters if p.ndim == 2])


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
    with pytest.raises(SettingError, match="past.* of the optimizer cannot be saved: .*Tensor is not JSON"):
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
    with pytest.raises(SettingError, match="no gradient in the first step: 0.weight, .* 2.bias; does"):
        for module in model:
            module.zero_grad()
        model.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train_steps(run_of(tmp_path / "none", model, optimizer), 1, lambda step: optimizer.step())
