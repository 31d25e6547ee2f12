"""Edits that anybody makes to bring a model of their own: exact, or refused in words."""

import shutil

import pytest
import torch
from torch import nn

import cp
from common.errors import SettingError
from common.model import plain_attention
from common.services import checkpoint_files
from tests.support.edits import edited
from tests.support.sample import sampled
from tests.test_same_run import furthest

OPTIONS = ("--hidden-size 48 --intermediate-size 80 --num-hidden-layers 2 --num-attention-heads 4 "
           "--num-key-value-heads 2 --seq-len 32 --batch-size 24 --steps 6 --log-every 1 "
           "--warmup-steps 3 --save-every 4 --dtype float64")

MODEL = "Transformer(args.config).to(args.param_dtype)"


def with_model(new, *names):
    """The edits that put the model ``new``, of tests/support/ported.py, in place of ours."""
    imports = f"from tests.support.ported import {', '.join(names)}"
    return [("\nimport torch\n", f"\nimport torch\n{imports}\n"),
            ("Transformer(args.config)", new)]


# Frozen parameters


def test_tensor_parallelism_thaws_nothing(run, once, corpus):
    """Norms that are frozen stay as they are, in every norm of the plan."""
    expected = once("single.py", 0, OPTIONS, inject="frozen_norms()")
    found = run("tp.py", 2, f"{OPTIONS} --data {corpus}", inject="frozen_norms()")
    assert furthest(found.curve(), expected.curve()) < 1e-10
    for name, tensor in checkpoint_files.read(found.out / "step-00000006").items():
        assert tensor.ndim == 2 or (tensor == 1).all(), name


@pytest.mark.parametrize("command, world, layer", sampled([
    ("pp.py", 2, 0), ("pp.py", 2, 1), ("hybrid_3d.py --pp 2", 2, 1),
    ("pp.py --schedule zerobubble --stages-per-rank 1", 2, 1),
], [("pp.py", 2, 1)]))
def test_a_stage_without_a_trained_parameter(run, once, corpus, command, world, layer):
    inject = f"trained_only('layers.{layer}.')"
    expected = once("single.py", 0, OPTIONS, inject=inject).curve()
    found = run(command, world, f"{OPTIONS} --data {corpus}", inject=inject)
    assert furthest(found.curve(), expected) < 1e-10


@pytest.mark.parametrize("command", ["pp.py", "hybrid_3d.py --pp 2"])
def test_a_frozen_tie_across_stages(run, once, corpus, tmp_path, command):
    """Both stages have a copy of the weights that were loaded, which stays equal."""
    expected = once("single.py", 0, OPTIONS, inject="tied(); frozen()")
    shutil.copytree(expected.out / "step-00000004", tmp_path / "out" / "step-00000004")
    shutil.copy(expected.out / "run-id", tmp_path / "out")
    found = run(command, 2, f"{OPTIONS} --data {corpus}", inject="tied(); frozen()")
    assert furthest(found.curve(), expected.curve()[4:]) < 1e-10


# Attention

WINDOWS = with_model("with_own_attention(Transformer(args.config))", "own_attention",
                     "with_own_attention")


@pytest.mark.parametrize("attention", [cp.ring_attention, cp.allgather_attention])
@pytest.mark.parametrize("keyword, value", [
    ("attn_mask", torch.ones(4, 4).tril()), ("dropout_p", 0.1), ("window_size", 7),
    ("softcap", 50.0), ("score_mod", None),
])
def test_what_an_attention_does_not_compute_is_refused(attention, keyword, value):
    words = f"{attention.__name__} computes causal or full .* no {keyword}: .* ulysses_attention"
    with pytest.raises(SettingError, match=words):
        attention(*torch.zeros(3, 1, 2, 4, 8), group=None, is_causal=True, **{keyword: value})


@pytest.mark.parametrize("attention", [cp.ring_attention, cp.allgather_attention])
def test_whether_attention_is_causal_must_be_said(attention):
    with pytest.raises(TypeError, match="is_causal"):
        attention(*torch.zeros(3, 1, 2, 4, 8), group=None)


class Own(nn.Module):
    def __init__(self, attention=plain_attention, inner=None):
        super().__init__()
        self.attention, self.inner = attention, inner


@pytest.mark.parametrize("model, words", [
    (Own(torch.sum), r"no module of Own|Own\) computes attention by sum"),
    (nn.Sequential(nn.Linear(2, 2)), "no module of Sequential has plain_attention as its attr"),
    (nn.Sequential(Own(), Own(torch.sum)), r"1 \(Own\) computes attention by sum"),
    (nn.Sequential(Own(), nn.Conv1d(2, 2, 3)), r"1 \(Conv1d\) looks at other positions"),
    (nn.Sequential(Own(inner=nn.LSTM(2, 2))), r"0.inner \(LSTM\) looks at other positions"),
    (nn.Sequential(Own(), nn.AdaptiveAvgPool1d(1)), r"1 \(AdaptiveAvgPool1d\) looks at other"),
])
def test_what_needs_other_positions_is_refused(model, words):
    """In the whole model: nothing is forgotten."""
    with pytest.raises(SettingError, match=words):
        cp.set_attention(model, cp.ring_attention, None, replaces=plain_attention)


def test_attention_is_set_wherever_it_is_read():
    model = nn.Sequential(Own(inner=Own()), nn.Conv1d(2, 2, 1), nn.ModuleDict({"a": nn.GRU(2, 2)}),
                          Own(inner=Own(torch.sum)))
    cp.set_attention(model, cp.ring_attention, "group", replaces=plain_attention,
                     without=["2.a", "3.inner"])
    for module in (model[0], model[0].inner, model[3]):
        assert module.attention.func is cp.ring_attention
    assert model[3].inner.attention is torch.sum


@pytest.mark.parametrize("command", sampled(
    ["cp.py", "cp.py --attention ulysses", "hybrid_3d.py --cp 2"], ["cp.py"]
))
def test_an_attention_of_ones_own_is_not_lost(run, corpus, tmp_path, command):
    """What the attribute holds may do more than causal attention."""
    script, *more = command.split(" ", 1)
    copy = edited(tmp_path / "copy", script, *WINDOWS)
    result = run(copy, 2, f"{OPTIONS} --data {corpus} {' '.join(more)}", expect_ok=False)
    assert "(Attention) computes attention by own_attention, which would" in result.output


@pytest.mark.parametrize("heads", sampled(
    ["--num-key-value-heads 2", "--num-key-value-heads 1"], ["--num-key-value-heads 2"]
))
def test_ulysses_with_more_ranks_than_key_value_heads(run, once, corpus, heads):
    expected = once("single.py", 0, f"{OPTIONS} {heads}").curve()
    result = run("cp.py --attention ulysses", 4, f"{OPTIONS} {heads} --data {corpus}")
    assert furthest(result.curve(), expected) < 1e-10
    assert result.summary["sent"] == result.summary["theory"]["sent"]["bytes"]


# Parts that some samples do not use

HEADS = with_model("with_heads(Transformer(args.config))", "with_heads")
UNITS = "        [model.model.norm, model.lm_head],\n"
APART = UNITS, ("        [model.model.norm], "
                "*([head] for head in model.lm_head.parts.values()),\n")
# FSDP reduces zeros for what no rank has used, and AdamW steps it
CLIP = "        grad_norm = "
ZEROS = CLIP, ("        for p in model.parameters():\n"
               f"            p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n{CLIP}")
UNUSED = "reshard_after_forward=args.reshard_after_forward, cpu_offload=args.cpu_offload,"
DATA_PARALLEL = {
    "ddp.py": [("gradient_as_bucket_view=True", "find_unused_parameters=True")],
    "zero.py": [APART],
    "fsdp.py": [(UNUSED, f"{UNUSED} reduce_unused=True")],
    "ep.py": [("    shard(model, units, mesh, dtype, args.reshard_after_forward)",
               "    shard(model, units, mesh, dtype, args.reshard_after_forward, False, True)")],
    "hybrid_3d.py": [("reshard_after_forward=pp == 1)", "pp == 1, reduce_unused=True)")],
}
FULLY_SHARDED = "fsdp.py", "ep.py", "hybrid_3d.py"


@pytest.mark.parametrize("command, world, accum", sampled([
    ("ddp.py", 2, 3), ("ddp.py", 3, 2), ("zero.py", 2, 3), ("zero.py", 3, 1),
    ("zero.py --stage 1", 2, 3), ("zero.py --stage 1", 3, 2), ("fsdp.py", 2, 3), ("fsdp.py", 3, 2),
    ("fsdp.py --replicate 2", 4, 1), ("ep.py --num-experts 6 --expert-size 16", 3, 2),
    ("hybrid_3d.py", 2, 3), ("hybrid_3d.py", 3, 2),
], [("ddp.py", 3, 2), ("zero.py", 2, 3), ("zero.py --stage 1", 3, 2), ("fsdp.py", 3, 2)]))
def test_ranks_use_different_parts(run, corpus, tmp_path, command, world, accum):
    """A micro-batch of one sample uses one of the heads."""
    script, *more = command.split(" ", 1)
    options = f"{OPTIONS} --data {corpus} --batch-size {12 if world == 4 else 6} --steps 12"
    reference, experts = ("ep.py", more) if script == "ep.py" else ("single.py", [])
    zeros = [ZEROS] if script in FULLY_SHARDED else []
    one = edited(tmp_path / "copy", reference, *HEADS, *zeros)
    expected = run(one, 0, f"{options} {' '.join(experts)}", out="one").curve()
    copy = edited(tmp_path / "copy", script, *HEADS, *DATA_PARALLEL[script])
    found = run(copy, world, f"{options} --grad-accum {accum} {' '.join(more)}")
    assert furthest(found.curve(), expected) < 1e-10


@pytest.mark.parametrize("script, edits", [
    ("ddp.py", []), ("fsdp.py", []), ("fsdp.py", [APART]),
    ("fsdp.py", [APART, *DATA_PARALLEL["fsdp.py"]]),
])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_would_add_other_gradients_stop(run, corpus, tmp_path, script, edits, world):
    copy = edited(tmp_path / "copy", script, *HEADS, *edits)
    result = run(copy, world, f"{OPTIONS} --data {corpus} --batch-size 6 --grad-accum {6 // world}",
                 expect_ok=False)
    assert set(result.statuses) <= {1, -15}
    words = "error: lm_head.parts" if script == "ddp.py" else "calls lm_head.parts"
    assert any(words in line for line in result.lines), result.output


# A loss across samples

CONTRAST = with_model("Contrast(args.config)", "Contrast", "gather_samples")


@pytest.mark.parametrize("command, world, mesh", sampled([
    ("ddp.py", 2, "mesh"), ("zero.py", 3, "mesh"), ("fsdp.py", 3, "mesh['dp_shard']"),
], [("fsdp.py", 3, "mesh['dp_shard']")]))
def test_a_loss_across_samples(run, corpus, tmp_path, command, world, mesh):
    options = f"{OPTIONS} --data {corpus}"
    expected = run(edited(tmp_path / "copy", "single.py", *CONTRAST), 0, options, out="one").curve()
    copy = edited(tmp_path / "copy", command, *CONTRAST, (
        "\n    # Optimizer", f"    model.gather = lambda z: gather_samples(z, {mesh})\n\n    # Opti"
        "mizer"))
    assert furthest(run(copy, world, options).curve(), expected) < 1e-10


# Weights that are used without their module


@pytest.mark.parametrize("script", sampled(["fsdp.py", "tp.py"], ["fsdp.py"]))
def test_a_weight_without_its_module_is_an_error_in_words(run, corpus, script):
    inject = ("before(common.model.Transformer, 'forward', lambda self, *args, **more: "
              "F.linear(torch.ones(1, 48).double(), self.model.embed_tokens.weight))")
    result = run(script, 2, f"{OPTIONS} --data {corpus}", inject=inject, expect_ok=False)
    words = f"{script}: error: a weight was used without calling its module"
    assert any(line.startswith(words) for line in result.lines)
    assert "Traceback" in result.output  # which says where


# An average of the weights (EMA)


def ema(named="model.named_parameters()", state="model.state_dict(keep_vars=True)"):
    return [
        ("    # Data\n", "    ema = {f\"ema.{name}\": torch.zeros_like(p) for name, p in "
         f"{named}}}\n\n    # Data\n"),
        (f"{state}, optimizer,", f"{state} | ema, optimizer,"),
        ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n"
         f"        for name, p in {named}:\n"
         "            ema[f\"ema.{name}\"].mul_(0.9).add_(p.detach(), alpha=0.1)\n"),
    ]


@pytest.mark.parametrize("script, edits", sampled([
    ("fsdp.py", ema()), ("tp.py", ema()),
    # Of the shards: a rank's copies of other ranks' rows arrive later, in the next forward pass
    ("zero.py", ema("shards.items()", "tensors_to_save(model, shards)")),
], [("fsdp.py", ema())]))
def test_an_average_of_the_weights_is_sharded_saved_and_resumed(
    run, corpus, tmp_path, script, edits
):
    """Of each parameter by torch.zeros_like: a DTensor where the parameter is one. A resume on
    other ranks ends in the average of one process."""
    options = f"{OPTIONS} --data {corpus}"
    whole = run(edited(tmp_path / "copy", "single.py", *ema()), 0, options, out="whole")
    copy = edited(tmp_path / "copy", script, *edits)
    run(copy, 2, options, inject="at(5, lambda: fail('killed'))", expect_ok=False)
    again = run(copy, 1 if script == "tp.py" else 3, options)
    assert "resuming after step 4" in again.output
    found, expected = (checkpoint_files.read(out / "step-00000006", "model.ema.")
                       for out in (again.out, whole.out))
    assert found.keys() == expected.keys() and len(found) > 10
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10)
        assert tensor.abs().max() > 0


# Adapters (LoRA): the optimizer and the checkpoints get what is trained
LORA = with_model("adapt(Transformer(args.config))", "adapt", "adapted_plan")
TRAINED = [
    ("decay_groups(model.parameters(),", "decay_groups([p for p in model.parameters() if "
     "p.requires_grad],"),
    ("model.state_dict(keep_vars=True), optimizer,", "{k: p for k, p in model.state_dict("
     "keep_vars=True).items() if p.requires_grad}, optimizer,"),
]
TRAINED_ONLY = {
    "zero.py": [("tensors_to_save(model, shards), optimizer,", "shards, optimizer,")],
    "pp.py": [
        ("decay_groups(parameters,", "decay_groups([p for p in parameters if p.requires_grad],"),
        ("part.state_dict(keep_vars=True).items()}",
         "part.state_dict(keep_vars=True).items() if v.requires_grad}"),
    ],
    "tp.py": [*TRAINED, (
        "llama_plan(args.sequence_parallel))  # TP", "adapted_plan(llama_plan(args.sequence_parall"
        "el), Shard(1) if args.sequence_parallel else Replicate(), Replicated()))  # TP",
    )],
}


def lora(folder, script):
    return edited(folder, script, *LORA, *TRAINED_ONLY.get(script, TRAINED))


@pytest.mark.parametrize("script, world", sampled([
    ("ddp.py", 2), ("zero.py --stage 1", 2), ("zero.py", 2), ("fsdp.py", 3), ("tp.py", 2),
    ("tp.py --no-sequence-parallel", 2), ("cp.py", 2), ("pp.py", 2), ("hybrid_3d.py --cp 2", 4),
], [("tp.py", 2)]))
def test_adapters(run, corpus, tmp_path, script, world):
    """Checkpoints hold the adapters only; another script resumes them."""
    options = f"{OPTIONS} --data {corpus}"
    script, *more = script.split(" ", 1)
    expected = run(lora(tmp_path / "copy", "single.py"), 0, options, out="one")
    copy = lora(tmp_path / "copy", script)
    found = run(f"{copy} {' '.join(more)}", world, options)
    assert furthest(found.curve(), expected.curve()) < 1e-10
    saved, other = (checkpoint_files.read(run.out / "step-00000006") for run in (found, expected))
    assert saved.keys() == other.keys() and len(saved) == 2 * 7 * 2
    assert all(".A." in name or ".B." in name for name in saved)
    again = run(lora(tmp_path / "copy", "fsdp.py"), 2, f"{options} --resume-from 4")
    assert furthest(again.curve(), expected.curve()) < 1e-10


# A condition in a pipeline: it is the first token of what travels
CONDITIONED = with_model("Conditioned(args.config)", "Conditioned")
CONDITION = "inputs[:, 0] % 4"
IN_ONE = [("model(inputs, targets)", f"model(inputs, {CONDITION}, targets)")]
IN_STAGES = [
    ("    check_stages(whole,", "    for stage, part in zip(own, parts):\n        if stage:\n"
     "            del part.model.classes\n    check_stages(whole,"),
    ("        hidden = torch.empty(*tokens.shape, args",
     "        classes = torch.empty(len(tokens), dtype=torch.int64)\n"
     "        hidden = torch.empty(len(tokens), 1 + args.seq_len, args"),
    ("len(stage_layers), M, tokens, hidden", "len(stage_layers), M, (tokens, classes), hidden"),
    ("schedule.eval(inputs, ", f"schedule.eval(inputs, {CONDITION}, "),
    ("                inputs, targets=", f"                inputs, {CONDITION}, targets="),
]


@pytest.mark.parametrize("options", sampled(
    ["", "--schedule interleaved1f1b", "--schedule zbv"], [""]
))
def test_a_condition_in_a_pipeline(run, corpus, tmp_path, options):
    one = edited(tmp_path / "copy", "single.py", *CONDITIONED, *IN_ONE)
    expected = run(one, 0, f"{OPTIONS} --data {corpus}", out="one").curve()
    stages = edited(tmp_path / "copy", "pp.py", *CONDITIONED, *IN_STAGES)
    found = run(stages, 2, f"{OPTIONS} --data {corpus} {options}").curve()
    assert furthest(found, expected) < 1e-10


TP_OF_CONDITION = [
    ('    return {\n        "model.embed', """    return {
        "model.classes": Replicated(),
        "model.layers.*.shift": Replicated(partial_gradients=sequence_parallel),
        "model.embed"""), *IN_ONE,
]


@pytest.mark.parametrize("options", ["", "--no-sequence-parallel"])
def test_a_condition_in_tensor_parallelism(run, corpus, tmp_path, options):
    """Every rank computes it, and adds it to a part of the sequence."""
    one = edited(tmp_path / "copy", "single.py", *CONDITIONED, *IN_ONE)
    expected = run(one, 0, f"{OPTIONS} --data {corpus}", out="one").curve()
    copy = edited(tmp_path / "copy", "tp.py", *CONDITIONED, *TP_OF_CONDITION)
    found = run(copy, 2, f"{OPTIONS} --data {corpus} {options}").curve()
    assert furthest(found, expected) < 1e-10


# A tie of the first and the last stage: each has a copy, which must stay equal. Not for schedules
# in a V: there both stages are on rank 0
TIED = [(
    "    parameters = [parameter for part",
    """    tied = [
        module.weight for part in parts for module in (part.model.embed_tokens, part.lm_head)
        if not isinstance(module, nn.Identity)
    ]
    ends = dist.new_group([0, n - 1])
    for weight in tied:
        dist.broadcast(weight.data, 0, group=ends)
    parameters = [parameter for part""",
), (
    "        grad_norm = clip_over_stages(parameters,",
    """        for weight in tied:
            dist.all_reduce(weight.grad, group=ends)
        second = {weight for weight in tied if rank > 0}
        once = [parameter for parameter in parameters if parameter not in second]
        grad_norm = clip_over_stages(once,""",
), (
    "        optimizer.step()\n",
    """        torch.nn.utils.clip_grads_with_norm_(second, args.max_norm, grad_norm)
        optimizer.step()
""",
)]


@pytest.mark.parametrize("world, options", sampled(
    [(2, ""), (3, ""), (2, "--schedule interleaved1f1b")], [(3, "")]
))
def test_a_trained_tie_across_stages(run, once, corpus, tmp_path, world, options):
    """Checkpoints have the weight under both names, and another script resumes them."""
    expected = once("single.py", 0, OPTIONS, inject="tied()").curve()
    copy = edited(tmp_path / "copy", "pp.py", *TIED)
    found = run(copy, world, f"{OPTIONS} --data {corpus} {options}")
    assert furthest(found.curve(), expected) < 1e-10
    weights = checkpoint_files.read(found.out / "step-00000006")
    assert torch.equal(weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    again = run("ddp.py", 2, f"{OPTIONS} --data {corpus} --resume-from 4", inject="tied()")
    assert furthest(again.curve(), expected) < 1e-10


# Attention of one's own


@pytest.mark.parametrize("heads", sampled(["", "--num-key-value-heads 1"], [""]))
def test_ulysses_around_an_attention_of_ones_own(run, corpus, tmp_path, heads):
    """With a sliding window, a soft cap and ALiBi, whose slopes are those of a rank's heads."""
    one = edited(tmp_path / "copy", "single.py", *WINDOWS)
    expected = run(one, 0, f"{OPTIONS} --data {corpus} {heads}", out="one").curve()
    ulysses = edited(
        tmp_path / "copy", "cp.py", *WINDOWS,
        ("replaces=plain_attention", "replaces=own_attention"),
        (" attention=plain_attention)", " attention=functools.partial(own_attention, first_head="
         "cp_rank * args.config.num_attention_heads // n))"),
    )
    options = f"{OPTIONS} --data {corpus} {heads} --attention ulysses"
    assert furthest(run(ulysses, 2, options).curve(), expected) < 1e-10


# Optimizers


def optimizers(new, script):
    """The edits that put the list ``new`` in place of AdamW; P stands for the parameters."""
    parameters = {"zero.py": "shards.values()", "pp.py": "parameters"}
    parameters = parameters.get(script, "model.parameters()")
    return [
        (f"""    optimizer = torch.optim.AdamW(
        decay_groups({parameters}, args.weight_decay), args.lr, args.betas, fused=True
    )
""", f"    optimizer = {new}\n".replace("P", parameters)),
        ("        optimizer.step()\n", "        [each.step() for each in optimizer]\n"),
        ("        optimizer.zero_grad()\n", "        [each.zero_grad() for each in optimizer]\n"),
    ]


SGD = "[torch.optim.SGD(P, 0.1, momentum=0.9, nesterov=True, fused=False)]"
MUON = ("[torch.optim.Muon([p for p in P if p.ndim == 2], 0.02), "
        "torch.optim.AdamW([p for p in P if p.ndim < 2], args.lr)]")
# torch's Muon computes in bfloat16. Here in float64: what differs otherwise is rounding error.
UNROUNDED = "unrounded_muon()"


@pytest.mark.parametrize("new, inject", [(SGD, ""), (MUON, UNROUNDED)], ids=["SGD", "Muon"])
@pytest.mark.parametrize("script, world", sampled(
    [("ddp.py", 2), ("zero.py", 2), ("fsdp.py", 3), ("tp.py", 2), ("pp.py", 2)], [("fsdp.py", 3)]
))
def test_optimizers_of_whole_matrices(run, corpus, tmp_path, script, world, new, inject):
    options = f"{OPTIONS} --data {corpus}"
    one = edited(tmp_path / "copy", "single.py", *optimizers(new, "single.py"))
    expected = run(one, 0, options, out="one", inject=inject).curve()
    copy = edited(tmp_path / "copy", script, *optimizers(new, script))
    assert furthest(run(copy, world, options, inject=inject).curve(), expected) < 1e-10


# A run that has finished


@pytest.mark.parametrize("command, world", [("single.py", 0), ("zero.py", 2)])
def test_a_finished_run_is_done(run, corpus, command, world):
    """Started again it ends with status 0 and a line that says so, and writes nothing."""
    options = f"{OPTIONS} --data {corpus}"
    first = run(command, world, options)
    before = {path: path.stat().st_mtime_ns for path in first.out.rglob("*") if path.is_file()}
    again = run(command, world, options)
    assert again.lines[-1] == (
        f"{first.out} holds a run that has finished step 6, its last: raise --steps to train on, "
        f"or start a new run with --no-resume or another --out")
    after = {path: path.stat().st_mtime_ns for path in first.out.rglob("*") if path.is_file()}
    each_start = "lock", "run-id"
    assert after.keys() == before.keys() and all(
        after[path] == before[path] for path in before if path.name not in each_start)
    less = run(command, world, f"{options} --steps 5", expect_ok=False)
    assert "finished step 6, and --steps is 5: raise --steps" in less.lines[-1]
    data = next((first.out / "step-00000006").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-9])
    broken = run(command, world, options, expect_ok=False)
    assert "is damaged" in broken.lines[-1]
