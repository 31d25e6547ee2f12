"""A mixture of experts: ep.py and hybrid_3d.py train what one process trains. Mixtrals go in and
out: test_weights.py."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import ep
import hybrid_3d
from common.experts import (
    MixtureConfig, MixtureOfExperts, balance_experts, busiest_share, use_experts
)
from common.materialise import materialise
from common.model import Transformer
from tests.support.compare import assert_bit_equal, assert_same_run, furthest, saved
from tests.support.on_ranks import on_ranks
from tests.support.sample import needs, rows, table
from tests.support.words import refused
from tools.huggingface import export

MODEL = ("--hidden-size 16 --intermediate-size 40 --expert-size 24 --num-hidden-layers 2 "
         "--num-attention-heads 4 --num-key-value-heads 2 --num-experts 8 --experts-per-token 2")
TRAINING = ("--seq-len 16 --batch-size 16 --steps 3 --log-every 1 --warmup-steps 1 --lr 0.02 "
            "--grad-clip 0.5 --save-every 2 --val-data {val} --val-batches 1 --val-every 1")
OPTIONS = f"{MODEL} {TRAINING} --balance-rate 0.01 --seed 3"
BALANCED = "--experts-per-token 8"  # each token goes to all experts
NAMES = "loss", "grad_norm", "busiest_expert"
AGAIN = "--activation-checkpointing"
# The bias keeps all tokens from the first experts of each layer: with four of 8 and --ep 2 rank 0
# gets none from anybody.
UNEVEN = """ignored(); after(common.materialise, 'materialise', lambda _, model, *args: [
    layer.bias[:{}].sub_(9) for layer in common.experts.mixtures(model)])"""
# 2 ranks cannot share the 3 experts that --ep 2 leaves for them: they share rows of each matrix.
SIX = "--num-experts 6"
# The head is more than a layer: the last of 2 stages has the head alone.
NARROW = f"{SIX} --expert-size 8"
# A command, its ranks, and in bytes what one rank holds of parameters and of gradients, and what it
# sends, by the formulas of tests/support/oracles.py in commit 5735d77. ?: unknown. 4 ranks do not
# divide the 6 rows of a router. Tokens do not travel with --ep 1. With --ep 2 on 2 ranks, rank 0
# sends all of its tokens, and has no others to send back: as much as half of both. Otherwise it
# depends on which tokens go where.
ROWS = table("""
* ep.py --ep 1 --no-reshard-after-forward --grad-accum 2 | 2 | 113984 | 342088
* ep.py --ep 2 --grad-accum 2 {AGAIN} | 2 | 113984 | 405640
* hybrid_3d.py --replicate 2 --tp 2 --ep 2 | 4 | 115328 | ?
hybrid_3d.py --tp 2 --ep 2 | 2 | 115328 | ?
hybrid_3d.py --replicate 2 --cp 2 --grad-accum 2 --microbatches 2 | 4 | 113984 | 1465352
ep.py --ep 1 --grad-accum 2 | 2 | 113984 | 651144
hybrid_3d.py --tp 2 --ep 2 --grad-accum 2 | 4 | 57664 | ?
ep.py | 4 | 56992 | ?
ep.py --ep 2 --grad-accum 2 {AGAIN} | 4 | 56992 | ?
ep.py --ep 2 {SIX} | 4 | ? | ?
hybrid_3d.py --cp 2 --ep 2 {SIX} | 4 | ? | ?
hybrid_3d.py --pp 2 --ep 2 --microbatches 4 {AGAIN} {NARROW} | 4 | ? | ?
hybrid_3d.py --replicate 2 --cp 2 --tp 2 --pp 2 --ep 2 | 16 | 28800 | ?
hybrid_3d.py --tp 2 --ep 2 --compile | 2 | 115328 | ?
""", AGAIN=AGAIN, SIX=SIX, NARROW=NARROW)


@pytest.fixture
def trained(once):
    """Run a command, or find the run. Then it resumes its own checkpoint of step 2, and
    hybrid_3d.py that of one process, too."""

    def trained(command, world):
        inject = f"write_counts(); {UNEVEN.format(4 if SIX not in command else 2)}"
        if "--compile" in command:  # to graphs, and not to kernels, which takes a minute
            inject += "; torch.compile = functools.partial(torch.compile, backend='aot_eager')"
        if world:
            others = [] if command.startswith("ep.py") else [trained(reference(command), 0).out]
            inject += f"; resumed({list(map(str, others))})"
        model = reference(command).removeprefix("ep.py")  # what stands last counts
        return once(command, world, f"{OPTIONS}{model} --dtype float64", inject=inject)

    return trained


def reference(command):
    model = next((model for model in (NARROW, SIX) if model in command), "")
    return f"ep.py {model}".strip()


@pytest.mark.parametrize("command, world, held, sent", ROWS)
def test_every_row_trains_the_same(trained, command, world, held, sent):
    """Losses, norms, the share of the busiest expert, validation, weights and optimizer states; the
    biases are exactly the same. A resumed run has the same bits; one of hybrid_3d.py that goes on
    with what one process has saved follows the same curve."""
    expected = trained(reference(command), 0)
    found = trained(command, world)
    assert_same_run(found, expected)
    own, *others = (found.again(i) for i in range(len(list(found.out.glob("again-*")))))
    assert own.curve(*NAMES) == found.curve(*NAMES)[2:]
    assert own.curve("step", "val_loss") == found.curve("step", "val_loss")[-1:]
    for other in others:
        assert furthest(other.curve(*NAMES), expected.curve(*NAMES)[2:]) < 1e-10
    tensors = saved(found)
    assert_bit_equal(saved(own), tensors)
    for name, tensor in saved(expected).items():
        if name.endswith("mlp.bias"):
            assert torch.equal(tensors[name], tensor) and len(set(tensor.tolist())) > 2, name
    holds_and_sends(found.counts(), held, sent)


def holds_and_sends(counts, held, sent, size=8):
    """On top is the norm for clipping: of ep.py two numbers; in hybrid_3d.py for each dimension of
    both meshes a number for each of at most 25 parameters."""
    for kind in "parameters", "gradients":
        assert held in ("?", counts["held"][kind])
    assert sent == "?" or size <= counts["sent"] - sent <= 6 * 25 * 2 * size


# In bfloat16 experts too sum gradients in float32.
@rows("command, n, held, sent", """
* ep.py --dtype float64 | 2 | 113984 | 628808
* ep.py --ep 1 --no-reshard-after-forward --grad-accum 2 --dtype bfloat16 | 2 | 56992 | 142616
ep.py --ep 2 --grad-accum 2 {AGAIN} --dtype float32 | 4 | 28496 | 464140
hybrid_3d.py --tp 2 --ep 4 {AGAIN} --dtype float32 | 4 | 28832 | 390792
* hybrid_3d.py --cp 2 --pp 2 --microbatches 2 --vocab-size 2048 --dtype float64
  | 4 | 212224 | 539264
""", AGAIN=AGAIN)
def test_bytes_are_exact_if_routing_is_balanced(once, command, n, held, sent):
    result = once(command, n, f"{OPTIONS} {BALANCED}", inject="write_counts()")
    holds_and_sends(result.counts(), held, sent, 8 if "64" in command else 4)


@on_ranks(2)
def test_no_gather_waits_for_the_counts():
    """When the CPU waits in a layer, the next layer and its experts are on their way: in the
    forward pass, and in the backward pass if it computes layers again, and so waits again."""
    order, unshard = [], FSDPParamGroup.unshard

    def unshard_and_note(unit, *args):
        pending = unit._all_gather_result
        unshard(unit, *args)
        if unit._all_gather_result is not pending:
            order.append(unit._module_fqn.replace("model.", "").replace("layers.", ""))

    def wait_and_note(counts, rows):
        order.append("wait")
        return counts.tolist()

    for module in ep, hybrid_3d:
        order.clear()
        with mock.patch.object(FSDPParamGroup, "unshard", unshard_and_note), mock.patch.object(
            ep, "read_counts", wait_and_note
        ):
            module.main(f"{MODEL} --ep 1 --steps 2 --seq-len 16 --batch-size 16 "
                        f"--data {__file__} {AGAIN}".split())
        assert " ".join(order[len(order) // 2 :]) == (
            "embed_tokens 0 0.mlp.experts 1 1.mlp.experts wait norm, lm_head wait 1 1.mlp.experts "
            "0 0.mlp.experts wait embed_tokens wait"
        )


# The parts


@on_ranks(2)
def test_how_ranks_share_experts(rank):
    """Whole ones if they can, otherwise rows of each, with the weights that these have in one
    process. Frozen ones stay so, and have no gradient to clip. The busiest is that of all ranks."""
    for replicas, number, size, shape in (
        (1, 4, 25, (2, 25, 16)), (1, 3, 24, (3, 12, 16)), (2, 3, 25, (3, 25, 16))
    ):
        mesh = init_device_mesh("cpu", (replicas, 2 // replicas, 1),
                                mesh_dim_names=("replicate", "shard", "ep"))
        config = MixtureConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                               num_experts=number, expert_size=size)
        with torch.device("meta"):
            whole, model = (use_experts(Transformer(config)) for _ in "ab")
        experts = model.model.layers["0"].mlp.experts
        experts.down_proj.requires_grad_(False)
        ep.shard_experts(experts, mesh["ep"], mesh["replicate", "shard"])
        for each in (whole, model):
            materialise(each, "cpu", 0)
        experts(torch.ones(number, 16), torch.ones(number, dtype=torch.int64))
        own, frozen = experts.gate_proj, experts.down_proj
        for name, p in experts.named_parameters():
            expected = whole.model.layers["0"].mlp.experts.get_parameter(name)
            assert torch.equal(p.full_tensor(), expected), name
        assert len(frozen.full_tensor()[:, 0, 0].unique()) == number  # each is drawn by itself
        assert own.to_local().shape == shape and own.requires_grad and not frozen.requires_grad
        own.grad = torch.ones_like(own)
        norm = pytest.approx((replicas * 16 * number * size) ** 0.5)  # of all ranks' parts
        assert ep.clip_over_meshes([own, frozen], 1.0) == norm
        model.model.layers["0"].mlp.busiest = torch.tensor([0.5])
        assert busiest_share([model] if rank else [], "cpu") == 0.5


def mixture(dtype, size=24, hidden=16):
    """A layer with random weights, and with a bias that chooses."""
    torch.manual_seed(0)
    config = MixtureConfig(hidden_size=hidden, head_dim=2, num_experts=4, expert_size=size)
    layer = MixtureOfExperts(config).to(dtype)
    for value in (*layer.parameters(), layer.bias):
        torch.nn.init.normal_(value)
    return layer


def test_busy_experts_get_fewer_tokens():
    model = torch.nn.ModuleList(mixture(torch.float32) for _ in "ab")
    for layer in model:
        layer.bias.zero_()
        layer.counts = torch.tensor([5, 1, 3, 3])
    balance_experts(model, 0.1)
    balance_experts(torch.nn.Linear(1, 1), 0.1)  # a stage without layers
    assert layer.bias.tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0])
    assert layer.busiest.item() == pytest.approx(5 / 12)


def test_layers_in_bfloat16_use_the_kernel(monkeypatch):
    """And under autocast. It refuses sizes that are no multiples of 8. Without rows for some
    experts: tests/gpu/test_gpus.py."""
    kernel = mock.Mock(wraps=F.grouped_mm)
    monkeypatch.setattr(F, "grouped_mm", kernel)
    for dtype, calls in ((torch.float32, 0), (torch.bfloat16, 3)):
        mixture(dtype)(torch.randn(2, 5, 16, dtype=dtype)).sum().backward()
        assert kernel.call_count == calls, dtype
    for size, hidden in (20, 16), (24, 12):
        mixture(torch.bfloat16, size, hidden)(torch.randn(2, 5, hidden).bfloat16()).sum().backward()
    assert kernel.call_count == 3
    with torch.autocast("cpu", torch.bfloat16):
        mixture(torch.float32)(torch.randn(2, 5, 16))
    assert kernel.call_count == 6


def test_a_layer_is_what_its_formula_says():
    """Numbers that the formula gave, token by token and expert by expert, in commit 5735d77: of the
    output, and the norms of the gradients."""
    layer, x = mixture(torch.float64), torch.arange(240).double().sin().view(3, 5, 16)
    out = layer(x).view(-1, 16)
    assert out[::5, 3].tolist() == pytest.approx([31.1727263, -9.61025765, -11.64037737])
    (out * torch.arange(240).double().cos().view(15, 16)).sum().backward()
    assert [p.grad.norm().item() for p in layer.parameters()] == pytest.approx(
        [98.4717305, 432.21052921, 468.93653771, 424.38524545])
    assert layer.counts.tolist() == [15, 9, 0, 6]
    layer.eval()(x)
    assert layer.counts.tolist() == [15, 9, 0, 6]  # validation is not counted


def test_the_router_computes_in_float32():
    """Also under autocast, and with a weight in bfloat16, as FSDP gathers it."""
    x = torch.randn(100, 16).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        router = mixture(dtype).router
        with torch.autocast("cpu", torch.bfloat16):
            found = router(x)
        assert found.dtype == torch.float32
        assert torch.equal(found, F.linear(x.float(), router.weight.float()))


def test_biases_are_not_exported(trained, tmp_path):
    needs("safetensors")
    with refused("0.mlp.bias, which chooses experts, is not 0"):
        export.export(trained("ep.py", 0).out / "step-00000003", tmp_path / "exported")
