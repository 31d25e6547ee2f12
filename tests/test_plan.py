"""tools/plan.py: a table of dry runs."""

import dataclasses
import json
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

    def run_plan(options, **kwargs):
        path = folder / "plan.json"
        path.unlink(missing_ok=True)
        result = server.run("tools/plan.py", 0, f"{options} --json {path}", folder=folder,
                            pass_out=False, env={"XDG_CACHE_HOME": str(folder)}, **kwargs)
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
    config = dataclasses.replace(PRESETS["tiny"], num_hidden_layers=14)
    depths = []

    class Pool:
        """Dry runs, each in a process of its own."""

        def submit(self, _, script, options, world_size, rank, nproc_per_node):
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
        plan.Strategy(script, world, stages, stages), options, config, (world, 8), Pool()
    )
    assert (max(depths) < 14) == exact
    whole = Pool().submit(None, str(ROOT / script), [
        *options, "--num-hidden-layers", "14"
    ], world, found["rank"], 8)
    assert found == whole.result()


def counted(peak, after, turn=0):
    return {"peak": {"in all": peak, "activations": 0}, "turns": [[turn, 0]],
            "held": {"in all": after, "activations": 0}, "collectives": []}


def test_no_line_no_extrapolation():
    line = [counted(10 + 3 * depth, 3 * depth) for depth in (2, 3, 4)]
    assert plan.extrapolate(*line, (2, 3, 4), 32) == counted(106, 96)
    bent = [*line[:2], counted(23, 12)]
    assert plan.extrapolate(*bent, (2, 3, 4), 32) is None
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
    '{"model_type": "gpt2"}': "has model_type 'gpt2': only Llama is known",
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
