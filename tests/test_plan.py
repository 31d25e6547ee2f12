"""tools/plan.py: a table of dry runs."""

import dataclasses
import json
import resource
import types

import pytest

from common.model import PRESETS
from tests.processes import ROOT
from tests.sample import thorough
from tools import plan

TINY = "--model tiny --seq-len 128 --dtype float32"


@pytest.fixture
def run_plan(server, tmp_path_factory):
    """What it prints, and what it writes; results are kept in the same folder over a test."""
    folder = tmp_path_factory.mktemp("plan")

    def run_plan(options, cache=folder, **kwargs):
        path = folder / "plan.json"
        path.unlink(missing_ok=True)
        result = server.run("tools/plan.py", 0, f"{options} --json {path}", folder=folder,
                            pass_out=False, env={"XDG_CACHE_HOME": str(cache)}, **kwargs)
        return result, json.loads(path.read_text()) if path.exists() else None

    run_plan.kept = lambda: {file: file.stat().st_mtime_ns
                             for file in (folder / "parallel-by-example").iterdir()}
    return run_plan


@thorough
def test_its_order_is_that_of_real_runs(run_plan, run, corpus):
    """Of memory and of traffic, counted in real runs of the same commands."""
    _, found = run_plan(f"{TINY} --devices 2 --device-memory 1 --batch-size 16 "
                        "--only ddp.py fsdp.py tp.py")
    commands = [row["command"] for row in found["rows"]]
    assert sorted(commands) == [
        "ddp.py", "fsdp.py", "fsdp.py --no-reshard-after-forward", "tp.py"
    ]
    real = {
        command: run(f"{command} --batch-size 16", 2, ["--data", corpus, "--steps", 4,
                     "--save-every", 0, "--no-resume"], out=f"out{i}").summary
        for i, command in enumerate(commands)
    }
    for size in (lambda counted: counted["peak"]["in all"], lambda counted: counted["sent"]):
        planned = sorted(commands, key=lambda name: size(
            next(row for row in found["rows"] if row["command"] == name)
        ))
        assert planned == sorted(commands, key=lambda name: size(real[name]))


@thorough
@pytest.mark.parametrize("command, world, stages, steps, batch_size, exact", [
    ("fsdp.py", 4, 1, 2, 16, True),
    ("fsdp.py --replicate 2", 4, 1, 4, 16, True),  # two steps are counted of four
    ("zero.py --stage 1", 4, 1, 4, 16, False),
    ("hybrid_3d.py --pp 2 --tp 2 --microbatches 4", 4, 2, 1, 16, True),
    # The peak of a shallow model is where the loss is computed, that of a deep one is not.
    ("fsdp.py --activation-checkpointing", 4, 1, 1, 16, False),
    ("ddp.py", 2, 1, 2, 16, False),  # all gradients in one bucket, or in two
    # The activations' peak is one bucket; but with the depth grows what autocast keeps of weights.
    ("zero.py --dtype bfloat16 --vocab-size 8192 --seq-len 16 --activation-checkpointing", 4, 1, 1,
     4, False),
])
def test_a_deep_model_is_extended_where_that_is_exact(
    server, tmp_path, command, world, stages, steps, batch_size, exact
):
    """What is counted at three depths gives what the whole depth gives, to the byte."""
    script, *words = command.split()
    layers = 14 if stages == 1 else 40  # a pipeline is counted at 8, 10 and 12
    config = dataclasses.replace(PRESETS["tiny"], num_hidden_layers=layers)
    depths = []

    def submit(script, words, world_size, rank, nproc_per_node):
        """A dry run, in a process of its own."""
        depths.append(int(words[words.index("--num-hidden-layers") + 1]))
        path = tmp_path / "dry.json"
        server.run("tools/dry_run.py", 0, [
            "--rank", rank, "--json", path, world_size, script, *words
        ], folder=tmp_path, pass_out=False)
        found = json.loads(path.read_text())
        del found["description"], found["theory"]
        return types.SimpleNamespace(result=lambda: found)

    args = types.SimpleNamespace(config=config, batch_size=batch_size, devices=world,
                                 nproc_per_node=8)
    found = plan.evaluate(plan.Strategy(script, world, stages, stages), words, steps, args, submit)
    assert (max(depths) < layers) == exact
    if not exact:
        return
    words = [*words, "--num-hidden-layers", layers, "--batch-size", batch_size]
    whole = submit(str(ROOT / script), [*map(str, words), "--grad-accum", str(steps)],
                   world, found["rank"], 8)
    del found["turns"], whole.result()["turns"]  # each micro-batch has its own
    assert found == whole.result()


def test_accumulation_is_counted_only_where_it_is_needed(monkeypatch):
    """A dry run of many accumulation steps takes long. Nothing is counted that another count has
    shown to be needless: that parameters, gradients and states alone are too much."""
    tried = []

    def evaluate(strategy, options, steps, *_):
        again = "--activation-checkpointing" in options
        if (steps, again) not in tried:
            tried.append((steps, again))
        peak = 10 + 64 // steps // (4 if again else 1)
        return {"peak": {"in all": peak}, "held": {"parameters": 4, "gradients": 4,
                                                   "optimizer states": 2}}

    monkeypatch.setattr(plan, "evaluate", evaluate)

    def search(memory, command="tp.py"):
        tried.clear()
        args = types.SimpleNamespace(batch_size=8, device_memory=memory / 1e9)
        rows = plan.search(plan.Strategy(command, 1), [], args, None)
        return [command for command, _ in rows], list(tried)

    checkpointing = "tp.py --activation-checkpointing"
    assert search(74) == (["tp.py"], [(1, False)])
    assert search(42) == (["tp.py --grad-accum 2", checkpointing],
                          [(1, False), (1, True), (2, False)])
    assert search(25) == (["tp.py --grad-accum 8", "tp.py --grad-accum 2 "
                           "--activation-checkpointing"],
                          [(1, False), (1, True), (2, True), (2, False), (4, False), (8, False)])
    assert search(13)[0] == ["tp.py --grad-accum 8 --activation-checkpointing"]
    assert search(9) == (["tp.py --grad-accum 8 --activation-checkpointing"],
                         [(1, False), (8, True)])
    assert search(9, "pp.py --schedule zerobubble")[1] == [(1, False), (8, False)]


def test_what_sorts_the_rows():
    """What fits; then the bounds; then operations, with those of the bubble, to 5 %; then bytes."""
    def row(name, peak, operations, crossing=0, sent=0, bubble=0):
        return name, {"peak": {"in all": peak * 1e9}, "operations": operations * 1e12,
                      "bubble": bubble, "between_machines": crossing * 1e9, "sent": sent * 1e9}

    rows = [row("too large", 11, 1), row("larger", 12, 1), row("sends more", 1, 100, 2, 3),
            row("to others", 1, 104, 1, 4), row("sends least", 10, 104, 1, 2),
            row("bubble", 1, 90, 0, 0, 0.5), row("computes more", 1, 110)]

    def ordered(**rates):
        args = types.SimpleNamespace(device_memory=10, least_work=100e12, tflops=None, link=None,
                                     network=None)
        vars(args).update(rates)
        return [name for name, _ in sorted(rows, key=lambda row: plan.order(row, args))]

    assert ordered() == ["sends least", "to others", "sends more", "computes more", "bubble",
                         "too large", "larger"]
    assert ordered(link=1)[:5] == ["computes more", "bubble", "sends least", "sends more",
                                   "to others"]
    assert ordered(link=10, network=0.1)[2:5] == ["sends least", "to others", "sends more"]
    assert ordered(tflops=1)[:5] == ["sends more", "sends least", "to others", "computes more",
                                     "bubble"]


def test_micro_batches_and_accumulation():
    pipeline = plan.Strategy("pp.py", 1, 2, 4)
    pieces = ["--microbatches", "8"]  # four for each rank
    assert plan.variants(pipeline, 64) == [(pieces, 1), (pieces, 2), (pieces, 4), (pieces, 8)]
    assert plan.variants(plan.Strategy("fsdp.py", 8), 32) == [([], 1), ([], 2), ([], 4)]
    assert plan.variants(plan.Strategy("tp.py", 1), 12)[-1] == ([], 4)


@pytest.mark.parametrize("depth, few", [(40, True), (14, False)])  # from three depths, and whole
def test_the_stage_that_holds_most_counts(depth, few):
    """Each stage is extended by itself. Of 4 ranks 0 and 3 are counted, and 1 or 2 if its stage is
    the first with more layers."""
    asked = set()

    def submit(_, words, world_size, rank, nproc_per_node):
        layers = int(words[words.index("--num-hidden-layers") + 1])
        assert (layers < depth) == few
        asked.add(rank)
        found = counted({0: 1000 + layers}.get(rank, 500 + 100 * layers), 0) | {"rank": rank}
        return types.SimpleNamespace(result=lambda: found)

    args = types.SimpleNamespace(
        config=dataclasses.replace(PRESETS["tiny"], num_hidden_layers=depth), batch_size=8,
        devices=8, nproc_per_node=8,
    )
    strategy = plan.Strategy("pp.py", 1, 2, 2)
    found = plan.evaluate(strategy, [], 1, args, submit)
    assert asked == {0, 4} and found["rank"] == 4
    assert found["peak"]["in all"] == 500 + 100 * depth


@pytest.mark.parametrize("sizes, parts", [
    ((4, 4, 4, 2), [0, 3]), ((4, 4, 5, 2), [0, 2, 3]), ((3, 4, 5, 6), [0, 1, 2, 3]),
])
def test_the_ranks_that_are_counted(monkeypatch, sizes, parts):
    args = types.SimpleNamespace(config=PRESETS["tiny"], devices=16)
    monkeypatch.setattr(plan, "split_layers", lambda *_: [range(size) for size in sizes])
    found = plan.ranks_to_count(plan.Strategy("hybrid_3d.py --pp 4", 4, 4, 4), 4, args)
    assert found == [4 * part for part in parts]


@pytest.mark.parametrize("what", ["no folder", "disk full"])
def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path, what):
    """The count goes on, says so, and leaves no half file."""
    folder = tmp_path / "cache"
    if what == "no folder":
        folder.write_text("")  # a file
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(plan.dry_run, "count", lambda *_: {"sent": 1, "held": ["x"] * 9})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if what == "disk full":  # a write fails in the middle
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        counted = plan.cached("fsdp.py", [], 2, 0, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert counted["sent"] == 1 and "cannot be written (" in counted["not kept"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path != folder]
    assert not list(tmp_path.glob("cache/*/*"))


def counted(peak, after, turn=0):
    return {"peak": {"in all": peak, "activations": 0}, "turns": [[turn, 0]],
            "held": {"in all": after, "activations": 0}, "collectives": []}


def test_where_there_is_no_line():
    def check(peaks, held, turns=(0, 0, 0), depths=(2, 3, 4)):
        found = [counted(*numbers) for numbers in zip(peaks, held, turns)]
        exact = plan.is_one_moment(*found[:2]) and plan.is_line(*found, depths)
        return exact, plan.extend(*found[:2], depths, 32)

    assert check((16, 19, 22), (6, 9, 12)) == (True, counted(106, 96))
    assert check((34, 40, 46), (24, 30, 36), depths=(8, 10, 12)) == (True, counted(106, 96))
    assert not check((16, 19, 22 + 2**-10), (6, 9, 12))[0]
    other = counted(22, 12) | {"collectives": [{"calls": 1}]}
    assert not plan.is_line(counted(16, 6), counted(19, 9), other, (2, 3, 4))
    # What grows faster than the peak will overtake it: after the backward pass, or before it.
    assert not check((104, 106, 108), (6, 9, 12))[0]
    assert not check((104, 106, 108), (0, 0, 0), (6, 9, 12))[0]


def test_what_does_not_fit_is_counted_no_further():
    """The line through two depths is a lower bound: a third depth would change nothing."""
    depths = []

    def submit(_, words, *where):
        layers = int(words[words.index("--num-hidden-layers") + 1])
        depths.append(layers)
        return types.SimpleNamespace(result=lambda: counted(10 * layers, 0))

    args = types.SimpleNamespace(
        config=dataclasses.replace(PRESETS["tiny"], num_hidden_layers=32), batch_size=8, devices=8,
        nproc_per_node=8,
    )
    for limit, expected in ((319, [2, 3]), (320, [2, 3, 4])):
        depths.clear()
        found = plan.evaluate(plan.Strategy("tp.py", 1), [], 1, args, submit, limit)
        assert found["peak"]["in all"] == 320 and depths == expected


def test_strategies_and_why_not():
    found, left_out = plan.strategies(16, 8, 16, 4096, 32)
    commands = [strategy.command for strategy in found]
    assert "ddp.py" in commands and "fsdp.py --replicate 2" in commands
    assert "hybrid_3d.py --tp 8 --pp 2" in commands
    assert not any("--tp 16" in command for command in commands)
    assert left_out["--tp beyond the 8 devices of a machine"] == 1
    assert len(set(commands)) == len(commands)
    assert [strategy.command for strategy in plan.strategies(1, 8, 4, 128, 4)[0]] == ["single.py"]


@thorough
def test_a_budget(run_plan):
    """The fewest accumulation steps that fit; then recomputing; then the least change that would
    do. A repeat counts nothing again."""
    options = f"{TINY} --devices 2 --batch-size 16 --only ddp.py"
    _, large = run_plan(f"{options} --device-memory 1")
    assert [row["command"] for row in large["rows"]] == ["ddp.py"]
    kept = run_plan.kept()
    assert run_plan(f"{options} --device-memory 1")[1] == large
    assert run_plan.kept() == kept  # what is counted again is written again
    _, some = run_plan(f"{options} --device-memory 0.03")
    assert [row["command"] for row in some["rows"]] == [
        "ddp.py --grad-accum 4", "ddp.py --activation-checkpointing"
    ]
    assert all(row["fits"] and row["peak"]["in all"] <= 0.03e9 for row in some["rows"])
    result, none = run_plan(f"{options} --device-memory 0.012", expect_ok=False)
    assert result.statuses == [1]
    (row,) = none["rows"]
    assert row["command"] == "ddp.py --grad-accum 8 --activation-checkpointing"
    needed = row["peak"]["in all"] / 1e9
    assert "nothing fits into 0.012 GB: the least is" in result.lines[-1]
    assert f"--device-memory {-(-needed // 0.01) / 100:.2f} or more" in result.lines[-1]
    assert "or --devices 4" in result.lines[-1] and "fsdp.py" in result.lines[-1]
    no_folder = run_plan(f"{options} --device-memory 1", cache="/dev/null")
    assert no_folder[1] == large
    (line,) = [line for line in no_folder[0].lines if "not kept" in line]
    assert line.endswith("/dev/null/parallel-by-example cannot be written (Not a directory)")


@thorough
def test_bounds_and_the_command(run_plan):
    """Computation and communication at full rate; and what is printed can be pasted."""
    result, found = run_plan(f"{TINY} --devices 2 --device-memory 1 --only ddp.py "
                             "--tflops 2 --link 4 --network 1 --nproc-per-node 1 --batch-size 16")
    (row,) = found["rows"]
    compute, communicate = row["bounds"]
    assert compute == row["operations"] / 2e12
    assert communicate == max(row["sent"] / 4e9, row["between_machines"] / 1e9)
    assert result.lines[-1] == (
        "the first row: NPROC=1 sbatch --nodes=2 --exclusive run.sh ddp.py --model tiny "
        "--seq-len 128 --dtype float32 --batch-size 16"
    )
    assert ">= s" in result.output


@thorough
def test_a_config_of_hugging_face(run_plan, tmp_path):
    config = {"model_type": "llama", "tie_word_embeddings": False} | vars(PRESETS["tiny"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = "--seq-len 128 --dtype float32 --devices 1 --device-memory 1"
    _, preset = run_plan(f"--model tiny {options}")
    result, found = run_plan(f"--model {tmp_path} {options}")
    assert found["rows"] == preset["rows"]
    assert "python single.py --vocab-size 256 --hidden-size 128" in result.lines[-1]


CONFIGS = {
    '{"model_type": "gpt2"}': "has model_type 'gpt2': only Llama is supported",
    '{"model_type": "llama", "attention_bias": true}': "has attention_bias True",
    '{"model_type": "llama"}': "lacks vocab_size",
    '{"model_type": "llama", "vocab_size": "many"}': "has vocab_size 'many': it must be a whole",
    "{}": "has model_type None", "[]": "no config.json of a model", "{": "it is no JSON",
}
OTHERS = {
    "--model none --devices 2 --device-memory 1 --seq-len 128": "no such preset or file",
    "--model tiny --devices 0 --device-memory 1 --seq-len 128": "0 is not allowed",
    "--model tiny --devices 2 --device-memory 1": "required: --seq-len",
    "--model tiny --devices 2 --device-memory 1 --seq-len 128 --network 1": "give --link too",
    "--model tiny --devices 12 --device-memory 1 --seq-len 128": "--devices 12 is no multiple of",
}


def test_bad_input_is_one_line(server, tmp_path):
    """A config.json of another architecture, and options."""
    commands, words = [option.split() for option in OTHERS], list(OTHERS.values())
    for i, (text, refusal) in enumerate(CONFIGS.items()):
        path = tmp_path / f"{i}.json"
        path.write_text(text)
        commands.append(f"--model {path} --devices 2 --device-memory 1 --seq-len 128".split())
        words.append(refusal)
    result = server.run("tests/refusals.py", 0, ["plan", json.dumps(commands)], folder=tmp_path,
                        pass_out=False)
    found = [line for line in result.lines if "error:" in line]
    assert len(found) == len(commands) and "it ended well" not in result.output, result.output
    for line, refusal in zip(found, words):
        assert line.startswith("plan.py: error: ") and refusal in line, line


@thorough
def test_nothing_can_run(run_plan):
    result, _ = run_plan("--model tiny --devices 3 --device-memory 1 --seq-len 128 "
                         "--batch-size 16 --only ddp.py", expect_ok=False)
    assert result.statuses == [1] and "Traceback" not in result.output
    assert "nothing can run on 3 devices" in result.lines[-1]
    assert "ddp.py: --batch-size 16 cannot be shared evenly by 3" in result.lines[-1]
