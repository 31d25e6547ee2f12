"""One's own model: what the scripts cannot know is handled, or refused in words."""

import pytest
import torch
from torch import nn

from common import checkpoint
from common.errors import SettingError
from common.materialise import materialise
from common.model import ModelConfig, Transformer, next_token_loss, wrap_layers
from common.step import seed_step
from tests.sample import sampled

OPTIONS = ("--hidden-size 48 --intermediate-size 80 --num-hidden-layers 2 --num-attention-heads 4 "
           "--num-key-value-heads 2 --seq-len 32 --batch-size 24 --steps 6 --log-every 1 "
           "--warmup-steps 3 --save-every 3 --dtype float64")
SCRIPTS = [
    ("ddp.py", 2), ("zero.py --stage 1", 2), ("zero.py", 2), ("fsdp.py", 2), ("tp.py", 2),
    ("tp.py --no-sequence-parallel", 2), ("cp.py", 2), ("pp.py", 2),
    ("hybrid_3d.py --tp 2 --cp 2", 4),
]


def meta_model():
    with torch.device("meta"):
        return Transformer(ModelConfig(96, 48, 80, 2, 6, 2))


def test_a_buffer_is_refused_by_name():
    model = meta_model()
    model.model.register_buffer("inv_freq", torch.empty(4, device="meta"), persistent=False)
    with pytest.raises(SettingError, match="does not know the buffer model.inv_freq"):
        materialise(model, "cpu", 0)


def test_an_unknown_parameter_is_refused_by_name():
    model = meta_model()
    model.model.norm.register_parameter("gate", nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(SettingError, match="the parameter model.norm.gate of a RMSNorm"):
        materialise(model, "cpu", 0)


def test_biases_are_zero_norms_one_and_ties_stay():
    model = meta_model()
    layer = model.model.layers["0"]
    with torch.device("meta"):
        layer.mlp.up_proj, layer.input_layernorm = nn.Linear(48, 80), nn.LayerNorm(48)
    model.lm_head.weight = model.model.embed_tokens.weight
    materialise(model, "cpu", 0)
    assert (layer.mlp.up_proj.bias == 0).all() and (layer.input_layernorm.bias == 0).all()
    assert (layer.input_layernorm.weight == 1).all() and layer.mlp.up_proj.weight.std() > 0.01
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_checkpointed_layers_repeat_their_dropout():
    """The same gradients with and without activation checkpointing."""
    gradients = []
    for checkpointed in (False, True):
        model = meta_model()
        materialise(model, "cpu", 0)
        for layer in model.model.layers.values():
            layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(0.3))
        wrap_layers(model.model.layers.values(), False, checkpointed)
        seed_step(0, 5)
        tokens = torch.arange(64).view(2, 32)
        next_token_loss(model(tokens), tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_the_seed_of_a_step_is_a_function_of_its_numbers():
    def draw(*numbers):
        seed_step(*numbers)
        return tuple(torch.rand(8).tolist())

    assert draw(0, 3, 1) == draw(0, 3, 1)
    assert len({draw(*map(int, f"{i:03b}")) for i in range(8)}) == 8  # seed, step, rank: 0 or 1


@pytest.mark.parametrize("command, world", sampled(
    [("single.py", 0), *SCRIPTS], [("tp.py --no-sequence-parallel", 2)]
))
def test_dropout_repeats_itself_after_a_resume(run, once, corpus, command, world):
    """Bit for bit, at the same number of ranks; and it is not what they do without dropout."""
    options = f"{OPTIONS} --activation-checkpointing --grad-accum 2"
    whole = once(command, world, options, inject="dropout()")
    run(command, world, f"{options} --data {corpus} --steps 3", inject="dropout()")
    again = run(command, world, f"{options} --data {corpus}", inject="dropout()")
    assert "resuming after step 3" in again.output and again.curve() == whole.curve()
    assert abs(again.curve()[-1][0] - once("single.py", 0, OPTIONS).curve()[-1][0]) > 1e-3
    found, expected = (
        checkpoint.read(out / "step-00000006", prefix="") for out in (again.out, whole.out)
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


ODD = [("frozen", *script) for script in SCRIPTS] + [
    ("tied", *script) for script in SCRIPTS if script[0][:2] in ("dd", "tp", "cp")
]


@pytest.mark.parametrize("kind, command, world", sampled(ODD, [ODD[2], ODD[10]]))
def test_frozen_and_tied_parameters(once, kind, command, world):
    """Every script trains them as one process does; and that is not what it does without them."""
    expected, plain, found = (torch.tensor(result.curve()) for result in (
        once("single.py", 0, OPTIONS, inject=f"{kind}()"), once("single.py", 0, OPTIONS),
        once(command, world, OPTIONS, inject=f"{kind}()"),
    ))
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("command", ["zero.py", "fsdp.py"])
def test_tied_parameters_in_two_groups_are_refused(run, corpus, command):
    """In two groups of FSDP they are an error on new torch, and untied in silence on 2.11."""
    result = run(command, 2, f"{OPTIONS} --data {corpus}", inject="tied()", expect_ok=False)
    (line,) = result.lines
    assert all(result.statuses) and ("in 2 of the groups" in line or "two groups share" in line)


def test_zero_pairs_names_and_shards_by_identity(run):
    assert "all groups are right" in run("tests/zero_groups.py", 2, pass_out=False).output


LOOK = """
types, rotate = set(), common.model.rotate
def look(x, cos, sin):
    types.add((x.dtype, cos.dtype, sin.dtype))
    assert (cos.double() ** 2 + sin.double() ** 2 - 1).abs().max() < 1e-6  # bfloat16: 4e-3
    return rotate(x, cos, sin)
common.model.rotate = look
before(Report, "close", lambda *_: print("types", types))
"""


@pytest.mark.parametrize("command, world", sampled(
    [("single.py", 0), ("fsdp.py", 2), ("hybrid_3d.py --tp 2", 4)], [("fsdp.py", 2)]
))
def test_rotary_angles_stay_in_float32(run, corpus, command, world):
    """Also where FSDP casts the parameters, and would cast the inputs of each layer."""
    result = run(command, world, "--dtype bfloat16 --steps 1 --seq-len 32 --batch-size 4 "
                 f"--save-every 0 --data {corpus}", inject=LOOK)
    assert result.output.count("types {(torch.bfloat16, torch.float32, torch.float32)}") == (
        world or 1
    )
