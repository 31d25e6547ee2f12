"""Promise 1, with a loss of one's own: the recipes of docs/copying.md, in copies of the scripts,
beside the same in one process."""

import pytest

from tests.support.compare import assert_near, furthest, read
from tests.support.processes import SMALL, edited
from tests.support.sample import sampled

OPTIONS = f"{SMALL} --steps 3 --log-every 1 --save-every 3 --dtype float64 --grad-accum 2"
PORTED = ("\nimport torch\n", "\nimport torch\nfrom tests.support.ported import *\n")

# Over targets: a z-loss. The head adds it to the sum that the loop divides by the targets.
TARGETS = [PORTED, ("Transformer(args.config)", "with_z_loss(Transformer(args.config))")]
OF_SPLIT = ("model.lm_head.loss = loss_of_split_logits",
            "model.lm_head.loss = with_z_loss_of(loss_of_split_logits)")

# Over targets with weights of their own, by class: divided by the sum of the weights
WEIGHTED = [PORTED, ("Transformer(args.config)", "with_class_weights(Transformer(args.config))"),
            ("count_targets(batch", "sum_of_weights(batch")]
FLOAT_COUNT = ("torch.ones((), dtype=torch.int64", "torch.ones((), dtype=torch.float64")

# Over weights: its gradients come after those of the ranks have been added up, so each rank adds
# the whole of it. In the loss a rank has its part.
PENALTY = """\
        penalty = sum(p.square().mean() for p in {} if p.ndim > 1)
        penalty.backward()
        loss += penalty.detach(){}
        grad_norm = """


def weights(part="", parameters="model.parameters()"):
    return [("        grad_norm = ", PENALTY.format(parameters, part))]


# Over samples, or sequences: the router's loss of DeepSeek-V2 (arXiv:2405.04434)
ROUTER = [
    PORTED, ("use_experts(Transformer(args.config))",
             "with_router_loss(use_experts(Transformer(args.config)), args.seq_len)"),
    ("model(inputs, targets) / count",
     "model(inputs, targets) / count + router_loss(model) / args.batch_size"),
]

# A model that returns a dict: the loop computes its loss, or what a pipeline calls
DICT = [PORTED, ("Transformer(args.config)", "ReturnsDict(args.config)")]
IN_LOOP = [*DICT, ("model(inputs, targets)",
                   "next_token_loss(model(inputs)['logits'], targets)"),
           ("import (\n    Transformer,", "import (\n    next_token_loss, Transformer,")]
IN_FSDP = [*IN_LOOP[:-1], ("import Transformer,", "import next_token_loss, Transformer,")]
OUTPUT = "torch.empty(*tokens.shape, args.config.vocab_size, dtype=args.param_dtype)"
IN_PIPELINE = [
    *DICT, ("output = torch.empty((), dtype=args.param_dtype)", f"output = {OUTPUT}"),
    ("import (\n    Transformer,", "import (\n    next_token_loss, Transformer,")]
IN_PP = [*IN_PIPELINE,
         ("    for part in parts:\n", "    for part in parts:\n        returns_tensor(part)\n"),
         ("lambda micro_loss, targets: micro_loss / count",
          "lambda logits, targets: next_token_loss(logits, targets) / count")]
IN_HYBRID = [*IN_PIPELINE,
             ("    usage = compose(", "    returns_tensor(model)\n    usage = compose("),
             ("def loss_fn(micro_loss, targets):", "def loss_fn(logits, targets):"),
             ("return micro_loss / count", "return next_token_loss(logits, targets) / count")]

ONE = {"dict": IN_LOOP, "targets": TARGETS, "classes": WEIGHTED, "weights": weights(),
       "router": ROUTER}
ROWS = [
    ("targets", "ddp.py", 2, TARGETS), ("targets", "zero.py", 2, TARGETS),
    ("targets", "fsdp.py --replicate 2", 4, TARGETS), ("targets", "tp.py", 2, [*TARGETS, OF_SPLIT]),
    ("targets", "cp.py", 2, TARGETS), ("targets", "pp.py", 2, TARGETS),
    ("targets", "hybrid_3d.py --tp 2 --pp 2", 4, [*TARGETS, OF_SPLIT]),
    ("classes", "ddp.py", 2, WEIGHTED), ("classes", "fsdp.py", 2, WEIGHTED),
    ("classes", "cp.py", 2, WEIGHTED), ("classes", "pp.py", 2, [*WEIGHTED, FLOAT_COUNT]),
    ("weights", "ddp.py", 2, weights(" / n")),
    ("weights", "zero.py", 2, weights(".full_tensor() / n")),
    ("weights", "fsdp.py --replicate 2", 4, weights(".full_tensor() / n")),
    ("weights", "fsdp.py --no-reshard-after-forward", 2, weights(".full_tensor() / n")),
    ("weights", "tp.py", 2, weights(".full_tensor()")),
    ("weights", "cp.py", 2, weights(" / n")),
    ("weights", "pp.py", 2, weights("", "parameters")),
    ("weights", "hybrid_3d.py --tp 2 --pp 2", 4,
     weights(".full_tensor() / meshes.shard.size()")),
    ("weights", "hybrid_3d.py --cp 2 --tp 2", 4,
     weights(".full_tensor() / meshes.shard.size()")),
    ("dict", "fsdp.py", 2, IN_FSDP), ("dict", "tp.py", 2, IN_LOOP), ("dict", "pp.py", 2, IN_PP),
    ("dict", "hybrid_3d.py --tp 2 --pp 2", 4, IN_HYBRID),
    ("dict", "hybrid_3d.py --cp 2", 2, IN_HYBRID),
    ("router", "ep.py", 2, ROUTER), ("router", "ep.py --ep 2", 4, ROUTER),
    ("router", "ep.py --ep 1 --activation-checkpointing", 2, ROUTER),
]
SAMPLE = [row for row in ROWS if row[:2] in (
    ("targets", "tp.py"), ("weights", "ddp.py"), ("weights", "zero.py"), ("router", "ep.py"),
    ("classes", "fsdp.py"))]


@pytest.mark.parametrize("kind, command, world, edits", sampled(ROWS, SAMPLE))
def test_a_loss_of_its_own(once, tmp_path_factory, kind, command, world, edits):
    script, _, more = command.partition(" ")
    one, experts = ("ep.py", "--num-experts 4") if kind == "router" else ("single.py", "")
    base = tmp_path_factory.getbasetemp()
    single = edited(base / f"{kind}-on-one", one, *ONE[kind])
    copy = edited(base / f"{kind}-on-ranks", script, *edits)
    expected = once(single, 0, f"{OPTIONS} {experts}")
    found = once(copy, world, f"{OPTIONS} {experts} {more}")
    if kind != "dict":
        plain = once(one, 0, f"{OPTIONS} {experts}")
        assert furthest(plain.curve(), expected.curve()) > 1e-4
    assert furthest(found.curve(), expected.curve()) < 1e-10
    assert_near(*(read(result.out / "step-00000003") for result in (found, expected)))
