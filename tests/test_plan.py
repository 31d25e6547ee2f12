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
@pytest.mark.parametrize("command, world, stages, exact", [
    ("fsdp.py --grad-accum 2", 4, 1, True),
    ("hybrid_3d.py --pp 2 --tp 2 --microbatches 4", 4, 2, True),
    # The peak of a shallow model is where the loss is computed, that of a deep one is not.
    ("fsdp.py --activation-checkpointing", 4, 1, False),
    ("ddp.py --grad-accum 2", 2, 1, False),  # all gradients in one bucket, or in two
    # The activations' peak is one bucket; but with the depth grows what autocast keeps of weights.
    ("zero.py --dtype bfloat16 --vocab-size 8192 --batch-size 4 --seq-len 16 "
     "--activation-checkpointing", 4, 1, False),
])
def test_a_deep_model_is_extrapolated_where_that_is_exact(
    server, tmp_path, command, world, stages, exact
):
    """What is counted at three depths gives what the whole depth gives, to the byte."""
    script, *options = command.split()
    layers = 14 if stages == 1 else 40  # a pipeline is counted at 8, 10 and 12
    config = dataclasses.replace(PRESETS["tiny"], num_hidden_layers=layers)
    depths = []

    def submit(script, options, world_size, rank, nproc_per_node):
        """A dry run, in a process of its own."""
        depths.append(int(options[-1]))
        path = tmp_path / "dry.json"
        server.run("tools/dry_run.py", 0, [
            "--rank", rank, "--json", path, world_size, script, *options
        ], folder=tmp_path, pass_out=False)
        found = json.loads(path.read_text())
        del found["description"], found["theory"]
        if stages > 1:
            found["stages"] = [0, world // stages]
        return types.SimpleNamespace(result=lambda: found)

    found = plan.evaluate(
        plan.Strategy(script, world, stages, stages), options, config, (world, 8), submit
    )
    assert (max(depths) < layers) == exact
    if not exact:
        return
    whole = submit(str(ROOT / script), [
        *options, "--num-hidden-layers", str(layers)
    ], world, found["rank"], 8)
    assert found == whole.result()


def test_accumulation_is_counted_only_where_it_is_needed(monkeypatch):
    """A dry run of many accumulation steps takes long. Nothing is counted that another count has
    shown to be needless: that parameters, gradients and states alone are too much."""
    tried = []

    def evaluate(strategy, options, *_):
        steps = int(options[options.index("--grad-accum") + 1]) if "--grad-accum" in options else 1
        again = "--activation-checkpointing" in options
        tried.append((steps, again))
        peak = 10 + 64 // steps // (4 if again else 1)
        return {"peak": {"in all": peak}, "held": {"parameters": 4, "gradients": 4,
                                                   "optimizer states": 2}}

    monkeypatch.setattr(plan, "evaluate", evaluate)

    def search(memory, command="tp.py"):
        tried.clear()
        rows = plan.search(plan.Strategy(command, 1), 8, [], None, (8, 8), memory, None)
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
    assert plan.variants(pipeline, 64)[0] == ["--microbatches", "8"]  # four for each rank
    assert plan.variants(pipeline, 64)[-1] == ["--microbatches", "8", "--grad-accum", "8"]
    assert plan.variants(plan.Strategy("fsdp.py", 8), 32) == [
        [], ["--grad-accum", "2"], ["--grad-accum", "4"]
    ]
    assert plan.variants(plan.Strategy("tp.py", 1), 12)[-1] == ["--grad-accum", "4"]


@pytest.mark.parametrize("depth, slope", [(40, 1), (14, 0)])  # from three depths, and whole
def test_the_stage_that_holds_most_counts(depth, slope):
    """Each stage is extrapolated by itself."""
    def submit(_, options, world_size, rank, nproc_per_node):
        layers = int(options[-1])
        assert (layers < depth) == slope
        peak = {0: 1000 + layers, 4: 500 + 100 * layers, 8: 900}[rank]
        found = counted(peak, 0) | {"rank": rank, "stages": [0, 4, 8]}
        return types.SimpleNamespace(result=lambda: found)

    config = dataclasses.replace(PRESETS["tiny"], num_hidden_layers=depth)
    strategy = plan.Strategy("pp.py", 1, 2, 2)
    found = plan.evaluate(strategy, [], config, (12, 8), submit)
    assert found["rank"] == 4 and found["peak"]["in all"] == 500 + 100 * depth


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


def test_no_line_no_extrapolation():
    line = [counted(10 + 3 * depth, 3 * depth) for depth in (2, 3, 4)]
    assert plan.extrapolate(*line, (2, 3, 4), 32) == counted(106, 96)
    wide = [counted(10 + 3 * depth, 3 * depth) for depth in (8, 10, 12)]
    assert plan.extrapolate(*wide, (8, 10, 12), 32) == counted(106, 96)
    bent = [*line[:2], counted(22 + 2**-10, 12)]
    assert plan.extrapolate(*bent, (2, 3, 4), 32) is None
    other = [*line[:2], line[2] | {"collectives": [{"calls": 1}]}]
    assert plan.extrapolate(*other, (2, 3, 4), 32) is None
    # What grows faster than the peak will overtake it: after the backward pass, or before it.
    after = [counted(100 + 2 * depth, 3 * depth) for depth in (2, 3, 4)]
    assert plan.extrapolate(*after, (2, 3, 4), 32) is None
    before = [counted(100 + 2 * depth, 0, 3 * depth) for depth in (2, 3, 4)]
    assert plan.extrapolate(*before, (2, 3, 4), 32) is None


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
    assert len(result.lines) == len(commands), result.output
    for line, refusal in zip(result.lines, words):
        assert line.startswith("plan.py: error: ") and refusal in line, line


@thorough
def test_nothing_can_run(run_plan):
    result, _ = run_plan("--model tiny --devices 3 --device-memory 1 --seq-len 128 "
                         "--batch-size 16 --only ddp.py", expect_ok=False)
    assert result.statuses == [1] and "Traceback" not in result.output
    assert "nothing can run on 3 devices" in result.lines[-1]
    assert "ddp.py: --batch-size 16 cannot be shared evenly by 3" in result.lines[-1]
