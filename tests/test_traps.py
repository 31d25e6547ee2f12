"""One's own model: what the scripts cannot know is handled, or refused in words. Each of these was
once silently wrong."""

import json

import pytest
import torch
from torch import nn

from common import checkpoint
from common.checkpoint import Checkpoints
from common.errors import SettingError
from common.model import (
    ModelConfig, Transformer, checkpoint_activations, init_weights, materialise, next_token_loss
)
from common.seed import seed_step
from tests.processes import Result
from tests.sample import sampled
from tests.test_same_run import EXACT, furthest

CONFIG = ModelConfig(96, 48, 80, 2, 6, 2)


def meta_model():
    with torch.device("meta"):
        return Transformer(CONFIG)


# Initial values


def test_a_buffer_is_refused_by_name():
    model = meta_model()
    model.model.register_buffer("inv_freq", torch.empty(4, device="meta"), persistent=False)
    materialise(model, "cpu")
    with pytest.raises(SettingError, match="does not know the buffer model.inv_freq"):
        init_weights(model, 0)


def test_biases_are_zero_and_norms_one():
    model = meta_model()
    layer = model.model.layers["0"]
    with torch.device("meta"):
        layer.mlp.up_proj = nn.Linear(48, 80)
        layer.input_layernorm = nn.LayerNorm(48)
    materialise(model, "cpu")
    init_weights(model, 0)
    assert (layer.mlp.up_proj.bias == 0).all() and (layer.input_layernorm.bias == 0).all()
    assert (layer.input_layernorm.weight == 1).all() and layer.mlp.up_proj.weight.std() > 0.01


def test_an_unknown_parameter_is_refused_by_name():
    model = meta_model()
    model.model.norm.register_parameter("gate", nn.Parameter(torch.empty(3, device="meta")))
    materialise(model, "cpu")
    with pytest.raises(SettingError, match="the parameter model.norm.gate of a RMSNorm"):
        init_weights(model, 0)


def test_tied_weights_stay_tied():
    model = meta_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    materialise(model, "cpu")
    init_weights(model, 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    whole = sum(p.numel() for p in meta_model().parameters())
    assert sum(p.numel() for p in model.parameters()) == whole - 96 * 48


# Dropout


def test_checkpointed_layers_repeat_their_dropout():
    """The same gradients with and without activation checkpointing."""
    gradients = []
    for checkpointed in (False, True):
        model = Transformer(CONFIG)
        init_weights(model, 0)
        for layer in model.model.layers.values():
            layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(0.3))
        if checkpointed:
            checkpoint_activations(model.model.layers.values())
        seed_step(0, 5)
        tokens = torch.arange(64).view(2, 32)
        next_token_loss(model(tokens), tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_the_seed_of_a_step_is_a_function_of_its_numbers():
    def draw(*numbers):
        seed_step(*numbers)
        return torch.rand(8).tolist()

    assert draw(0, 3, 1) == draw(0, 3, 1)
    seen = [tuple(draw(seed, step, rank)) for seed in (0, 1) for step in (0, 1) for rank in (0, 1)]
    assert len(set(seen)) == 8


DROPOUT = [
    ("single.py", 0), ("ddp.py", 2), ("zero.py --stage 1", 2), ("zero.py", 2), ("fsdp.py", 2),
    ("fsdp.py --replicate 2", 2), ("tp.py", 2), ("tp.py --no-sequence-parallel", 2), ("cp.py", 2),
    ("pp.py", 2), ("hybrid_3d.py --tp 2", 4),
]
SMALL = EXACT.replace("--steps 20", "--steps 6").replace("--save-every 0", "--save-every 3")
SHORT = EXACT.replace("--steps 20", "--steps 10")


@pytest.mark.parametrize("command, world", sampled(DROPOUT, [DROPOUT[7]]))
def test_dropout_repeats_itself_after_a_resume(run, single, corpus, tmp_path, command, world):
    """Bit for bit, at the same number of ranks; and it is not what they do without dropout."""
    options = f"{SMALL} --data {corpus} --activation-checkpointing --grad-accum 2"
    several = "--each --out whole --each --out cut --steps 3 --each --out cut"
    result = run(f"tests/odd_models.py dropout tests/several_runs.py {command}", world,
                 f"{options} {several}", pass_out=False)
    assert result.output.count("resuming after step 3") == 1
    whole, again = (Result([0], "", tmp_path / name) for name in ("whole", "cut"))
    assert again.curve() == whole.curve()
    assert furthest(again.curve(), single(SMALL), steps=6) > 1e-3
    found, expected = (
        checkpoint.read(out / "step-00000006", prefix="") for out in (again.out, whole.out)
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# The mean over targets


IGNORED = [("single.py --grad-accum 2", 0), ("ddp.py", 4), ("ddp.py --grad-accum 2", 2),
           ("zero.py --stage 1", 4), ("zero.py --grad-accum 2", 2), ("fsdp.py", 4),
           ("fsdp.py --replicate 2 --grad-accum 2", 2), ("tp.py --grad-accum 2", 2),
           ("tp.py --no-sequence-parallel", 2), ("cp.py --grad-accum 2", 2),
           ("pp.py --microbatches 2 --grad-accum 2", 2), ("hybrid_3d.py --tp 2 --pp 2", 4),
           ("hybrid_3d.py --cp 2", 4)]


@pytest.fixture(scope="module")
def ignored(server, corpus, tmp_path_factory):
    """The curve of single.py on the whole batch, where most targets are ignored."""
    folder = tmp_path_factory.mktemp("ignored")
    options = f"{SHORT} --batch-size 4 --data {corpus}"
    return server.run("tests/odd_models.py ignored single.py", 0, options, folder=folder).curve()


@pytest.mark.parametrize("command, world", sampled(
    IGNORED, [IGNORED[4], IGNORED[9], IGNORED[11]]
))
def test_the_loss_is_the_mean_over_the_targets(run, corpus, ignored, command, world):
    """Also where ranks and micro-batches have different numbers of targets, or none at all."""
    options = f"{SHORT} --batch-size 4 --data {corpus}"
    result = run(f"tests/odd_models.py ignored {command}", world, options)
    assert furthest(result.curve(), ignored, steps=10) < 1e-10


# Frozen and tied parameters in every strategy


@pytest.fixture(scope="module")
def reference(server, corpus, tmp_path_factory):
    curves = {}

    def curve(kind):
        if kind not in curves:
            folder = tmp_path_factory.mktemp(kind)
            options = f"{SHORT} --data {corpus}"
            result = server.run(f"tests/odd_models.py {kind} single.py", 0, options, folder=folder)
            curves[kind] = result.curve()
        return curves[kind]

    return curve


ODD = [(kind, *run) for kind in ("frozen", "tied") for run in [
    ("ddp.py", 2), ("zero.py --stage 1", 2), ("zero.py", 2), ("fsdp.py", 2), ("tp.py", 2),
    ("tp.py --no-sequence-parallel", 2), ("cp.py", 2),
] if kind == "frozen" or run[0][:4] not in ("zero", "fsdp")]


@pytest.mark.parametrize("kind, command, world", sampled(
    ODD, [ODD[2], ODD[8]]
))
def test_frozen_and_tied_parameters(run, corpus, reference, single, kind, command, world):
    """Every script trains them as one process does; and that is not what it does without them."""
    expected = reference(kind)
    assert furthest(expected, single(SHORT), steps=10) > 1e-3
    result = run(f"tests/odd_models.py {kind} {command}", world, f"{SHORT} --data {corpus}")
    assert furthest(result.curve(), expected, steps=10) < 1e-10


@pytest.mark.parametrize("command", ["zero.py", "fsdp.py"])
def test_tied_parameters_in_two_groups_are_refused(run, corpus, command):
    """In two groups of FSDP they are an error on new torch, and untied in silence on 2.11."""
    result = run(f"tests/odd_models.py tied {command}", 2, f"{EXACT} --data {corpus}",
                 expect_ok=False)
    (line,) = result.lines
    assert all(result.statuses) and ("in 2 of the groups" in line or "two groups share" in line)


# Checkpoints


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)


def checkpoints_of(folder, model, optimizer, run=None, **options):
    return Checkpoints(folder, run or {}, model.state_dict(keep_vars=True), optimizer,
                       **{"stop": 9, **options})


def test_buffers_are_in_the_checkpoint(tmp_path):
    model, other = Small(), Small()
    model.norm(torch.randn(8, 4) + 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpoints = checkpoints_of(tmp_path, model, optimizer)
    assert checkpoints.resume() == 0
    checkpoints.save(1)
    resumed = checkpoints_of(tmp_path, other, torch.optim.SGD(other.parameters(), 0.1))
    assert resumed.resume() == 1
    assert torch.equal(other.norm.running_mean, model.norm.running_mean)
    assert other.norm.num_batches_tracked == 1


def test_buffers_of_several_ranks_are_those_of_the_first_that_holds_them(run):
    """DCP takes copies from different ranks: six buffers came back as ranks 0, 1, 2, 3, 0, 1."""
    assert "buffers agree" in run("tests/buffers_agree.py", 4).output


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    model = Small()
    first = checkpoints_of(tmp_path, model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    first.resume()
    first.save(1)
    other = checkpoints_of(tmp_path, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(SettingError, match="the optimizer is SGD in .* and AdamW in this run"):
        other.resume()


def test_a_name_that_no_rank_has_is_refused(tmp_path):
    """A run that was saved with an untied head does not resume without it."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = checkpoints_of(tmp_path, model, optimizer)
    first.resume()
    first.save(1)
    tensors = model.state_dict(keep_vars=True)
    del tensors["linear.bias"], tensors["norm.running_var"]
    other = Checkpoints(tmp_path, {}, tensors, optimizer, stop=9)
    with pytest.raises(SettingError, match="no rank of this run has linear.bias, norm.running_var"):
        other.resume()


def test_settings_of_any_kind_survive_the_file(tmp_path):
    """A Hugging Face config has tuples, and keys that are numbers; another value is refused."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"sizes": (1, 2), "labels": {0: "a"}, "dtype": torch.float32}
    first = checkpoints_of(tmp_path, model, optimizer, settings)
    first.resume()
    first.save(1)
    assert json.loads((tmp_path / "step-00000001" / "run.json").read_text())[
        "must stay the same"]["sizes"] == [1, 2]
    assert checkpoints_of(tmp_path, model, optimizer, settings).resume() == 1
    with pytest.raises(SettingError, match="sizes is .1, 2. in .* and .1, 3. in this run"):
        checkpoints_of(tmp_path, model, optimizer, settings | {"sizes": (1, 3)}).resume()


# The strategies


def test_zero_pairs_names_and_shards_by_identity(run):
    assert "all groups are right" in run("tests/zero_groups.py", 2, pass_out=False).output


def test_arranging_buckets_leaves_no_trace(run):
    """BatchNorm's running mean and the random state are as before."""
    assert "no trace" in run("tests/arranged_buckets.py", 2, pass_out=False).output


# Steps whose gradients are not finite


@pytest.mark.parametrize("command, world", sampled(
    [("single.py", 0), ("ddp.py", 2), ("zero.py", 2), ("fsdp.py", 2), ("tp.py", 2), ("cp.py", 2),
     ("pp.py", 2), ("hybrid_3d.py --tp 2", 4)],
    [("single.py", 0), ("tp.py", 2)],
))
def test_a_step_with_infinite_gradients_changes_no_weight(run, corpus, command, world):
    """Between two logged steps: the weights are those of the step before, and the run ends."""
    options = f"{EXACT} --data {corpus} --steps 6 --log-every 6 --save-every 6".split()
    result = run(f"tests/odd_models.py infinite {command}", world, options, expect_ok=False)
    assert all(result.statuses)
    (line,) = [line for line in result.lines if "error" in line]
    assert "at step 4 the gradients were not finite" in line
    assert "weights are finite and unchanged" in result.output
    assert not checkpoint.list_checkpoints(result.out)


def test_each_rank_draws_its_part_of_the_same_weights(run):
    """FSDP, hybrid sharding and tensor parallelism, alone and together, on 8 ranks."""
    result = run("tests/local_slices.py", 8, pass_out=False)
    assert "all slices are right" in result.output


def test_rank_0_decides_which_checkpoint_is_newest(run):
    assert "rank 0 decides" in run("tests/newest_checkpoint.py", 2).output


@pytest.mark.parametrize("command, world", sampled(
    [("single.py", 0), ("fsdp.py", 2), ("hybrid_3d.py --tp 2", 4)], [("fsdp.py", 2)]
))
def test_rotary_angles_stay_in_float32(run, corpus, command, world):
    """Also where FSDP casts the parameters, and would cast the inputs of each layer."""
    run(f"tests/rotary_in_float32.py {command}", world,
        f"--dtype bfloat16 --steps 1 --seq-len 32 --batch-size 4 --save-every 0 --data {corpus}")
