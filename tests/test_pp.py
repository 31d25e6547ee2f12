"""pp.py: every schedule follows single.py, sends what it says, and refuses what cannot work."""

import argparse
import collections
import itertools
import shutil
import types

import pytest
import torch
from torch.distributed.pipelining.schedules import _Action, _ComputationType

import pp
from common import checkpoint
from common.errors import SettingError
from common.model import ModelConfig
from tests.sample import sampled, thorough
from tests.test_same_run import BASE, furthest

# 7 layers, embedding and head are 9 loads: no number of stages that is tried here divides them.
MODEL = (
    "--hidden-size 32 --intermediate-size 48 --num-hidden-layers 7 --num-attention-heads 4 "
    "--num-key-value-heads 2"
)
DATA = "--seq-len 16 --batch-size 12 --steps 20 --log-every 1 --warmup-steps 3 --save-every 0"
EXACT = f"{MODEL} {DATA} --dtype float64"

# World size, schedule, and how the batch is cut: 3 and 6 are no multiples of 2 and 4.
RUNS = [
    (2, "gpipe", "--grad-accum 2 --microbatches 3"),
    (2, "1f1b", "--grad-accum 2 --microbatches 3"),
    (2, "interleaved1f1b", "--grad-accum 2 --microbatches 3"),
    (2, "loopedbfs", "--grad-accum 2 --microbatches 3 --stages-per-rank 3"),
    (2, "zerobubble", "--grad-accum 2 --microbatches 3"),
    (2, "zbv", "--grad-accum 2 --microbatches 2"),
    (2, "dualpipev", "--grad-accum 2 --microbatches 6"),
    (4, "gpipe", "--grad-accum 2 --microbatches 2"),
    (4, "1f1b", "--grad-accum 2 --microbatches 6"),
    (4, "interleaved1f1b", "--grad-accum 2 --microbatches 6"),
    (4, "loopedbfs", "--grad-accum 2 --microbatches 3"),
    (4, "zerobubble", "--grad-accum 2 --microbatches 2"),
    (4, "zbv", "--grad-accum 2 --microbatches 3"),
    (4, "dualpipev", "--grad-accum 2 --microbatches 8 --batch-size 16"),
    (3, "zerobubble", "--stages-per-rank 1 --microbatches 4 --workers 1"),
    (1, "zbv", ""),
]
SAMPLE = [RUNS[i] for i in (3, 5, 8, 14)]  # without --all
SENDS = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}  # of rank 0, in hidden states of a batch


@pytest.mark.parametrize("world_size, schedule, options", sampled(RUNS, SAMPLE))
def test_equals_single(run, single, corpus, world_size, schedule, options):
    """Loss and norm of each step; what is held and sent is what theory says, to the byte."""
    result = run("pp.py", world_size, f"{EXACT} --data {corpus} --schedule {schedule} {options}")
    batch_size = 16 if "--batch-size 16" in options else 12
    assert furthest(result.curve(), single(f"{EXACT} --batch-size {batch_size}")) < 1e-10

    summary, theory = result.summary, result.summary["theory"]
    sent = collections.Counter()
    for entry in summary["collectives"]:
        sent[entry["collective"]] += entry["bytes"]
    stages = int(options.partition("--stages-per-rank ")[2][:1] or 2)  # of a rank
    sends = 0 if world_size == 1 else SENDS.get(schedule, 2 * stages - 1)
    assert sent.get("send", 0) == theory["sent"]["bytes"] == sends * batch_size * 16 * 32 * 8
    assert sent["all-reduce"] == 2 * 8 * 2 * (world_size - 1) / world_size  # the norm and the loss
    for kind in ("parameters", "gradients"):
        assert summary["held"][kind] == theory[kind]["bytes"] > 0


@thorough
def test_float32_follows_within_rounding(run, corpus):
    options = f"{BASE} --data {corpus}"
    reference = run("single.py", 0, options, out="single").curve()
    assert furthest(run("pp.py", 2, f"{options} --schedule zerobubble").curve(), reference) < 5e-4


@thorough
def test_bfloat16_learns(run, corpus):
    options = f"{BASE} --data {corpus} --dtype bfloat16 --steps 16 --lr 0.02 --schedule zbv"
    losses = [loss for (loss,) in run("pp.py", 2, options).curve("loss")]
    assert losses[0] > 5.4 and losses[-1] < 3.2


@thorough
def test_compiled_and_checkpointed_layers_follow(run, corpus):
    options = f"{BASE} --data {corpus} --dtype float64 --activation-checkpointing"
    reference = run("single.py", 0, options, out="single").curve()
    result = run("pp.py", 2, f"{options} --compile --schedule interleaved1f1b --microbatches 2")
    assert furthest(result.curve(), reference) < 1e-10


@thorough
def test_checkpoints_move_between_single_and_pipelines(run, corpus, tmp_path):
    """5 steps each: one process, a V of 2, a loop of 4, one process again."""
    options = f"{EXACT} --save-every 5 --keep 9 --data {corpus}"
    whole = run("single.py", 0, options, out="whole")
    shutil.copytree(whole.out, tmp_path / "out")
    for step, script, world_size, schedule in [
        (5, "pp.py", 2, ["--schedule", "zbv"]), (10, "pp.py", 4, ["--schedule", "interleaved1f1b"]),
        (15, "single.py", 0, []),
    ]:
        for later in range(step + 5, 25, 5):
            shutil.rmtree(tmp_path / "out" / f"step-{later:08d}")
        result = run(script, world_size, [*options.split(), *schedule])
        assert f"resuming after step {step}" in result.output
        assert furthest(result.curve(), whole.curve()) < 1e-10
    last, expected = (checkpoint.read(out / "step-00000020", prefix="")
                      for out in (result.out, whole.out))
    assert last.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(last[name], tensor, rtol=0, atol=1e-10)


def test_the_picture(run, corpus):
    result = run("pp.py", 4, f"{MODEL} {DATA} --steps 1 --data {corpus} --schedule zbv "
                             "--microbatches 6")
    assert result.lines[0] == "pp.py: 4 processes on cpu (gloo), rank grid pp 4 x dp 1"
    assert result.lines[1] == "model tiny: 70,624 parameters, float32"  # of all stages
    assert result.lines[4:9] == [
        "pipeline zbv: 6 micro-batches through 8 stages, "
        "bubble at least (n-1)/(3vM+n-1) = 7.7%",
        "rank 0: embedding, layer 0 | head", "rank 1: layer 1 | layer 6",
        "rank 2: layer 2 | layer 5", "rank 3: layer 3 | layer 4",
    ]


def test_split_layers():
    assert pp.split_layers(4, 2, head=0) == [range(0, 2), range(2, 4)]
    assert pp.split_layers(32, 4, head=2.4) == [  # an 8B Llama 3
        range(0, 8), range(8, 17), range(17, 26), range(26, 32)
    ]
    assert pp.split_layers(1, 3, head=1) == [range(0), range(0, 1), range(1, 1)]
    for num_layers, head in itertools.product(range(1, 9), (0, 0.3, 1, 2.4, 20)):
        for num_stages in range(1, num_layers + 3):
            stages = pp.split_layers(num_layers, num_stages, head)
            assert len(stages) == num_stages
            assert [layer for stage in stages for layer in stage] == list(range(num_layers))
            assert all(stages[1:-1])  # the first has the embedding, the last the head
            slowest = max(*map(len, stages), len(stages[-1]) + head)
            cuts = itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
            best = min(
                max(*(end - first for first, end in itertools.pairwise((0, *cut, num_layers))),
                    num_layers - (0, *cut)[-1] + head)
                for cut in cuts
            )
            assert slowest == best


def settings(**changes):
    return argparse.Namespace(**dict(
        schedule="1f1b", microbatches=4, stages_per_rank=1, grad_accum=1, batch_size=24,
        compile=False, activation_checkpointing=False, config=ModelConfig(num_hidden_layers=4),
    ) | changes)


@pytest.mark.parametrize("p, changes, message", [
    (4, dict(microbatches=3),
     "--microbatches 3 is too few for --schedule 1f1b on 4 ranks: use at least 4"),
    (2, dict(schedule="dualpipev", stages_per_rank=2, microbatches=3),
     "too few for --schedule dualpipev on 2"),
    (2, dict(stages_per_rank=2), "--stages-per-rank 2: --schedule 1f1b has 1 stage on each rank"),
    (2, dict(schedule="zbv", stages_per_rank=1),
     "--stages-per-rank 1: --schedule zbv has 2 stages on each rank"),
    (7, dict(schedule="gpipe"),
     "7 ranks x 1 stages are 7, but 4 layers, embedding and head fill 6 at most"),
    (4, dict(schedule="loopedbfs", stages_per_rank=2), "4 ranks x 2 stages are 8, but 4 layers"),
    (2, dict(schedule="zerobubble", microbatches=5),
     "cannot make 2 even rounds of them on 2 ranks; use a multiple of 2, such as 4 or 6"),
    (2, dict(microbatches=5), "24 cannot be cut evenly into 1 accumulation steps x 5 "
                              "micro-batches: use a multiple of 5, such as 20"),
    (2, dict(microbatches=8, grad_accum=4), "use a multiple of 32, such as 32"),
    (2, dict(schedule="zbv", stages_per_rank=2, compile=True), "--compile with --schedule zbv"),
    (2, dict(schedule="zerobubble", activation_checkpointing=True),
     "--activation-checkpointing with"),
])
def test_refuses_in_words(p, changes, message):
    with pytest.raises(SettingError) as error:
        pp.check(settings(**changes), p)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_refuses_in_one_line_from_one_rank(run):
    result = run("pp.py", 4, "--microbatches 2", expect_ok=False)
    (line,) = result.lines
    assert line.startswith("pp.py: error: --microbatches 2 is too few") and all(result.statuses)


# Schedule, p, M, V
GRIDS = list(itertools.product(pp.SCHEDULES, (1, 2, 3, 4), range(1, 13), (1, 2, 3)))


def build(name, p, M, V):
    """The engine's schedule of rank 0, on stages without a model."""
    stages = [
        types.SimpleNamespace(num_stages=p * V, group_size=p, group_rank=0, submod=None)
        for _ in range(V)
    ]
    return pp.SCHEDULES[name](stages[0] if name in pp.ONE_STAGE else stages, M, loss_fn=len)


def allowed(name, p, M, V):
    args = settings(schedule=name, microbatches=M, stages_per_rank=V, batch_size=M)
    args.config.num_hidden_layers = 99
    try:
        pp.check(args, p)
    except SettingError:
        return False
    return True


def test_refuses_exactly_what_the_engine_does():
    """Its own errors are never seen, and nothing that it can do is refused."""
    for name, p, M, V in GRIDS:
        if name in pp.ONE_STAGE and V > 1:
            assert not allowed(name, p, M, V)
            continue
        try:
            build(name, p, M, V)
            works = True
        except ValueError:
            works = False
        assert allowed(name, p, M, V) == works, (name, p, M, V)


def test_the_bubble_is_the_one_of_the_schedule():
    """The engine's order of work, played through with 1 for forward and either half of backward."""
    for name, p, M, V in GRIDS:
        # What the engine says of 1f1b is not what it runs;
        # it is interleaved1f1b with one stage on each rank.
        if name == "1f1b" or not allowed(name, p, M, V):
            continue
        formula = pp.bubble(name, p, V, M)
        waiting, _ = play(build(name, p, M, V).pipeline_order, p * V)
        value = float(formula.partition("= ")[2].rstrip("%")) / 100
        if formula.startswith("at least"):
            assert waiting > value - 6e-4, (name, p, M, V)
        else:
            assert abs(waiting - value) < 6e-4, (name, p, M, V)


SECONDS = {"F": 1, "I": 1, "W": 1, "B": 2}  # forward; gradients of inputs, of weights, of both
LETTERS = "abcdefghijkl"
SIGNS = {"F": [*map(str, range(12))], "I": LETTERS, "W": LETTERS.upper(), "B": LETTERS}


def test_the_drawings_are_the_schedules():
    """Those of the docstring, rank by rank."""
    for name in ("gpipe", "1f1b", "zerobubble"):
        _, drawn = play(order_of(name, 3, 4), 3)
        found = pp.__doc__.partition(f"\n    {name} ")[2].splitlines()[:3]
        assert [line.partition("rank ")[2][2:].strip() for line in found] == drawn, name


def order_of(name, p, M):
    """The engine's order; of 1f1b it says another than it runs: p-r forwards, then one backward,
    one forward, in turn, and the rest of the backwards."""
    if name != "1f1b":
        return build(name, p, M, 1).pipeline_order
    return {rank: one_f_one_b(rank, p - rank, M) for rank in range(p)}


def one_f_one_b(rank, warm_up, M):
    forward = [_Action(rank, _ComputationType.FORWARD, i) for i in range(M)]
    backward = [_Action(rank, _ComputationType.FULL_BACKWARD, i) for i in range(M)]
    steady = itertools.zip_longest(backward, forward[warm_up:])
    return forward[:warm_up] + [action for pair in steady for action in pair if action]


def play(order, num_stages):
    """The share of time in which ranks wait, if each works its actions off as soon as it can; and
    a drawing of each rank's time, as in the docstring of pp.py."""
    todo = {rank: actions_of(actions) for rank, actions in order.items()}
    work = sum(SECONDS[kind] for actions in todo.values() for kind, _, _ in actions)
    ready, clock = {}, dict.fromkeys(todo, 0)  # when a result is there; where a rank is in time
    drawn = {rank: [] for rank in todo}
    while any(todo.values()):
        for rank, actions in todo.items():
            while actions:
                kind, stage, M = actions[0]
                needs = {"F": [("F", stage - 1, M)], "W": [("I", stage, M)]}.get(
                    kind, [("F", stage, M), ("I", stage + 1, M)]
                )
                needs = [need for need in needs if 0 <= need[1] < num_stages]
                if not all(need in ready for need in needs):
                    break
                begins = max([clock[rank], *(ready[need] for need in needs)])
                drawn[rank] += ["."] * (begins - clock[rank])
                drawn[rank] += [SIGNS[kind][M]] * SECONDS[kind]
                clock[rank] = begins + SECONDS[kind]
                ready["I" if kind == "B" else kind, stage, M] = clock[rank]
                actions.pop(0)
    end = max(clock.values())
    drawn = [" ".join(signs + ["."] * (end - len(signs))) for signs in drawn.values()]
    return 1 - work / end / len(order), drawn


def actions_of(actions):
    """(kind, stage, micro-batch) of what computes."""
    flat = [part for action in actions if action for part in action.sub_actions or [action]]
    return [
        (action.computation_type.value, action.stage_index, action.microbatch_index)
        for action in flat if action.computation_type.value in SECONDS
    ]
