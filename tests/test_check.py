"""tools/check.py: what it finds in edited scripts, and what it says of those that are right."""

import importlib
import itertools
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys
import time
from unittest import mock

import pytest

from parity.compare import Verdict
from tests.support.commands import finish, left_over, start, wait_until
from tests.support.parity_runs import read as bugs
from tests.support.processes import ROOT, edited
from tests.support.sample import sampled, thorough
from tests.test_porting import DATA_PARALLEL, HEADS, UNITS
from tools import check as tool
from tools.flatten import flatten, without_run
from tools.checking import recorded


@pytest.fixture
def check(server, tmp_path):
    """A function of a script and options: (status, output), run in a folder, which stays as it
    is."""
    def check(script, options=""):
        before = sorted(tmp_path.iterdir())
        small = "--num-hidden-layers 2 --seq-len 24 --steps 2 --ranks 2"
        found = server.run(
            "tools/check.py", 0, shlex.split(f"{script} {small} {options}"), folder=tmp_path,
            pass_out=False, expect_ok=False, env={"TMPDIR": str(tmp_path)})
        assert sorted(tmp_path.iterdir()) == before
        return found.statuses[0], found.output

    return check


ACCUMULATE = "--batch-size 6 --grad-accum 3"
EQUAL = "EQUAL( to itself on one process)? +up to (0.0e|.*e-1)"  # float64
TIED = ("    layers = model", "    model.lm_head.weight = model.model.embed_tokens.weight\n"
        "    layers = model")
UNCLIPPED = [("    dist.all_reduce(total, group=group)\n", "")]
NO_CLIPPING = [("torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()",
                "torch.zeros(())")]
# The mean of the means of micro-batches, over all ranks
MEANS = [("model(inputs, targets) / count", "model(inputs, targets) / count_targets("
          "[(inputs, targets)], dist.group.WORLD) / args.grad_accum")]
MEANS_OF_STAGES = [("micro_loss / count", "micro_loss / (targets != -100).sum() / M "
                    "/ args.grad_accum")]
CLIPPED = "torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)\n"
BY_HAND = [(CLIPPED, """torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= (args.max_norm / grad_norm).clamp(max=1.0)
""")]
UNSCALED = [("(micro_loss * n).backward()", "micro_loss.backward()")]
# Whole, of a seed, as docs/copying.md says
SEEDED = [("    with torch.device(\"meta\"):\n        whole = ",
           "    torch.manual_seed(args.seed)\n    whole = "),
          ("        materialise(part, device, args.seed)\n", "")]
STEP = "        optimizer.step()\n"
MICRO_LOSS = "            loss += micro_loss.detach()\n"


def average(kept, update="True"):
    """An average of the weights (EMA) in fsdp.py: what a rank keeps of p, and when it updates."""
    return [("        after_evaluation=",
             "        tensors=model.state_dict(keep_vars=True) | ema, after_evaluation="),
            ("    # Data\n", f"""    named = dict(model.named_parameters())
    ema = {{f"ema.{{k}}": {kept} for k, p in named.items()}}

    # Data
"""),
            (STEP, f"""{STEP}        with torch.no_grad():
            for x, p in zip(ema.values(), named.values()):
                if {update}:
                    x.lerp_(p.to_local() if type(x) is torch.Tensor else p, 0.1)
""")]


def renamed_without_run(text):
    """Its model is called policy: parameters have the names of its modules, as in single.py."""
    return re.sub(r"(?<![.\w-])model(?=[.,()\n]| =)", "policy", without_run(text))


# A loss across all samples of a micro-batch, of all ranks
ACROSS = [
    ("\nimport torch\n",
     "\nimport torch\nfrom torch.distributed.tensor import DTensor, Partial, Shard\n"),
    ("replica(inputs, targets) / count",
     "DTensor.from_local((replica(inputs, targets) / count)[None], mesh, [Shard(0)])"
     ".full_tensor(grad_placements=[Partial()]).sum().square() / n")]
WHOLE_BATCH = [("        mesh=mesh,  # FSDP: each rank reads its own samples\n", ""),
               ("count_targets(batch, dist.group.WORLD)", "count_targets(batch)")]
# Each rank skips another layer: FSDP gathers that of the other, which is as large.
SKIPS = [("            micro_loss = model(inputs, targets) / count",
          "            layer = model.model.layers.pop(str(sampler.rank % 2))\n"
          "            micro_loss = model(inputs, targets) / count\n"
          "            model.model.layers[str(sampler.rank % 2)] = layer")]
SAMPLE = [
    # Each rank clips by the norm of its own two stages.
    ("pp.py --against single.py --num-hidden-layers 4 --schedule zbv", UNCLIPPED,
     "DIFFERENT  step 0: clipping"),
    # Some targets are ignored: the ranks have unlike numbers of them.
    ("fsdp.py", [("count_targets(batch, dist.group.WORLD)  # FSDP",
                  "n * count_targets(batch)  # FSDP")],
     "DIFFERENT  step 0: loss: a mean of means"),
    (f"zero.py {ACCUMULATE} --val-data {ROOT}/README.md", [
        *HEADS, *DATA_PARALLEL["zero.py"], *NO_CLIPPING], EQUAL),
    # Clipping by hand hides a factor of all gradients.
    ("ddp.py --against single.py", BY_HAND + UNSCALED,
     "DIFFERENT  step 0: the gradient norm that it logs is .* \\(times 0.5\\)"),
    ("pp.py --against single.py --num-hidden-layers 4", [renamed_without_run], EQUAL),
]
REPLICAS = [*HEADS, *DATA_PARALLEL["fsdp.py"],
            ("    check(args", "    args.replicate = n\n    check(args")]
WITHOUT_ZEROS = [("set_reduce_scatter_unused_params(True)",
                  "set_reduce_scatter_unused_params(False)")]
LISTED = UNITS, "        [model.model.norm, *model.lm_head.parts.values()],\n"
# As `inputs.pop("labels")` does: what it has read is recorded all the same.
TAKES_OUT = [("        for i, (inputs, targets) in enumerate(batch):",
              "        for i in range(args.grad_accum):\n"
              "            inputs, targets = batch.pop(0)"),
             ("count_targets(batch, dist.group.WORLD)", "count_targets(batch) * n")]
SCHEDULE = """
    def factor(step):
        return (step + 1) / args.warmup_steps if step < args.warmup_steps else 1 - step / args.steps

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    # Data
"""
RATE = "        set_learning_rate(optimizer, step, args)\n"


def orders(seed):
    """The seed of the order of the samples after the first epoch, for ``rank`` and its number."""
    return [("    # Resume", f"""
    order, size, rank = sampler.order, len(dataset), sampler.rank

    def order_of(places, own):
        read = [order((i % size).reshape(1), own + ({seed}) * int(i >= size)) for i in places]
        return torch.tensor([each.item() for each in read]).numpy()

    sampler.order = order_of

    # Resume""")]


# Mistakes that only the sizes of a real run show: what they are, and what says so
ESCAPES = [
    # Machines of two ranks
    ("ddp.py --ranks 4 --grad-accum 3", [
        ("(micro_loss * n)", "(micro_loss * int(os.environ['LOCAL_WORLD_SIZE']))"),
        ("import torch\nimport torch.dist", "import os\nimport torch\nimport torch.dist")],
     "DIFFERENT  step 0: gradients: all: times 0.5"),
    # An odd number of micro-batches
    ("ddp.py --grad-accum 3", [("last = i == args.grad_accum - 1", "last = i % 2 == 1")],
     "DIFFERENT  step 0: reduction: "),
    # Fewer key/value heads than heads
    ("tp.py", [("    # Optimizer\n", """
    def repeated(q, k, v, is_causal):
        k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    for layer in layers:
        layer.self_attn.attention = repeated

    # Optimizer
""")], "DIFFERENT  step 0: gradients: forward pass: the first module .*self_attn`"),
    # Held-out data
    ("cp.py", [("loss_of=loss_of_shard", "loss_of=None")], "DIFFERENT  evaluation 1: "),
    # Steps after the warm-up
    ("ddp.py --steps 4", [(RATE, """
        share = (args.steps - args.warmup_steps) // n
        mine = type(args)(**vars(args) | {"steps": args.warmup_steps + share})
        set_learning_rate(optimizer, step, mine)
""")], "DIFFERENT  step 3: update: learning rate"),
    ("ddp.py --steps 4", [
        (RATE, f"        args.min_lr *= n if step == 0 else 1\n{RATE}")],
     "DIFFERENT  step 3: update: learning rate"),
    # A seed that is not 0
    ("zero.py", [("materialise(model, device, args.seed)",
                  "materialise(model, device, args.seed * (1 + dist.get_rank()))")],
     "DIFFERENT  step 0: initial weights: "),
    ("fsdp.py", [("seed=args.seed, stop", "seed=args.seed * (1 + dist.get_rank()), stop")],
     "DIFFERENT  step 0: samples: "),
    # Options that have another value than by default
    ("fsdp.py", [("args.weight_decay)", "0.1)")], "EQUAL to itself on one process"),
    ("tp.py --steps 4", [("args.betas", "(0.9, 0.95)")], "EQUAL to itself on one process"),
    ("ep.py --steps 4", [("args.balance_rate, dist.group.WORLD", "args.balance_rate")],
     "DIFFERENT  step 1: .*; then it fails: model.model.layers.0.mlp.bias has other values on "),
    # It fails where it saves, after the first step.
    ("ddp.py", [(CLIPPED, CLIPPED.replace("max_norm", "max_norm + 1e9 * dist.get_rank()"))],
     "DIFFERENT  step 0: clipping: .* or on one rank alone; then it fails: model.model.embed"),
    # One micro-batch, as by default with --grad-accum
    ("ddp.py --ranks 2 3", [("last = i == args.grad_accum - 1",
                             "last = i == args.grad_accum - 1 and i > 0")],
     "(EQUAL) .*\n3 processes  DIFFERENT  step 0: reduction: .*(--grad-accum)?"),
    # Held-out data of which ranks have unlike numbers of targets
    ("fsdp.py", [("        after_evaluation=",
                  "        loss_of=lambda each: (model(*each) / (each[1] != -100).sum(), 1),\n"
                  "        after_evaluation=")],
     "DIFFERENT  evaluation 1: the validation loss that it logs is "),
    # What ranks that read the same samples are
    ("tp.py --against single.py", [],
     "EQUAL .*\n(.*\n)*Note: 2 ranks .* such as .0, 1., along tp of the mesh, "),
    # A resume: what is in no checkpoint
    ("ddp.py --steps 4", [
        (RATE, ""), ("\n    # Data\n", SCHEDULE), (STEP, STEP + "        schedule.step()\n")],
     "(EQUAL) .*\n2 processes, resumed in the middle DIFFERENT  step 3: update: learning rate"),
    # A second epoch
    ("ddp.py --steps 4", orders("5 * rank"), "DIFFERENT  step [23]: samples: "),
    ("ddp.py --steps 4 --against single.py", orders("0"),
     "DIFFERENT  step [23]: samples: the second epoch is read as the first"),
    # A norm that has another name; none
    ("ddp.py", BY_HAND + UNSCALED + [lambda text: without_run(text).replace("grad_norm", "norm")],
     "DIFFERENT  step 0: the gradient norm that it logs is .* \\(times 0.5\\)"),
    ("ddp.py --grad-clip 0", [
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)", "0.0")],
     "EQUAL .*\n(.*\n)*Not compared: .*; the gradient norm .it logs none"),
    # What only bfloat16 shows
    ("fsdp.py", [("    # Optimizer\n", """
    eye = torch.eye(args.config.hidden_size, dtype=args.param_dtype)
    model.model.norm.register_forward_hook(lambda module, inputs, output: output @ eye)

    # Optimizer
""")], "(EQUAL) .*\n2 processes, --dtype bfloat16, .* FAILED     RuntimeError: .*same dtype"),
    # model.forward in place of the wrapper, or of the module with hooks
    ("ddp.py", [("replica(inputs, targets)", "model.forward(inputs, targets)")],
     "DIFFERENT  step 0: reduction: .* averaged: is the wrapper called, not the module in it"),
    ("fsdp.py --against single.py", [
        ("model(inputs, targets)", "model.forward(inputs, targets)")],
     "FAILED     RuntimeError: .*; call the model itself: model.forward leaves out its hooks"),
    # Each rank has its own rows of a gradient.
    *((f"fsdp.py {sizes}", [(f"        grad_norm = {CLIPPED[:-1]}.full_tensor()\n", f"""
        for p in model.parameters():
            dist.all_reduce(p.grad.to_local())
        grad_norm = {CLIPPED[:-1]}.full_tensor()
""")], words) for sizes, words in (
        ("--vocab-size 264 --intermediate-size 96",
         "DIFFERENT  step 0: gradients: an all-reduce of shards: as their own parts of model.emb"),
        ("", "FAILED     .*do all ranks start the same collectives, of tensors of the same shap"))),
    ("ddp.py --against tied.py", [("    # Optimizer\n", """
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    # Optimizer
""")], "DIFFERENT  step 0: gradients: a tie is lost: those of model.embed_tokens.weight and "),
    # Each rank divides by the targets of its own positions.
    ("cp.py", [("count = count_targets(batch)\n",
                "count = n * count_targets([(x, y[:, positions]) for x, y in batch])\n")],
     "DIFFERENT  .* look at the loss: .*, a mean of means over ranks that hold other positions, "),
    # One machine alone, by an interface of its own
    ("ddp.py --ranks 4", [("    device = start_process_group(args)\n", """
    if int(os.environ["LOCAL_WORLD_SIZE"]) < n:
        raise SettingError("it needs one machine")
    os.environ["GLOO_SOCKET_IFNAME"] = socket.if_nameindex()[0][1]
    device = start_process_group(args)
"""), ("import contextlib\n", "import contextlib\nimport os\nimport socket\n"),
        ("import option_parser", "import SettingError, option_parser")], EQUAL),
    # No gradient at all
    ("fsdp.py", [("set_requires_all_reduce(last)", "set_requires_gradient_sync(n == 1)")],
     "DIFFERENT  step 0: gradients: missing: the run has none: "),
    # A second term that is a mean of its own, and no rounding
    ("ddp.py --float32-inside --against single.py", [(
        "replica(inputs, targets) / count",
        "replica(inputs, targets) / count + 1e-4 * model.lm_head.weight.square().mean()")],
     "DIFFERENT  step 0: gradients: those of lm_head.weight"),
    # A factor that shows better in one micro-batch
    ("pp.py --against single.py", [("scale_grads=False", "scale_grads=True")],
     "DIFFERENT .*\n2 processes with --grad-accum 1, .*: DIFFERENT  step 0: gradients: all: divided"
     " by 4, as many as "),
    # By value, before anything is measured
    ("ddp.py --against single.py", [(f"grad_norm = {CLIPPED}", """grad_norm = torch.zeros(())
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
""")], "DIFFERENT  step 0: clipping: .* elsewhere by .*, as by value"),
    # A sum of the weights
    ("ddp.py", [(STEP, f"""{STEP}        for p in model.parameters():
            dist.all_reduce(p.detach())
""")], "DIFFERENT  step 1: update: the weights themselves are times 2, as many as the ranks"),
    # All heads, where a rank has a part
    ("tp.py", [("    # Optimizer\n", "    model.model.layers['0'].self_attn.head_dim *= n\n")],
     "FAILED     RuntimeError: .*; is it a size of the whole model, such as its number of heads, "),
    # Gathered for good
    ("zero.py --against single.py", [
        ("set_reshard_after_backward(last)", "set_reshard_after_backward(False)")],
     "FAILED     .* 'full_tensor', .*; the model has no shards here: does FSDP reduce and free all"),
    # An update in the loop of micro-batches
    ("zero.py --against single.py", [
        (MICRO_LOSS, f"{MICRO_LOSS}            optimizer.step()\n")],
     "DIFFERENT  step 0: gradients: .*; it clips or updates after 1 of 2 micro-batches"),
    # The same on one process
    ("fsdp.py", [("args.lr, args.betas", "args.lr / 2, args.betas")],
     "EQUAL to itself on one process"),
]
ROWS = SAMPLE + ESCAPES + [
    *((f"{script}.py --against single.py", [renamed_without_run], EQUAL)
      for script in ("ddp", "zero")),
    ("fsdp.py", TAKES_OUT, "DIFFERENT  step 0: loss: a mean of means"),
    # It records shards, under both names.
    ("zero.py --against tied.py --stage 1", [
        TIED, (UNITS, "        [model.model.norm],\n"),
        ("[model.model.embed_tokens], *", "[model.model.embed_tokens, model.lm_head], *")], EQUAL),
    ("fsdp.py", MEANS, "DIFFERENT  step 0: loss: a mean of means, in the reference too"),
    ("fsdp.py", [("    check(args, n)  #", "    if n > 1:\n"
                  "        raise SettingError('it needs a GPU')\n    check(args, n)  #")],
     "REFUSED    it needs a GPU"),
    ("fsdp.py", SKIPS + DATA_PARALLEL["fsdp.py"],
     "DIFFERENT  step 0: .*; then it fails: in step 1 ranks used other units of FSDP"),
    # Rank 0 has lost rank 1.
    ("fsdp.py", [("    run = Run(", "    1 / (1 - dist.get_rank())\n    run = Run(")],
     r"FAILED     ZeroDivisionError: division by zero, fsdp.py:\d+: 1 / "),
    # Once
    ("ddp.py --against single.py --ranks 2 2", BY_HAND, "EQUAL((?!2 processes)[\\s\\S])*$"),
    ("fsdp.py", average("p.detach().to_local().clone()"),
     r"DIFFERENT  step 0: shapes: ema\.model.* make it a DTensor"),
    (f"fsdp.py {ACCUMULATE}", [("reduce_by_sum(model)  # FSDP: each", "pass  # FSDP: each")],
     "DIFFERENT  step 0: gradients: all: divided by 2, as many as the ranks"),
    (f"ddp.py {ACCUMULATE}", HEADS + DATA_PARALLEL["ddp.py"], EQUAL),
    *((f"fsdp.py {ACCUMULATE}", HEADS + DATA_PARALLEL["fsdp.py"] + more, EQUAL)
      for more in ([], [LISTED])),
    ("pp.py --schedule zbv --num-hidden-layers 4", SEEDED, EQUAL),
    *((f"{script}.py --against single.py", MEANS, "DIFFERENT  step 0: loss: a mean of means: with")
      for script in ("fsdp", "zero")),
    *((f"pp.py --against single.py {more}", MEANS_OF_STAGES,
       "DIFFERENT  step 0: loss: a mean of means: with")
      for more in ("", "--schedule zerobubble --num-hidden-layers 4")),
    ("fsdp.py", average("p.detach().clone()"), EQUAL),
    ("fsdp.py --steps 3", average("p.detach().clone()", "n == 1"), r"DIFFERENT  step 1: saved: .*"
     r"ema\.model\.embed_tokens"),
    # Heads that the last micro-batch may not use: bug 34 of docs/bugs.md, in fsdp.py
    (f"fsdp.py {ACCUMULATE}", REPLICAS, EQUAL),
    (f"fsdp.py {ACCUMULATE}", REPLICAS + WITHOUT_ZEROS, "DIFFERENT  step 0: gradients: "),
    # A schedule that is late shows in the first steps.
    ("fsdp.py --against single.py --steps 4", [
        ("set_learning_rate(optimizer, step, args)",
         "set_learning_rate(optimizer, max(step - 1, 0), args)")], "DIFFERENT  step 3: update"),
    ("tp.py", [("step, loss / n,", "step, loss,")], "DIFFERENT  step 0: loss: .*times 2, as many"),
    (f"cp.py --val-data {ROOT}/README.md", [
        ("positions), (targets != -100)", "positions), (micro_batch[1] != -100)")],
     r"DIFFERENT  evaluation 1: the validation loss that it logs is .* \(times 0.5\)"),
    ("hybrid_3d.py --against single.py --tp 2", [], EQUAL),
    ("hybrid_3d.py --against 'ep.py --ep 1' --ep 2", [], EQUAL),
    ("ddp.py", ACROSS, "DIFFERENT  .*\n2 processes with --grad-accum 1, .*: EQUAL +up to"),
    ("fsdp.py", WHOLE_BATCH, "DIFFERENT  .* times 2, as many as the ranks.* 2 ranks read the same"),
    ("zero.py", [("    materialise(model, device, args.seed)",
                  "    model.model.norm.eps = 1e-3 * n\n"
                  "    materialise(model, device, args.seed)")],
     "DIFFERENT  step 0: .* first module whose output differs is `model.norm`"),
    ("cp.py", [("contextlib.nullcontext() if last else replica.no_sync()", "replica.no_sync()"),
               ("(micro_loss * n).backward()", "micro_loss.backward()"),
               (CLIPPED, f"{CLIPPED}        for p in model.parameters():\n"
                         f"            dist.all_reduce(p.grad)\n")],
     "DIFFERENT  step 0: reduction: .* they must be added up"),
    *((command, [], EQUAL) for command in (
        "ddp.py --grad-accum 3", "zero.py", "zero.py --stage 1 --grad-accum 3",
        "fsdp.py --grad-accum 3", "fsdp.py --against single.py --replicate 2 --ranks 4",
        "tp.py --grad-accum 3", "tp.py --no-sequence-parallel", "cp.py",
        "cp.py --attention ulysses", "pp.py --num-hidden-layers 4",
        "pp.py --num-hidden-layers 4 --schedule zbv", "ep.py", "hybrid_3d.py",
        "hybrid_3d.py --against ep.py --cp 2 --pp 2 --ranks 4", "examples/diloco.py --replicas 1")),
]


@pytest.mark.parametrize("command, edits, words", sampled(ROWS, SAMPLE))
def test_what_it_says(check, tmp_path, command, edits, words):
    """Of a script with edits: pairs of texts, or functions of the whole text."""
    script, _, more = command.partition(" ")
    more = more.replace("tied.py", edited(tmp_path / "one", "single.py", TIED))
    if "grad-accum" not in command + words:
        more += " --grad-accum 2"  # as by default, but it does not try 1 after a DIFFERENT
    if edits:
        pairs = [edit for edit in edits if not callable(edit)]
        script = edited(tmp_path / "copy", script, *pairs)
        for change in filter(callable, edits):
            pathlib.Path(script).write_text(change(pathlib.Path(script).read_text()))
    status, said = check(script, more)
    differs = "\n1 process    DIFFERENT" in said  # from single.py
    assert status == (words[:5] != "EQUAL" or differs), said
    assert re.search(f"[24] processes  {words}", said), said
    assert status or "\nNot compared: " in said, said
    assert not differs or words != EQUAL, said


@pytest.mark.parametrize("verdicts, status", [
    ("EQUAL REFUSED EQUAL", None), ("EQUAL DIFFERENT EQUAL", 1), ("EQUAL EQUAL FAILED", 1),
    ("EQUAL NOTHING EQUAL", 1), ("REFUSED REFUSED REFUSED", 1)])
def test_its_status(monkeypatch, verdicts, status):
    found = [Verdict(kind, "") for kind in verdicts.split()]
    monkeypatch.setattr(tool, "on_end", lambda _: None)  # of the process of the tests
    monkeypatch.setattr(tool, "verdicts_of", lambda *_: (found, [], False))
    with pytest.raises(SystemExit) as end:
        sys.exit(tool.main([f"{ROOT}/fsdp.py", "--float32-inside"]))
    assert end.value.code == status


@thorough
def test_a_factor_on_one_process_too(check, tmp_path):
    """It shows better in one micro-batch."""
    copy = edited(tmp_path / "copy", "pp.py", ("scale_grads=False", "scale_grads=True"))
    status, said = check(copy)
    assert status == 1 and re.search(
        "\n1 process with --grad-accum 1, .*: DIFFERENT .* all: divided by 4, as many as ", said)


class Started(Exception):
    """A script has not refused its options."""


def test_a_script_that_is_none(check):
    """No advice on the reference."""
    status, said = check("nofile.py")
    assert status == 1 and "nofile.py is no script" in said and "--against" not in said


def test_its_sizes_fit_3_and_4_ranks(monkeypatch, tmp_path):
    """And are refused by none of the scripts."""
    assert tool.DEFAULTS["steps"] > 3  # two updates after the warm-up
    for name, world in itertools.product(("fsdp", "tp", "cp", "pp", "ep"), "34"):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "start_process_group", mock.Mock(side_effect=Started))
        monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": world})
        with pytest.raises(Started):
            recorded.train_recorded(module, [], tmp_path / "run", tool.DEFAULTS)


@pytest.mark.parametrize("number, status", sampled(
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)], [(signal.SIGKILL, -9)]))
def test_a_signal_ends_it_and_leaves_nothing(tmp_path, number, status):
    """As of a CI whose time is up, or a terminal that is closed: no rank, no data worker of one,
    and no file, but after SIGKILL."""
    process = start([sys.executable, "-m", "tools.check", "fsdp.py", "--steps", "3000",
                     "--workers", "1"], tmp_path, PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))
    wait_until(lambda: [*tmp_path.glob("*/*/run.parity")])
    wait_until(lambda: len(left_over(tmp_path)) > 2)  # the tool, a rank, its data worker
    process.send_signal(number)
    assert process.wait(60) == status
    end = time.monotonic() + 20  # torch lets a worker look for its parent every 5 seconds
    while left := left_over(tmp_path):
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert number == signal.SIGKILL or not [*tmp_path.glob("check-*")]


@thorough
def test_nohup_lets_it_go_on(tmp_path):
    """When the terminal is closed, all of its processes get SIGHUP."""
    process = start(["nohup", sys.executable, "-m", "tools.check", "fsdp.py", "--ranks", "2"],
                    tmp_path, PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))
    wait_until(lambda: [*tmp_path.glob("*/*/run.parity")])
    os.killpg(process.pid, signal.SIGHUP)
    said = finish(process)
    assert process.returncode == 0 and re.search(f"2 processes  {EQUAL}", said), said


@thorough
@pytest.mark.parametrize("script, with_run", [("tp", True), ("fsdp", False), ("cp", False)])
def test_one_flat_file(check, tmp_path, script, with_run):
    """In a project that has a common/ and tools/ of its own; fsdp.py as it stands is refused."""
    for name in "common/mine.py", "tools/helpers.py":
        (tmp_path / "project" / name).parent.mkdir(parents=True)
        (tmp_path / "project" / name).touch()
    copy = pathlib.Path(shutil.copy(ROOT / "fsdp.py", tmp_path / "project"))
    status, said = check(str(copy))
    assert status == 1 and "imports common.data of this project, and what is beside it" in said
    copy.write_text(flatten(ROOT / f"{script}.py", with_run).replace(
        "import torch\n", "import common.mine, tools.helpers, torch\n", 1))
    more = f"--val-data {ROOT}/README.md" if with_run else ""
    status, said = check(str(copy), f"--against single.py {more}")
    assert status == 0 and re.search(f"2 processes  {EQUAL}", said), said


def test_a_copy_uses_its_own_common(check, tmp_path):
    copy = edited(tmp_path / "copy", "fsdp.py")
    (tmp_path / "copy" / "common").unlink()
    shutil.copytree(ROOT / "common", tmp_path / "copy" / "common")
    (tmp_path / "copy" / "common" / "step.py").write_text("1 / 0")
    status, said = check(copy)
    assert status == 1 and "ZeroDivisionError" in said, said


# Bugs of docs/bugs.md that the bare command does not find, and what it must be given
NEEDS = {"11": "--attention allgather",
         "20": f"--against {ROOT}/examples/cp_documents.py --separator 32"}
# And some of those that only several micro-batches show
PATCHED = {bug.name: bug for bug in bugs()
           if bug.name[:2] in [*NEEDS, "02", "09", "16", "17", "24"]}


@pytest.mark.parametrize("name", sampled([*PATCHED], ["24-adam-counts-from-2"]))
def test_it_finds_the_bugs_by_example(check, tmp_path, name):
    """Or says which options find them."""
    bug, needed = PATCHED[name], NEEDS.get(name[:2])
    script = bug.run.split()[0]
    copy = edited(tmp_path / "copy", pathlib.Path(script).name, *bug.edits, source=script)
    status, said = check(copy)
    assert status == (not needed), said
    if needed:
        for option in re.findall("--[a-z]+", needed):
            assert re.search(f"(?m)^Not compared.*{option}", said), said
        status, said = check(copy, needed)
        assert status == 1 and "DIFFERENT" in said, said
