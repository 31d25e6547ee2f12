"""Edits that anybody makes to bring a model of their own: exact, or refused in words."""

import importlib
from unittest import mock

import pytest
import torch
from torch import nn

import cp
from common.data import load_steps
from common.model import Attention, plain_attention
from common.options import SettingError
from tests.support.compare import assert_near, furthest, read
from tests.support.on_ranks import on_ranks
from tests.support.processes import Result, edited
from tests.support.sample import sampled

OPTIONS = ("--hidden-size 48 --intermediate-size 80 --num-hidden-layers 2 --num-attention-heads 4 "
           "--num-key-value-heads 2 --seq-len 32 --batch-size 12 --steps 3 --log-every 1 "
           "--warmup-steps 3 --save-every 2 --dtype float64")


def with_model(new):
    """The edits that put the model ``new``, of tests/support/ported.py, in place of ours."""
    return [("\nimport torch\n", "\nimport torch\nfrom tests.support.ported import *\n"),
            ("Transformer(args.config)", new)]


TIE = [("        model = Transformer(args.config).to(args.param_dtype)\n",
        "        model = Transformer(args.config).to(args.param_dtype)\n"
        "        model.lm_head.weight = model.model.embed_tokens.weight\n")]
TIED_UNITS = [("        [model.model.embed_tokens], *([layer]", "        *([layer]"),
              ("[model.model.norm, model.lm_head],",
               "[model.model.embed_tokens, model.model.norm, model.lm_head],")]

# Attention of one's own: a sliding window, a soft cap, and ALiBi's slopes of a rank's own heads
WINDOWS = with_model("with_own_attention(Transformer(args.config))")
OWN_HEADS = [
    ("replaces=plain_attention", "replaces=own_attention"),
    (" attention=plain_attention)", " attention=functools.partial(own_attention, first_head="
     "cp_rank * args.config.num_attention_heads // n))"),
]

# Parts that some samples do not use: a micro-batch of one sample uses one of the heads. They are
# compared with one process in test_check.py
HEADS = with_model("with_heads(Transformer(args.config))")
UNITS = "        [model.model.norm, model.lm_head],\n"
DATA_PARALLEL = {
    "ddp.py": [("gradient_as_bucket_view=True",
                "gradient_as_bucket_view=True, find_unused_parameters=True")],
    "zero.py": [("        # ZeRO: the norm", "        usage.drop_unused()\n        # ZeRO: the norm")],
    "fsdp.py": [("        # FSDP: the norm", "        usage.drop_unused()\n        # FSDP: the norm")],
}

# A condition: in a pipeline it is the first token of what travels. Under tensor parallelism every
# rank computes it, and adds it to a part of the sequence
CONDITIONED = with_model("Conditioned(args.config)")
CONDITION = "inputs[:, 0] % 4"
IN_ONE = [("model(inputs, targets)", f"model(inputs, {CONDITION}, targets)")]
IN_STAGES = [
    ("    check_stages(whole,", "    for stage, part in zip(stages, parts):\n        if stage:\n"
     "            del part.model.classes\n    check_stages(whole,"),
    ("        hidden = torch.empty(*tokens.shape, args",
     "        classes = torch.empty(len(tokens), dtype=torch.int64)\n"
     "        hidden = torch.empty(len(tokens), 1 + args.seq_len, args"),
    ("len(stage_layers), M, tokens, hidden", "len(stage_layers), M, (tokens, classes), hidden"),
    ("schedule.eval(inputs, ", f"schedule.eval(inputs, {CONDITION}, "),
    ("                inputs, targets=", f"                inputs, {CONDITION}, targets="),
]
TP_OF_CONDITION = [
    ('    return {\n        "model.embed', """    return {
        "model.classes": Replicated(),
        "model.layers.*.shift": Replicated(partial_gradients=sequence_parallel),
        "model.embed"""), *IN_ONE,
]

# Norms of queries and keys. Of (B, T, heads, K) a rank has its own heads
NORMS = with_model("with_norms(Transformer(args.config))")
TP_OF_NORMS = [('        "model.layers.*.self_attn.o_proj"', """\
        "model.layers.*.self_attn.[qk]_norm": SequenceParallel(
            sequence_dim=2, use_local_output=True),
        "model.layers.*.self_attn.o_proj\"""")]

# A plain head: the loop computes the loss of its logits, under tensor parallelism in shards
PLAIN_HEAD = with_model("with_plain_head(Transformer(args.config))") + [
    ("model(inputs, targets)", 'torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), '
     'targets.flatten(), reduction="sum")'), (", head=model.lm_head)\n", ")\n")]
TP_OF_HEAD = [
    ("output_layouts=Replicate()),\n    }", "output_layouts=Shard(-1),\n"
     "                                   use_local_output=False),\n    }"),
    ("loss += micro_loss.detach()", "loss += micro_loss.detach().full_tensor()")]

# A recurrence: each rank adds what comes from the parts of the sequence before its own
RECURRENCE = with_model("with_recurrence(Transformer(args.config))")
CP_OF_RECURRENCE = [("    # CP: the positions in", """    for layer in layers if n > 1 else []:
        layer.mesh = mesh["cp"]
    # CP: the positions in""")]

# A model of one's own in a pipeline: six places name its parts
OWN = with_model("Own(args.config)")
OWN_IN_ONE = [("model.model.layers.values()", "model.blocks.values()"),
              (", head=model.lm_head)", ")")]
OWN_STAGES = [
    ("len(whole.model.layers), n * v", "len(whole.blocks), n * v"),
    ("layers = part.model.layers.values()", "layers = part.blocks.values()"),
    (", head=part.lm_head)", ")"),
    ("(model.lm_head, model.model.layers[\"0\"])", "(model.head, model.blocks[\"0\"])"),
    ("""    for name in list(model.model.layers):
        if int(name) not in layers[stage]:
            del model.model.layers[name]
    if stage > 0:
        model.model.embed_tokens = nn.Identity()
    if stage < len(layers) - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
""", """    for name in list(model.blocks):
        if int(name) not in layers[stage]:
            del model.blocks[name]
    if stage > 0:
        model.embed, model.places = nn.Identity(), nn.Identity()
    if stage < len(layers) - 1:
        model.norm, model.head = nn.Identity(), nn.Identity()
"""),
]


# Optimizers
def optimizers(new, parameters="model.parameters()"):
    """The edits that put the list ``new`` in place of AdamW; P stands for the parameters."""
    return [
        (f"""    optimizer = torch.optim.AdamW(
        decay_groups({parameters}, args.weight_decay), args.lr, args.betas, fused=True
    )
""", f"    optimizer = {new}\n".replace("P", parameters)),
        ("        optimizer.step()\n", "        [each.step() for each in optimizer]\n"),
        ("        optimizer.zero_grad()\n", "        [each.zero_grad() for each in optimizer]\n"),
    ]


TWO = ("[torch.optim.SGD([p for p in P if p.ndim == 2], 0.05, 0.9, nesterov=True), "
       "torch.optim.AdamW([p for p in P if p.ndim < 2], args.lr)]")

TRAINED_IF = ("after(common.model.Transformer, '__init__', lambda _, model, config: ["
              "p.requires_grad_({}) for name, p in model.named_parameters()])")

KINDS = {  # edits of all scripts; more of single.py and others; what is injected
    "frozen": ([], {}, TRAINED_IF.format("p.ndim == 2 and not {'1', 'embed_tokens'} & "
                                         "set(name.split('.'))")),
    "tied": (TIE, {"zero.py": TIED_UNITS}, ""),
    "only layer 1": ([], {}, TRAINED_IF.format("'layers.1.' in name")),
    "windows": (WINDOWS, {"cp.py": OWN_HEADS}, ""),
    "condition": (CONDITIONED,
                  {"single.py": IN_ONE, "pp.py": IN_STAGES, "tp.py": TP_OF_CONDITION}, ""),
    "norms": (NORMS, {"tp.py": TP_OF_NORMS}, ""),
    "plain head": (PLAIN_HEAD, {"tp.py": TP_OF_HEAD}, ""),
    "recurrence": (RECURRENCE, {"cp.py": CP_OF_RECURRENCE}, ""),
    "own stages": (OWN, {"single.py": OWN_IN_ONE, "pp.py": OWN_STAGES}, ""),
    "two optimizers": ([], {
        "single.py": optimizers(TWO), "zero.py": optimizers(TWO),
    }, ""),
}
SAMPLE = [  # test_check.py has ties, and heads that some samples do not use
    ("frozen", "zero.py", 2), ("only layer 1", "pp.py", 2),
    ("windows", "cp.py --attention ulysses", 2), ("condition", "pp.py", 2),
    ("condition", "tp.py", 2), ("two optimizers", "single.py", 0), ("norms", "tp.py", 2),
    ("own stages", "pp.py", 2),
]
ROWS = SAMPLE + [
    ("frozen", "tp.py", 2), ("tied", "tp.py", 2), ("tied", "zero.py", 2),
    ("only layer 1", "hybrid_3d.py --pp 2", 2),
    ("condition", "tp.py --no-sequence-parallel", 2), ("two optimizers", "zero.py", 2),
    ("norms", "tp.py --no-sequence-parallel", 2), ("plain head", "tp.py", 2),
    ("plain head", "tp.py --no-sequence-parallel", 2),
    ("recurrence", "cp.py --attention ulysses", 2), ("own stages", "pp.py --schedule zbv", 2),
]


@pytest.mark.parametrize("kind, command, world", sampled(ROWS, SAMPLE))
def test_it_is_trained_as_by_one_process(once, tmp_path_factory, kind, command, world):
    """Losses, norms and weights; those of the plain model differ. Then it resumes its own
    checkpoint and that of one process."""
    script, _, more = command.partition(" ")
    edits, own_edits, inject = KINDS[kind]
    folder = tmp_path_factory.getbasetemp() / kind.replace(" ", "-")
    single, copy = (edited(folder, name, *edits, *own_edits.get(name, []))
                    for name in ("single.py", script))
    expected = once(single, 0, OPTIONS, inject=inject)
    found = once(copy, world, f"{OPTIONS} {more}",
                 inject=f"{inject}; resumed(['{expected.out}'])".strip("; "))
    plain = once("single.py", 0, OPTIONS).curve()
    assert furthest(expected.curve(), plain) > 1e-3
    assert furthest(found.curve(), expected.curve()) < 1e-10
    last = "step-00000003"
    assert_near(*(read(result.out / last) for result in (found, expected)))
    if kind == "two optimizers":
        assert expected.history[2]["lr"] == 0.05  # of the first group, at its peak
    own, of_one = (Result([0], "", found.out / f"again-{i}").curve() for i in (0, 1))
    assert own == found.curve()[2:]  # bit for bit
    assert furthest(of_one, expected.curve()[2:]) < 1e-10


NESTED = [("\nimport torch\n", "\nimport torch\nfrom tests.support.ported import *\n"),
          ("dataset = open_dataset(args)", "dataset = Nested(open_dataset(args))")]
UNPACKED = [("        seed_step(", "        batch = [(x['text']['tokens'], x['targets']) "
             "for x in batch]\n        seed_step(")]
KEYWORDS = [("Transformer(args.config)", "TakesText(args.config)"),
            ("(batch, dist", "([(None, x['targets']) for x in batch], dist"),
            ("(inputs, targets) in enum", "micro_batch in enum"),
            ("x, y = (row.expand(samples, -1).to(device) for row in dataset[0])",
             "sample = default_collate([dataset[0]] * samples)"),
            ("replica.eval()(x, y)", "replica.eval()(**sample)"),
            ("replica(inputs, targets)", "replica(**micro_batch)")]
OF_SCRIPTS = {"single.py": 0, **dict.fromkeys(
    "ddp.py zero.py fsdp.py tp.py cp.py pp.py hybrid_3d.py ep.py".split(), 2)}


@pytest.mark.parametrize("script", sampled([*OF_SCRIPTS], ["ddp.py"]))
def test_samples_may_be_dicts_in_dicts(once, tmp_path, script):
    """In ddp.py the model takes them as keywords, elsewhere the loop takes out what it needs."""
    more = " --num-experts 4" if script == "ep.py" else ""
    edits = NESTED + (KEYWORDS if script == "ddp.py" else UNPACKED)
    found = once(edited(tmp_path / "copy", script, *edits), OF_SCRIPTS[script], OPTIONS + more)
    single = once("ep.py" if more else "single.py", 0, OPTIONS + more)
    assert furthest(found.curve(), single.curve()) < 1e-10


@on_ranks(2)
def test_a_step_that_leaves_out_a_part_is_refused():
    """In the last step no rank uses attention: the script ends in it, not in a next one."""
    left_out = "in step 3 a rank left out parameters: call usage.drop_unused"
    attention = mock.patch.object(Attention, "forward", Attention.forward)

    def skip_in_the_last(*args):
        for step, batch in load_steps(*args):
            if step == 2:
                Attention.forward = lambda layer, x, *_: x
            yield step, batch

    for command, words in {
        **dict.fromkeys(("ddp.py", "cp.py"), "find_unused_parameters=True"),
        **dict.fromkeys(("zero.py", "fsdp.py", "ep.py --num-experts 4", "hybrid_3d.py"), left_out),
    }.items():
        script, *options = f"{command} {OPTIONS} --data {__file__}".split()
        module = importlib.import_module(script.removesuffix(".py"))
        with (attention, mock.patch.object(module, "load_steps", skip_in_the_last),
              pytest.raises((SettingError, RuntimeError), match=words)):
            module.main(options)


@pytest.mark.parametrize("attention", [cp.ring_attention, cp.allgather_attention])
def test_what_an_attention_does_not_compute_is_refused(attention):
    q, k, v = torch.zeros(3, 1, 2, 4, 8)
    for keyword, value in {"attn_mask": torch.ones(4, 4).tril(), "dropout_p": 0.1,
                           "window_size": 7}.items():
        words = f"{attention.__name__} computes causal or full .* no {keyword}: .* ulysses_att"
        with pytest.raises(SettingError, match=words):
            attention(q, k, v, group=None, is_causal=True, **{keyword: value})


class Own(nn.Module):
    def __init__(self, attention=plain_attention, inner=None):
        super().__init__()
        self.attention, self.inner = attention, inner


def test_attention_is_set_wherever_it_is_read():
    """In the whole model: nothing that needs other positions is forgotten."""
    for words, model in {
        "no module of Sequential has plain_attention as": nn.Sequential(nn.Linear(2, 2)),
        r"ab \(Own\) computes attention by sum": nn.ModuleDict({"aa": Own(), "ab": Own(torch.sum)}),
        "1 .* looks at other pos": nn.Sequential(Own(), nn.Conv1d(2, 2, 3)),
        "0 .* looks at other pos": nn.Sequential(nn.GRU(2, 2), Own()),
    }.items():
        with pytest.raises(SettingError, match=words):
            cp.set_attention(model, cp.ring_attention, None, plain_attention, without=["a"])
    model = nn.Sequential(Own(inner=Own()), nn.Conv1d(2, 2, 1), nn.ModuleDict({"a": nn.GRU(2, 2)}),
                          Own(inner=Own(torch.sum)))
    cp.set_attention(model, cp.ring_attention, "group", replaces=plain_attention,
                     without=["2.a", "3.inner"])
    for module in (model[0], model[0].inner, model[3]):
        assert module.attention.func is cp.ring_attention
    assert model[3].inner.attention is torch.sum
