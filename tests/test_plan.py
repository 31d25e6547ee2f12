"""tools/plan.py: a table of dry runs."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import types

import pytest

from common.errors import SettingError
from common.model import PRESETS
from tests.support.processes import ROOT
from tests.support.sample import thorough
from tests.test_launch import left_over, wait_until
from tools import plan

TINY = "--model tiny --seq-len 128 --dtype float32"


# Script and options, its world size, pipeline stages, and whether three depths are enough.
DEEP = [
    ("fsdp.py --replicate 2 --grad-accum 2", 4, 1, True),
    ("zero.py --stage 1 --activation-checkpointing", 4, 1, True),
    ("hybrid_3d.py --pp 2 --tp 2 --microbatches 2", 4, 2, True),
    ("hybrid_3d.py --num-experts 8 --ep 4 --tp 2", 4, 1, True),
    ("ddp.py --grad-accum 2", 2, 1, False),  # all gradients in one bucket, or in two
]


@thorough
@pytest.mark.parametrize("command, world, stages, exact", DEEP)
def test_a_deep_model_is_extended_where_that_is_exact(
    monkeypatch, tmp_path, command, world, stages, exact
):
    """What is counted at three depths gives what the whole depth gives, to the byte."""
    script, *options = command.split()
    layers = 16 if stages == 1 else 40  # a pipeline is counted at 8, 10 and 12
    args = types.SimpleNamespace(
        config=dataclasses.replace(PRESETS["tiny"], num_hidden_layers=layers), batch_size=16,
        devices=world, nproc_per_node=8, device_memory=math.inf,
    )
    depths, cached = [], plan.cached

    def count(script, words, *where):
        depths.append(int(words[words.index("--num-hidden-layers") + 1]))
        return cached(script, words, *where)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plan, "cached", count)
    found = plan.evaluate(plan.Strategy(script, world, stages, stages), options, args)
    assert (max(depths) < layers) == exact
    words = [*options, "--num-hidden-layers", str(layers), "--batch-size", str(args.batch_size)]
    whole = cached(str(plan.ROOT / script), words, world, found["rank"], args.nproc_per_node)
    del found["phases"], whole["phases"]  # of these the highest is exact, and is in "peak"
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(whole))


def test_accumulation_is_counted_only_where_it_is_needed(monkeypatch):
    """A dry run of many accumulation steps takes long. Nothing is counted that another count has
    shown to be needless: that parameters, gradients and states alone are too much."""
    tried = []

    def evaluate(strategy, options, args):
        again = "--activation-checkpointing" in options
        steps = int(options[1]) if "--grad-accum" in options else 1
        tried.append((steps, again))
        peak = 10 + 64 // steps // (4 if again else 1)
        return {"peak": {"in all": peak}, "held": {"parameters": 4, "gradients": 4,
                                                   "optimizer states": 2}}

    monkeypatch.setattr(plan, "evaluate", evaluate)

    def search(memory, command="tp.py", link=None):
        tried.clear()
        args = types.SimpleNamespace(batch_size=8, device_memory=memory / 1e9, link=link)
        rows = plan.search(plan.Strategy(command, 1), [], args)
        return [command for command, _ in rows], list(tried)

    again = "--activation-checkpointing"
    assert search(74) == (["tp.py"], [(1, False)])
    assert search(42) == (["tp.py --grad-accum 2"], [(1, False), (2, False)])
    assert search(25) == (["tp.py --grad-accum 8"], [(1, False), (8, False)])
    assert search(25, link=1) == (["tp.py --grad-accum 8", f"tp.py --grad-accum 2 {again}"],
                                  [(1, False), (8, False), (1, True), (2, True)])
    assert search(13) == ([f"tp.py --grad-accum 8 {again}"], [(1, False), (1, True), (8, True)])
    assert search(11) == ([f"tp.py {again}"], [(1, False), (1, True)])  # nothing fits
    assert search(9) == (["tp.py"], [(1, False)])
    assert search(17, "pp.py --schedule zerobubble")[1] == [(1, False)]


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
    pipeline, pieces = plan.Strategy("pp.py", 1, 2, 4), ["--microbatches", "8"]  # 4 for each rank
    assert plan.variants(pipeline, 64) == [
        pieces, *([*pieces, "--grad-accum", n] for n in ("2", "4", "8"))
    ]
    assert plan.variants(plan.Strategy("fsdp.py", 8), 16) == [[], ["--grad-accum", "2"]]
    assert plan.variants(plan.Strategy("tp.py", 1), 12)[-1] == ["--grad-accum", "4"]


@pytest.mark.parametrize("depth, few", [(40, True), (14, False)])  # from three depths, and whole
def test_the_stage_that_holds_most_counts(monkeypatch, depth, few):
    """Each stage is extended by itself. Of 8 ranks 0 and 4 are counted, the first of each stage;
    none after one that does not fit."""
    asked = set()

    def cached(_, words, world_size, rank, nproc_per_node):
        layers = int(words[words.index("--num-hidden-layers") + 1])
        assert (layers < depth) == few
        asked.add(rank)
        return counted({0: 1000 + layers}.get(rank, 500 + 100 * layers), 0) | {"rank": rank}

    monkeypatch.setattr(plan, "cached", cached)
    args = types.SimpleNamespace(
        config=dataclasses.replace(PRESETS["tiny"], num_hidden_layers=depth), batch_size=8,
        devices=8, nproc_per_node=8, device_memory=1,
    )
    strategy = plan.Strategy("pp.py", 1, 2, 2)
    found = plan.evaluate(strategy, [], args)
    assert asked == {0, 4} and found["rank"] == 4
    assert found["peak"]["in all"] == 500 + 100 * depth
    asked.clear()
    args.device_memory = 999e-9
    assert plan.evaluate(strategy, [], args)["rank"] == 0 and asked == {0}


@pytest.mark.parametrize("sizes, expected", [
    ((4, 4, 4, 2), [0, 3]), ((4, 4, 5, 2), [0, 2, 3]), ((3, 4, 5, 6), [0, 1, 2, 3]),
])
def test_the_ranks_that_are_counted(monkeypatch, sizes, expected):
    args = types.SimpleNamespace(config=PRESETS["tiny"], devices=16)
    monkeypatch.setattr(plan, "split_layers", lambda *_: [range(size) for size in sizes])
    found = plan.ranks_to_count(plan.Strategy("hybrid_3d.py --pp 4", 4, 4, 4), args)
    assert found == [4 * rank for rank in expected]


def test_what_is_counted_is_kept(monkeypatch, tmp_path):
    """In a file; a file that was not written to its end, or cannot be written, does no harm."""
    calls = []
    monkeypatch.setattr(plan.dry_run, "count_apart", lambda *job: calls.append(job) or {"sent": 1})

    def cached(folder):
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        assert plan.cached("fsdp.py", [], 2, 0, 8) == {"sent": 1}
        return len(calls)

    assert [cached(tmp_path), cached(tmp_path)] == [1, 1]
    (path,) = tmp_path.glob("*/*")
    path.write_text('{"se')
    assert [cached(tmp_path), cached(tmp_path), cached(path)] == [2, 2, 3]


def counted(peak, end, begin=0):
    """A step of one phase."""
    phase = {"peak": {"in all": peak}, "begin": {"in all": begin}, "end": {"in all": end}}
    return {"peak": {"in all": peak}, "phases": [phase], "collectives": []}


def test_where_there_is_no_line():
    def check(peaks, ends, begins=(0, 0, 0), depths=(2, 3, 4)):
        found = [counted(*numbers) for numbers in zip(peaks, ends, begins)]
        line = plan.extend(*found[:2], depths, 32)
        times = (32 - depths[1]) / (depths[1] - depths[0])
        exact = plan.peaks_stay(*found[:2], line, times) and plan.is_line(*found, depths)
        return exact, line["peak"]["in all"]

    assert check((16, 19, 22), (6, 9, 12)) == (True, 106)
    assert check((34, 40, 46), (24, 30, 36), depths=(8, 10, 12)) == (True, 106)
    assert not check((16, 19, 22 + 2**-10), (6, 9, 12))[0]
    other = counted(22, 12) | {"collectives": [{"calls": 1}]}
    assert not plan.is_line(counted(16, 6), counted(19, 9), other, (2, 3, 4))
    # What grows faster than the peak will overtake it: after the backward pass, or before it.
    assert not check((104, 106, 108), (6, 9, 12))[0]
    assert not check((104, 106, 108), (0, 0, 0), (6, 9, 12))[0]
    assert check((104, 106, 108), (0, 0, 0), (6, 8, 10)) == (True, 164)


def test_the_peak_of_a_step_is_that_of_a_phase():
    """A shallow model has it in one phase, a deep one in another: each phase is on a line of its
    own. What grows faster within a phase does not matter if it stays below."""
    def step(first, second, end=0):
        phases = [counted(first, 0)["phases"][0], counted(second, end)["phases"][0]]
        return {"peak": {"in all": max(first, second)}, "phases": phases}

    steps = step(100, 60), step(101, 70), step(102, 80)
    line = plan.extend(*steps[:2], (2, 3), 12)
    assert line["peak"]["in all"] == 160 and plan.peaks_stay(*steps[:2], line, 9)
    assert plan.is_line(*steps, (2, 3, 4))
    steps = step(100, 60), step(110, 60, 9)  # the end of the second phase grows by 9
    line = plan.extend(*steps, (2, 3), 12)
    assert line["peak"]["in all"] == 200 and plan.peaks_stay(*steps, line, 9)
    steps = step(100, 60), step(110, 60, 16)
    assert not plan.peaks_stay(*steps, line, 9)


def test_what_does_not_fit_is_counted_no_further(monkeypatch):
    """The line through two depths is a lower bound: a third depth would change nothing."""
    depths = []

    def cached(_, words, *where):
        layers = int(words[words.index("--num-hidden-layers") + 1])
        depths.append(layers)
        return counted(10 * layers, 0)

    monkeypatch.setattr(plan, "cached", cached)
    args = types.SimpleNamespace(
        config=dataclasses.replace(PRESETS["tiny"], num_hidden_layers=32), batch_size=8, devices=8,
        nproc_per_node=8,
    )
    for memory, expected in ((319, [3, 4]), (320, [3, 4, 5])):
        depths.clear()
        args.device_memory = memory / 1e9
        found = plan.evaluate(plan.Strategy("tp.py", 1), [], args)
        assert found["peak"]["in all"] == 320 and depths == expected


def test_strategies_and_why_not():
    found, left_out = plan.strategies(16, 8, 16, 4096, 32)
    commands = [strategy.command for strategy in found]
    assert "ddp.py" in commands and "fsdp.py --replicate 2" in commands
    assert "hybrid_3d.py --tp 8 --pp 2" in commands
    assert "hybrid_3d.py --pp 16" not in commands  # it is pp.py
    assert not any("--cp 2" in command for command in commands)  # 2,048 positions on a rank
    assert not any("--tp 16" in command for command in commands)
    assert left_out["--tp beyond the 8 devices of a machine"] == 1
    assert len(set(commands)) == len(commands)
    assert [strategy.command for strategy in plan.strategies(1, 8, 4, 128, 4)[0]] == ["single.py"]


NO_EXPERTS = "all scripts but ep.py and hybrid_3d.py, which train no experts"


def test_strategies_for_experts():
    """ep.py with every --ep that divides the experts, and every grid with the largest one of a
    machine; also what would fit on more devices."""
    found, left_out = plan.strategies(8, 8, 8, 128, 4, experts=12)
    assert [strategy.command for strategy in found] == [
        "ep.py --ep 1", "ep.py --ep 2", "ep.py --ep 4", "hybrid_3d.py --pp 2 --ep 4",
        "hybrid_3d.py --tp 2 --ep 4", "hybrid_3d.py --tp 2 --pp 2 --ep 4",
        "hybrid_3d.py --tp 4 --ep 4", "hybrid_3d.py --tp 4 --pp 2 --ep 4",
        "hybrid_3d.py --tp 8 --ep 4",
    ]
    assert NO_EXPERTS in left_out
    found, _ = plan.strategies(32, 8, 32, 128, 4, experts=64)
    assert "hybrid_3d.py --tp 2 --pp 2 --ep 8" in [strategy.command for strategy in found]
    found, _ = plan.strategies(24, 8, 24, 128, 4, experts=6)  # tokens stay within a machine
    largest = {strategy.command.rpartition(" --ep ")[2] for strategy in found
               if strategy.command.startswith("hybrid")}
    assert "2" in largest and not largest & {"3", "6"}
    assert [strategy.command for strategy in plan.strategies(1, 8, 4, 128, 4, experts=12)[0]] == [
        "ep.py"]


def test_a_plan(monkeypatch, capsys, tmp_path):
    """The fewest accumulation steps that fit; then recomputing; then more devices. The bounds, and
    a command that can be pasted. Why nothing can run."""
    def cached(script, words, world_size, rank, nproc_per_node):
        if world_size == 3:
            raise SettingError("3 ranks")
        steps = int(words[words.index("--grad-accum") + 1]) if "--grad-accum" in words else 1
        again = "--activation-checkpointing" in words
        activations = 128e6 / steps / world_size / (4 if again else 1)
        held = {"parameters": 4e6, "gradients": 4e6, "optimizer states": 2e6}
        return {"peak": {"in all": 10e6 + activations, "activations": activations}, "held": held,
                "phases": [], "collectives": [], "operations": 4e9, "sent": 8e6, "bubble": 0.5,
                "between_machines": 3e6}

    def rows(options):
        path = tmp_path / "plan.json"
        plan.main([*f"{TINY} --devices 2 --batch-size 16 --only ddp.py {options}".split(), "--json",
                   str(path)])
        return json.loads(path.read_text())["rows"]

    monkeypatch.setattr(plan, "cached", cached)
    assert [row["command"] for row in rows("--device-memory 0.03 --link 1")] == [
        "ddp.py --grad-accum 4", "ddp.py --activation-checkpointing"]
    (row,) = rows("--device-memory 1 --tflops 2 --link 4 --network 1 --nproc-per-node 1")
    assert row["fits"] and row["bounds"] == [4e9 / 2e12 / 0.5, 3e6 / 1e9]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "the first row: NPROC=1 sbatch --nodes=2 --exclusive run.sh ddp.py --model tiny "
        "--seq-len 128 --dtype float32 --batch-size 16")
    with pytest.raises(SystemExit, match="--devices 32 --batch-size 32 fits fsdp.py"):
        rows("--device-memory 0.0111")
    (tmp_path / "config.json").write_text(json.dumps(vars(PRESETS["tiny"]) | {
        "model_type": "mixtral", "num_local_experts": 4, "tie_word_embeddings": False}))
    mixtral = f"--model {tmp_path} --only ep.py --device-memory"
    assert [row["command"] for row in rows(f"{mixtral} 1")] == ["ep.py --ep 1", "ep.py --ep 2"]
    assert f"left out: {NO_EXPERTS}\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--devices 32 --batch-size 32 fits ep.py --ep 1"):
        rows(f"{mixtral} 0.0111")
    with pytest.raises(SettingError, match="nothing can run on 3 devices: .*ddp.py: 3 ranks"):
        rows("--device-memory 1 --devices 3")


def test_a_config_of_hugging_face(tmp_path):
    """Its options choose the same model as a preset."""
    config = {"model_type": "llama", "tie_word_embeddings": False} | vars(PRESETS["tiny"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    options, found = plan.model_options(str(tmp_path))
    assert found == PRESETS["tiny"] == plan.model_options("tiny")[1]
    values = dict(zip(options[::2], options[1::2]))
    assert values["--vocab-size"] == "256" and values["--hidden-size"] == "128"
    assert "--num-experts" not in values  # most scripts have no such option


@pytest.mark.parametrize("options, words", [
    ("--model none --devices 2 --seq-len 128", "--model none: no such preset or file"),
    ("--model tiny --devices 2", "required: --seq-len"),
    ("--model tiny --devices 2 --seq-len 128 --network 1", "--network .* give --link"),
    ("--model tiny --devices 2 --seq-len 128 --only foo.py", "--only foo.py: .* ddp.py, zero.py"),
    ("--model tiny --devices 12 --seq-len 128", "--devices 12 .* --nproc-per-node 8"),
])
def test_bad_input(options, words):
    with pytest.raises(SettingError, match=words):
        plan.main(f"{options} --device-memory 1".split())


@thorough
def test_a_signal_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.plan", *"--model llama3-8b --devices 8 --seq-len 8192 "
         "--device-memory 76".split()], cwd=tmp_path, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
    )
    wait_until(lambda: len(left_over(tmp_path)) > 4)  # itself, two helpers of Python, two workers
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not left_over(tmp_path))
