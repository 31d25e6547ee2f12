"""A mixture of experts: ep.py and hybrid_3d.py train what one process trains; Mixtrals go in and
out."""

import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from common.errors import SettingError
from common.experts import (
    DefinedGradient, MixtureConfig, MixtureOfExperts, balance_experts, grouped_product, mixtures,
    use_experts,
)
from common.materialise import materialise
from common.model import Transformer
from common.services import checkpoint_files
from common.services.hf_config import read_config
from common.services.hf_weights import load_weights
from tests.support import oracles
from tests.support.edits import edited
from tests.support.processes import Result
from tests.support.sample import sampled
from tests.support.table import OLD
from tests.test_checkpoint import assert_bit_equal
from tests.test_same_run import assert_near, furthest
from tools import export, import_hf

MODEL = ("--hidden-size 16 --intermediate-size 40 --expert-size 24 --num-hidden-layers 2 "
         "--num-attention-heads 4 --num-key-value-heads 2 --num-experts 8 --experts-per-token 2")
TRAINING = ("--seq-len 16 --batch-size 16 --steps 4 --log-every 1 --warmup-steps 1 --lr 0.02 "
            "--grad-clip 0.5 --save-every 2 --val-data {val} --val-every 3 --val-batches 1")
OPTIONS = f"{MODEL} {TRAINING} --balance-rate 0.01"
ROWS_IN_A_STEP = 16 * 16 * 2
NAMES = "loss", "grad_norm", "busiest_expert"
AGAIN = "--activation-checkpointing"
# The first four experts get no token: with --ep 2 and 8 experts rank 0 gets none from anybody.
UNEVEN = "ignored(); unused(4)"
# 2 ranks cannot share the 3 experts that --ep 2 leaves for them: they share rows of each matrix.
SIX = "--num-experts 6"
# The head is more than a layer: the last of 2 stages has the head alone.
NARROW = f"{SIX} --expert-size 8"
SAMPLE = [("ep.py --ep 1 --grad-accum 2", 2), (f"ep.py --ep 2 --grad-accum 2 {AGAIN}", 4),
          ("hybrid_3d.py --tp 2 --ep 2 --grad-accum 2", 4)]
ROWS = [
    *SAMPLE, (f"ep.py --grad-accum 2 {AGAIN}", 0), ("ep.py --ep 1 --grad-accum 2", 4),
    ("ep.py", 4), ("hybrid_3d.py --tp 2 --ep 4 --grad-accum 2", 4), (f"ep.py --ep 2 {SIX}", 4),
    ("ep.py --ep 2 --no-reshard-after-forward --grad-accum 2", 4),
    (f"hybrid_3d.py --ep 2 {AGAIN}", 4), ("hybrid_3d.py --cp 2 --ep 2 --grad-accum 2", 2),
    (f"hybrid_3d.py --cp 2 --ep 2 {SIX}", 4),
    (f"hybrid_3d.py --pp 2 --ep 2 --microbatches 4 {AGAIN} {NARROW}", 4),
    ("hybrid_3d.py --replicate 2 --cp 2 --tp 2 --pp 2 --ep 2", 16),
]
if not OLD:  # torch 2.11 cannot compile layers of which a part is left out under tensor parallelism
    ROWS.append(("hybrid_3d.py --tp 2 --ep 2 --compile", 2))


@pytest.fixture(scope="session")
def trained(once):
    """Run a command, or find the run. It resumes the checkpoint of step 2 of one process too."""

    def trained(command, world, dtype="float64"):
        inject = UNEVEN if SIX not in command else "ignored(); unused(2)"
        if "--compile" in command:  # to graphs, and not to kernels, which takes a minute
            inject += "; torch.compile = functools.partial(torch.compile, backend='aot_eager')"
        if AGAIN not in command:  # it counts all tokens twice
            inject += f"; check_counts({ROWS_IN_A_STEP})"
        if (command, world) == (reference(command), 0):
            inject += "; note_margins()"
        elif dtype == "float64":
            inject += f"; resumed({[str(trained(reference(command), 0).out)]}, step=2)"
        return once(command, world, options_of(command, dtype), inject=inject)

    return trained


def reference(command):
    model = next((model for model in (NARROW, SIX) if model in command), "")
    return f"ep.py {model}".strip()


def options_of(command, dtype="float64"):  # what stands last counts
    return " ".join([OPTIONS, *reference(command).split()[1:], "--dtype", dtype])


def saved(run, step=4):
    return checkpoint_files.read(run.out / f"step-{step:08}", prefix="")


@pytest.mark.parametrize("command, world", sampled(ROWS, SAMPLE))
def test_every_row_trains_the_same(trained, command, world):
    """Losses, norms, the share of the busiest expert, validation, weights and optimizer states; the
    biases are exactly the same. A resumed run has the same bits; one that goes on with what one
    process has saved follows the same curve."""
    expected = trained(reference(command), 0)
    (margin,) = [line.split()[1] for line in expected.lines if line.startswith("margin")]
    assert float(margin) > 1e-8  # no choice of an expert is left to rounding
    found = trained(command, world)
    assert furthest(found.curve(*NAMES), expected.curve(*NAMES)) < 1e-10
    assert furthest(found.curve("val_loss"), expected.curve("val_loss")) < 1e-10
    own, others = (Result([0], "", found.out / name) for name in ("again-0", "again-1"))
    assert furthest(others.curve(*NAMES), expected.curve(*NAMES)[2:]) < 1e-10
    assert own.curve(*NAMES) == found.curve(*NAMES)[2:]
    tensors, resumed, others = saved(found), saved(own), saved(expected)
    assert_bit_equal(resumed, tensors)
    assert_near(tensors, others)
    for name, tensor in others.items():
        if name.endswith("mlp.bias"):
            assert torch.equal(tensors[name], tensor) and len(set(tensor.tolist())) > 2, name
    if world > 1:
        holds_and_sends(found, command, world)


MIXED = [  # single.py with experts: what ep.py trains, without its strategy
    ("import torch\n\nfrom", "import torch\nfrom common.experts import *\n"
     "from common.options import at_least\n\nfrom"),
    ("option_parser(__doc__)", "option_parser(__doc__, MixtureConfig)\n"
     "    parser.add_argument('--balance-rate', type=at_least(0, float))"),
    ("Transformer(args.config)", "use_experts(Transformer(args.config))"),
    ("optimizer.step()", "optimizer.step(); balance_experts(model, args.balance_rate)"),
    ("log(step, loss, grad_norm)", "log(step, loss, grad_norm, busiest_expert=lambda: "
     "busiest_share([model], device))"),
]


def test_the_reference_needs_no_strategy(run, trained, corpus, tmp_path):
    copy = edited(tmp_path / "copy", "single.py", *MIXED)
    found = run(copy, 0, f"{OPTIONS} --dtype float64 --data {corpus}".replace("{val}", corpus),
                inject=UNEVEN)
    assert furthest(found.curve(*NAMES), trained("ep.py", 0).curve(*NAMES)) < 1e-10


def holds_and_sends(found, command, world):
    """What oracles.py says. Only with --ep 1 no token travels: otherwise it depends on the
    data how many do. 4 ranks do not divide the 6 rows of a router."""
    summary, theory = found.summary, oracles.expected(command, world, options_of(command))
    assert not summary["theory"]
    for kind in ("parameters", "gradients"):
        assert summary["held"][kind] == theory[kind] or SIX in command
    if "--ep 1" in command:
        sends(summary, theory, command, world)


def sends(summary, theory, command, world):
    """On top is the norm for clipping: in hybrid_3d.py for each dimension of both meshes a number
    for each of at most 25 parameters."""
    more = summary["sent"] - theory["sent"]
    if command.startswith("hybrid_3d.py"):
        assert 0 <= more <= 6 * 25 * 2 * 8
    else:
        size = 4 if "float32" in command else 8
        assert more == pytest.approx(2 * size * (world - 1) / world, abs=1)


def test_a_checkpoint_moves(trained, once):
    """From 4 ranks to one process. From one process to other grids: see above."""
    out = trained(*SAMPLE[1]).out
    found = once("ep.py", 0, f"{OPTIONS} --dtype float64",
                 inject=f"{UNEVEN}; resumed({[str(out)]}, train=False, step=2)")
    curve = Result([0], "", found.out / "again-0").curve(*NAMES)
    assert furthest(curve, trained("ep.py", 0).curve(*NAMES)[2:]) < 1e-10


@pytest.mark.parametrize("dtype, within", sampled(
    TYPES := [("float32", 5e-4), ("bfloat16", 0.05)], TYPES[1:]))
def test_experts_sum_gradients_in_float32(trained, dtype, within):
    """Also with --dtype bfloat16: half as many bytes are reduced as in float64. float32 takes
    another path in FSDP than float64, bfloat16 another product."""
    found, wide = (trained(*SAMPLE[0], dtype) for dtype in (dtype, "float64"))
    assert furthest(found.curve("loss"), trained("ep.py", 0, "float32").curve("loss")) < within
    reduced, doubled = ([each["bytes"] for each in run.summary["collectives"]
                         if each["collective"] == "reduce-scatter"] for run in (found, wide))
    assert [2 * size for size in reduced] == doubled and sum(reduced) > 0


def test_busy_experts_get_fewer_tokens():
    model = use_experts(Transformer(config())).float()
    layer, *others = mixtures(model)
    for each in (layer, *others):
        each.bias.zero_()
        each.counts = torch.tensor([5, 1, 3, 3])
    balance_experts(model, 0.1)
    assert layer.bias.tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0])
    assert layer.busiest.item() == pytest.approx(5 / 12)


@pytest.mark.parametrize("command, n", sampled(BALANCED := [
    ("ep.py --dtype float64", 2), (f"ep.py --ep 2 --grad-accum 2 {AGAIN} --dtype float32", 4),
    (f"hybrid_3d.py --tp 2 --ep 4 {AGAIN} --dtype float32", 4),
], BALANCED[:1]))
def test_bytes_are_exact_if_routing_is_balanced(once, command, n):
    """Each token goes to all experts."""
    options = f"{OPTIONS} --experts-per-token 8 --steps 3 --save-every 0 --val-every 9"
    summary, theory = once(command, n, options).summary, oracles.expected(command, n, options)
    sends(summary, theory, command, n)
    for kind in ("parameters", "gradients"):
        assert summary["held"][kind] == theory[kind] > 0


FORWARD = "embedding 0 0.experts 1 1.experts wait head wait"


@pytest.mark.parametrize("command, world, expected", sampled(GATHERS := [
    ("ep.py --ep 1", 2, f"{FORWARD} 1 1.experts 0 0.experts embedding"),
    (f"hybrid_3d.py {AGAIN}", 2, f"{FORWARD} 1 1.experts 0 0.experts wait embedding wait"),
], GATHERS[1:2]))
def test_no_gather_waits_for_the_counts(once, command, world, expected):
    """When the CPU waits in a layer, the next layer and its experts are on their way: in the
    forward pass, and in the backward pass if it computes layers again, and so waits again."""
    result = once(command, world, f"{OPTIONS} --steps 3 --save-every 0 --val-every 9",
                  inject="note_gathers()")
    (line,) = [line for line in result.lines if line.startswith("gathers ")]
    *_, found = json.loads(line.removeprefix("gathers "))
    short = {"model.embed_tokens": "embedding", "model.norm, lm_head": "head"}
    assert " ".join(
        short.get(name, name.removeprefix("model.layers.").replace(".mlp", "")) for name in found
    ) == expected


# The parts


def config(**values):
    return MixtureConfig(hidden_size=16, num_experts=4, expert_size=24, **values)


def test_the_kernel_and_the_loop_are_equal(monkeypatch):
    """Also for experts without rows, first, last and between others. Both give the gradients of all
    weights. On GPUs tests/gpu/kernels.py does this. Layers in bfloat16 use the kernel."""
    torch.manual_seed(0)
    sizes = [0, 5, 0, 1, 7, 0]
    rows, weights = torch.randn(13, 16), torch.randn(6, 24, 16)
    found = []
    for ends in (torch.tensor(sizes).cumsum(0).int(), None):
        x, w = (tensor.bfloat16().requires_grad_() for tensor in (rows, weights))
        out = grouped_product(x, w, ends, sizes)
        (out * torch.arange(24)).sum().backward()
        found.append((out, x.grad, w.grad))
    for kernel, loop in zip(*found):
        torch.testing.assert_close(kernel, loop)
    assert (w.grad[[0, 2, 5]] == 0).all() and w.grad[1].norm() > 1
    undefined = torch.full_like(w, torch.nan)  # as some kernels leave the gradients of the others
    found = torch.autograd.grad(
        DefinedGradient.apply(w, torch.tensor(sizes).cumsum(0)), w, undefined)[0]
    assert (found[[0, 2, 5]] == 0).all() and found[[1, 3, 4]].isnan().all()

    kernel = mock.Mock(wraps=F.grouped_mm)
    monkeypatch.setattr(F, "grouped_mm", kernel)
    for dtype, calls in ((torch.float32, 0), (torch.float64, 0), (torch.bfloat16, 3)):
        layer = MixtureOfExperts(config()).to(dtype)
        for value in (*layer.parameters(), layer.bias):
            torch.nn.init.normal_(value)
        layer(torch.randn(2, 5, 16, dtype=dtype)).sum().backward()
        assert kernel.call_count == calls, dtype


@torch.no_grad()
def test_a_layer_is_what_its_formula_says():
    """Token by token and expert by expert, and with a bias that chooses."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(config()).double()
    for value in (*layer.parameters(), layer.bias):
        torch.nn.init.normal_(value)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    expected = torch.zeros_like(x).view(-1, 16)
    for out, token in zip(expected, x.view(-1, 16)):
        scores = (layer.router.weight @ token).softmax(0)
        chosen = sorted(range(4), key=lambda e: scores[e] + layer.bias[e])[-2:]
        for e in chosen:
            gate, up, down = (p[e] for p in layer.experts.parameters())
            hidden = F.silu(gate @ token) * (up @ token)
            out += scores[e] / scores[chosen].sum() * (down @ hidden)
    torch.testing.assert_close(layer(x).view(-1, 16), expected)
    assert layer.counts.sum() == 2 * 15
    layer.eval()(x)
    assert layer.counts.sum() == 2 * 15  # validation is not counted


def test_the_router_computes_in_float32():
    """Also under autocast, and with a weight in bfloat16, as FSDP gathers it. The products of
    bfloat16 send some tokens to other experts."""
    torch.manual_seed(0)
    router = MixtureOfExperts(MixtureConfig(hidden_size=256, num_experts=64)).router
    torch.nn.init.normal_(router.weight, std=0.02)
    x = torch.randn(1000, 256).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        weight = router.to(dtype).weight
        expected = F.linear(x.float(), weight.float())
        with torch.autocast("cpu", torch.bfloat16):
            found, rounded = router(x), F.linear(x, weight)
        assert found.dtype == torch.float32 and torch.equal(found, expected)
        assert (rounded.topk(2).indices.sort().values != found.topk(2).indices.sort().values).any()
        found.sum().backward()
        assert weight.grad.dtype == dtype and weight.grad.norm() > 0
        weight.grad = None


# Mixtral


def test_a_mixtral_goes_in_and_out(run, corpus, tmp_path):
    """ep.py starts from one on 2 ranks, each with 3 of its 6 experts, at a learning rate of 0. What
    is exported then is the same, to the bit, and gives the same logits, as ours does."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=6, initializer_range=0.3,
    ))
    mixtral.save_pretrained(tmp_path / "mixtral")
    import_hf.import_weights(tmp_path / "mixtral", tmp_path / "out")
    result = run("ep.py", 2, f"--model out --seq-len 16 --batch-size 4 --steps 1 --lr 0 "
                 f"--dtype float32 --data {corpus}",
                 inject=f"load_again('{tmp_path}/mixtral')")
    export.main([str(result.out), str(tmp_path / "exported")])
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert type(exported) is type(mixtral)
    state = exported.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in mixtral.state_dict().items())
    own = use_experts(Transformer(read_config(tmp_path / "mixtral")))
    materialise(own, "cpu", 0)
    load_weights(own, tmp_path / "exported")
    tokens = torch.arange(60).view(3, 20)
    torch.testing.assert_close(own(tokens), exported(tokens).logits)


def test_a_lost_auxiliary_loss_is_said(tmp_path, capsys, monkeypatch):
    """Once, by rank 0."""
    found = {"model_type": "mixtral", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2,
             "intermediate_size": 24, "num_attention_heads": 8}
    for rank, wanted, said in (("0", True, True), ("1", True, False), ("0", False, False)):
        (tmp_path / "config.json").write_text(json.dumps(found | {"output_router_logits": wanted}))
        monkeypatch.setenv("RANK", rank)
        config = read_config(tmp_path)  # where it lacks a value, it has Mixtral's
        assert (config.num_experts, config.experts_per_token) == (8, 2)
        assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 1e6)
        error = capsys.readouterr().err
        assert ("config.json has output_router_logits: with it transformers adds" in error) == said
        assert error.count("\n") == said


def test_biases_are_not_exported(trained, tmp_path):
    with pytest.raises(SettingError, match="mlp.bias, which chooses experts and is not 0"):
        export.export(trained("ep.py", 0).out / "step-00000004", tmp_path / "exported")
