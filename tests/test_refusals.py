"""Bad options, files and environments end in one line from one rank, which names the value, what is
allowed and what to change, with a status that is not 0; and nothing in the run folder is lost."""

import argparse
import importlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys

import pytest
import torch

from common import launch
from common.errors import SettingError
from tests.support.processes import PATIENCE, ROOT, SMALL, free_port
from tests.support.sample import sampled

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
HUGE = "1" + "0" * 400
MAY_BE_0 = {"--warmup-steps", "--seed", "--workers", "--save-every", "--resume-from",
            "--num-experts"}
DONE = f"{SMALL} --steps 2"  # the run in the folder "done"
TEXTS = {"--data", "--val-data", "--out", "--model", "--stage", "--wandb"}  # of rows below


class Started(Exception):
    """A script has not refused its options."""


def started(*_, **__):
    raise Started


def test_the_type_of_each_option(monkeypatch):
    """No option takes a value that nothing checks."""
    parsers = []
    for script in SCRIPTS:
        module = importlib.import_module(script)
        monkeypatch.setattr(
            module, "parse_options", lambda parser, _: started(parsers.append(parser)))
        with pytest.raises(Started):
            module.main([])
    for action in (action for parser in parsers for action in parser._actions):
        (name, *_), parse, refused = action.option_strings, action.type, []
        if parse and parse.__name__ == "whole number":
            least = 1 - (name in MAY_BE_0)
            assert parse(str(least)) == least
            refused = [str(least - 1), HUGE]
        elif parse and parse.__name__ == "number":
            refused = ["nan", "inf", "-1"]
        else:
            assert action.nargs == 0 or action.choices or name in TEXTS, name
        for text in refused:
            with pytest.raises(argparse.ArgumentTypeError):
                parse(text)


# By script: options, and what the message says, in which " ... " stands for any text. Rows of other
# scripts than single.py begin with the number of ranks. Each message has the option, its value, and
# what is allowed or what to do.

SINGLE = [
    ("--lr ''", "--lr: ... ''"), ("--beta2 1", "--beta2: 1 ... most"), ("--unknown", "--unknown"),
    ("--lr 0.1 --min-lr 0.2", "--min-lr 0.2 is above --lr 0.1"),
    ("--num-hidden-layers 10001", "num_hidden_layers ... 10001 ... at most 10000"),
    ("--head-dim 7", "head_dim 7 ... odd"),
    ("--num-attention-heads 7", "7 does not divide hidden_size 128"),
    ("--num-key-value-heads 3", "3 does not divide num_attention_heads 8"),
    ("--model nowhere", "--model nowhere ... choose from tiny, small ... config.json"),
    ("--model file", "file cannot be read (JSONDecodeError"),
    ("--device cuda", "--device cuda ... no GPU ... --device cpu"),
    ("--profile --steps 3", "--steps 3 ... at least 4"),
    ("--resume-from 2 --no-resume", "--no-resume with --resume-from 2"),
    ("--out ''", "--out: ... empty"), ("--out file/run", "file/run ... Not a directory"),
    ("--data ''", "--data '' ... 'stdlib'"), ("--data nowhere", "--data nowhere: no such file"),
    ("--data with-loop", "loop cannot be read"), ("--data odd.bin", "odd.bin has 301 bytes"),
    ("--data empty", "--data empty holds 0 tokens ... --seq-len 128 takes 129"),
    ("--data mixed", "mixed mixes .bin files"),
    ("--data big.bin", "token 256, beyond a vocabulary of 256: raise --vocab-size"),
    ("--val-data ''", "--val-data: ... empty"), ("--val-data nowhere", "--val-data nowhere: no"),
    ("--val-data file --batch-size 79", "--val-data has 78 samples ... --batch-size 79"),
    # A folder with a finished run of two steps
    (f"{SMALL} --out done --steps 1", "finished step 2 ... --steps is 1: raise --steps"),
    *[(f"{SMALL} --out done --steps 4 {name} {now}", f"{name} is {saved} in done/step-00000002 and "
       f"{now} ... --no-resume or another --out")
      for name, saved, now in [("--hidden-size", 32, 64), ("--batch-size", 8, 4),
                               ("--seq-len", 32, 16), ("--seed", 0, 1)]],
    (f"{SMALL} --out done --steps 4 --data other", "samples in --data ... resume with the same"),
    (f"{SMALL} --out done --resume-from 1", "--resume-from 1 ... it has 2"),
]

SELECTIVE = "--num-experts 4 --activation-checkpointing selective"
STRATEGIES = {
    "single": [(2, "", "started as 2")],
    "zero": [(2, "--stage 3", "--stage 3 ... fsdp.py")],
    "fsdp": [
        (3, "--replicate 2", "--replicate 2 does not divide the world size 3: use 1 or 3"),
        (2, "--model mixtral", "--model mixtral ... ep.py"),
        (2, "--cpu-offload", "--cpu-offload ... leave --cpu-offload out"),
    ],
    "tp": [(4, f"{option} {size}", f"{option} {size} ... 4 tensor-parallel ranks ... multiple of 4")
           for option, size in (("--num-key-value-heads", 2), ("--intermediate-size", 90),
                                ("--vocab-size", 257), ("--seq-len", 30))] + [
        (4, "--hidden-size 48 --num-attention-heads 6 --num-key-value-heads 2",
         "--num-attention-heads 6 ... over 4")],
    "cp": [
        (2, "--activation-checkpointing selective --compile", "selective ... --compile ... full"),
        (4, "--seq-len 36", "--seq-len 36 ... 8 equal ... multiple of 8, such as 32 or 40"),
        (4, "--seq-len 6", "such as 8"),
        (2, "--seq-len 7 --attention ulysses", "--seq-len 7 ... 2 equal chunks, 1 for each"),
        (3, "--seq-len 36 --attention ulysses", "--num-attention-heads 8 ... by 3 ranks"),
    ],
    "pp": [
        (4, "--microbatches 3", "--microbatches 3 ... 1f1b on 4 ranks: use at least 4"),
        (2, "--schedule 1f1b --stages-per-rank 2", "--stages-per-rank 2 ... 1f1b ... use 1"),
        (4, "--schedule loopedbfs --stages-per-rank 2", "4 ranks x 2 stages are 8, but 4 layers"),
        (2, "--schedule zerobubble --microbatches 5 --batch-size 20",
         "multiple of 2, such as 4 or 6"),
        (2, "--microbatches 5", "--batch-size 16 ... 5 micro-batches: use a multiple of 5"),
        (2, "--schedule zbv --stages-per-rank 2 --compile", "--compile with --schedule zbv"),
        (2, "--schedule zerobubble --activation-checkpointing",
         "--activation-checkpointing with --schedule zerobubble"),
    ],
    "hybrid_3d": [
        (4, "--dp 2 --tp 2 --cp 3", "(4) ... dp (2) x tp (2) x cp (3) x pp (1) = 12"),
        (4, "--cp 4 --seq-len 36", "--seq-len 36 ... 8 equal parts (2 x --cp)"),
        (8, "--cp 2 --tp 4 --seq-len 20", "--cp 2 is 10 positions ... --tp 4"),
        (2, "--pp 2 --microbatches 1", "--microbatches 1 ... at least --pp 2"),
        (2, "--pp 2 --microbatches 3", "--batch-size 16 ... 3 equal parts"),
        (2, "--pp 2 --num-hidden-layers 1", "--pp 2 ... 1 layers"),
        (4, "--cp 4 --replicate 2", "--replicate 2 does not divide dp (1)"),
        (2, SELECTIVE, "selective with --num-experts ... use full"),
        (4, "--tp 2 --ep 2", "--ep 2 ... give --num-experts"),
        (2, "--tp 2 --num-experts 4 --no-sequence-parallel", "--no-sequence-parallel with --num"),
        (2, "--tp 2 --num-experts 4 --seq-len 31", "31 positions ... --tp 2 ... multiple of 4\n"),
        (4, "--tp 2 --pp 2 --num-experts 4 --ep 4", "--ep 4 ... the 2 ranks ... use 1 or 2"),
        (8, "--replicate 2 --tp 2 --num-experts 6 --ep 4", "--ep 4 ... --num-experts 6: use 1 or"),
        (1, "--balance-rate 1e-3", "--balance-rate 0.001"),
    ],
    "diloco": [
        (4, "--replicas 3", "--replicas 3 ... world size 4: use 1 or 2 or 4"),
        (1, "", "--replicas 2 ... world size 1: use 1"),
    ],
    "ep": [
        (2, "", "give --num-experts, or use fsdp.py"), (2, SELECTIVE, "selective with --num-exper"),
        (4, "--num-experts 4 --ep 3 --expert-size 25", "--ep 3 ... 4 ranks ... use 1 or 2 or 4"),
        (4, "--num-experts 6", "--ep 4 does not divide --num-experts 6: use 1 or 2"),
        # What is proposed is not refused in its turn.
        (4, "--num-experts 6 --expert-size 25", "--num-experts 6: use a multiple of 4 as --num"),
        (4, "--num-experts 6 --expert-size 25 --ep 3",
         "use a multiple of 4 as --num-experts, and an --ep that divides 4"),
        (4, "--num-experts 6 --ep 2 --expert-size 25",
         "--ep 2 leaves 2 ranks ... --hidden-size 128 and --expert-size 25"),
        (1, "--num-experts 2 --experts-per-token 3", "experts_per_token 3 ... num_experts 2"),
        (1, "--num-experts 2 --experts-per-token 1", "experts_per_token 1 never trains"),
        (1, "--expert-size 8", "expert_size 8 ... give num_experts"),
    ],
}

ENVIRONMENTS = [
    *[({"RANK": value}, f"RANK is '{value:.40}' ... below 2147483648")
      for value in ("", "-1", "one", HUGE, "2147483648")],
    ({"WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE is 0"),
    ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
    ({"RANK": None}, "RANK is None and WORLD_SIZE is 2"),
    *[({"RANK": None, "WORLD_SIZE": None, name: "2"}, f"{name} is 2 but RANK is not set ... run.sh")
      for name in launch.TASKS],
]


def in_order(words, line):
    """Whether ``line`` has what stands between the " ... " in ``words``, in this order."""
    for part in words.split(" ... "):
        _, found, line = line.partition(part)
        if not found:
            return False
    return True


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory):
    """A working folder with data of every bad kind, and with a finished run of two steps."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "file").write_text("text " * 2000)
    (folder / "other").write_text("test " * 2000)
    (folder / "empty").mkdir()
    (folder / "with-loop").mkdir()
    (folder / "with-loop" / "loop").symlink_to("loop")
    (folder / "mixed").mkdir()
    for name in ("a.bin", "b.txt"):
        (folder / "mixed" / name).write_bytes(b"text" * 99)
    (folder / "odd.bin").write_bytes(bytes(301))
    (folder / "big.bin").write_bytes(b"\0\1" * 5000)
    for name, change in {
        "1": {"hidden_size": 64}, "mixtral": {"model_type": "mixtral", "num_key_value_heads": 4},
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 4, **change,
        }))
    (folder / "0").mkdir()
    for rank in (0, 1):  # the same name for other data
        (folder / str(rank) / "letters").write_text("ab"[rank] + "x" * 9999)
    server.run("single.py", 0, f"{DONE} --data file", folder=folder, out="done")
    return folder


def contents(folder):
    """When each file was last written, but for what each start writes."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")
            if path.is_file() and path.name not in ("lock", "run-id")}


# In this process: a script refuses its options before its ranks connect.


def test_options(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = contents(folder)
    every = STRATEGIES | {"single": STRATEGIES["single"] + [(0, *row) for row in SINGLE]}
    for script, rows in every.items():
        module = importlib.import_module(script)
        monkeypatch.setattr(module, "load_steps", started)
        monkeypatch.setattr(module, "start_process_group", started, raising=False)
        for world, options, words in rows:
            ranks = {"RANK": "0", "WORLD_SIZE": str(world)} if world else {}
            monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **ranks})
            with pytest.raises(SettingError) as error:
                module.main(shlex.split(f"--data file --out out {options}"))
            line = f"{error.value}\n"  # in which nothing follows
            assert in_order(words, line), (script, options, line)
    assert contents(folder) == before


def test_a_finished_run_is_done(folder, capsys):
    """Started again it says so, and writes nothing."""
    before = contents(folder)
    options = f"{DONE} --data {folder}/file --out {folder}/done"
    assert importlib.import_module("single").main(options.split()) == []
    assert "finished step 2, its last: raise --steps" in capsys.readouterr().out
    assert contents(folder) == before


def test_gloo_on_gpus(monkeypatch):
    """Where ranks send to one another or gather DTensors."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "2"})
    for script, *options in (["tp"], ["cp"], ["pp"], ["hybrid_3d", "--cp", "2"]):
        with pytest.raises(SettingError, match="--backend gloo on GPUs"):
            importlib.import_module(script).main(
                ["--backend", "gloo", "--dtype", "float32", *options])


TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def test_environments(monkeypatch):
    for change, words in ENVIRONMENTS:
        env = {name: value for name, value in (TWO | change).items() if value is not None}
        monkeypatch.setattr(os, "environ", env)
        with pytest.raises(SettingError) as error:
            launch.rank_and_world_size()
        assert in_order(words, str(error.value)), (change, error.value)
    for name in launch.TASKS:  # one task, or one of several that has a rank
        monkeypatch.setattr(os, "environ", {name: "1"})
        assert launch.rank_and_world_size() == (0, 1)
        monkeypatch.setattr(os, "environ", {name: "2", "RANK": "1", "WORLD_SIZE": "2"})
        assert launch.rank_and_world_size() == (1, 2)


CONNECTIONS = [
    ({"MASTER_ADDR": "no-such-machine.invalid"},
     "rank 0 cannot connect ... MASTER_ADDR no-such-machine.invalid, MASTER_PORT"),
    ({"RANK": "1"}, "rank 1 cannot connect ... --timeout"),
    ({"MASTER_PORT": "{taken}"}, "MASTER_PORT {taken} ( ... ddress already in use ... a free port"),
    ({"MASTER_PORT": "-5"}, "MASTER_PORT is '-5'"),
]


def test_ranks_that_cannot_connect(monkeypatch):
    args = argparse.Namespace(device="cpu", backend="auto", deterministic=False, timeout=1,
                              on_all_ranks={})
    for change, words in CONNECTIONS:
        with socket.create_server(("127.0.0.1", 0)) as taken, free_port() as free:
            port = str(taken.getsockname()[1])
            env = {**TWO, "MASTER_PORT": str(free), **change}
            monkeypatch.setattr(os, "environ", {
                name: value.replace("{taken}", port) for name, value in env.items()})
            with pytest.raises(SettingError) as error:
                launch.start_process_group(args)
            assert in_order(words.replace("{taken}", port), str(error.value)), error.value
    args.backend = "nccl"
    with pytest.raises(SettingError, match="--backend nccl needs a GPU for each process: use gloo"):
        launch.start_process_group(args)


def test_what_ranks_compare(folder, monkeypatch):
    """Before they connect: NCCL would wait for a rank on the CPU."""
    def compare(store, rank, ranks, settings):
        found.update(settings)
        return "they differ"

    found = {}
    monkeypatch.chdir(folder)
    monkeypatch.setattr(launch, "find_difference", compare)
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    with pytest.raises(SettingError, match="they differ"):
        importlib.import_module("ddp").main(["--lr", "0.5", "--model", "1"])
    assert found["the type of device"] == "cpu" and found["torch"] == torch.__version__
    assert found["Python"] == platform.python_version()
    assert (found["--lr"], found["--hidden-size"]) == (0.5, 64)  # as 1/config.json has it
    assert found.keys() >= {"TORCH_GLOO_LAZY_INIT", "the hash of common/model.py"}


# In processes: one line, from one rank; and in the run folder, as the ranks see it

@pytest.fixture
def refused(server, folder):
    """Run a command that must be refused."""
    before = contents(folder)

    def refused(command, world, words, **more):
        script, *options = shlex.split(command)
        defaults = shlex.split(DONE) if "done" in options else []
        defaults += [] if "--data" in options else ["--data", "file"]
        defaults += [] if "--out" in options else ["--out", "out"]
        result = server.run(script, world, [*defaults, *options], folder=folder, pass_out=False,
                            expect_ok=False, **more)
        assert all(status not in (0, -9) for status in result.statuses), result.output
        (line,) = result.lines
        assert line.startswith(f"{script}: error: ") and line.isprintable() and len(line) < 600
        assert in_order(words, line), line

    yield refused
    assert contents(folder) == before


BOTH = "{} is ... on rank 0 and {} on rank 1: start all ranks with the same"
@pytest.mark.parametrize("command, world, code, words", sampled(COMMANDS := [
    ("single.py --data '\udcff\x1b[2J'", 0, "", r"--data \udcff\x1b[2J: no such file"),
    # Models that a strategy cannot take
    ("zero.py", 2, "tied()", "weight is in 2 of the units"),
    ("fsdp.py", 2, "tied()", "two units share a parameter ... in one"),
    ("pp.py --schedule zbv", 1, "tied()", "model.embed_tokens.weight ... lm_head.weight"),
    ("pp.py", 2, "own_parameter()", "model.gate: del"),
    # Ranks that differ; the last one says so before the earlier run is moved aside
    ("ddp.py", 2, "rank_1_has('--lr', '0.5')", BOTH.format("--lr", "0.5")),
    ("ddp.py", 2, "other_code('model.py')", BOTH.format("the hash of common/model.py", " ... ")),
    ("ddp.py --out ../done --data letters --no-resume", 2, "os.chdir(str(rank))",
     "samples in --data is"),
    ("hybrid_3d.py --tp 2", 2, "own_parameter()", "model.gate: add its module"),
], COMMANDS[:-1]))
def test_a_command(refused, command, world, code, words):
    """``code`` runs before the command on each rank."""
    refused(command, world, words, inject=code)


NODES = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


RUN_SH = [
    ("README.md", {}, "README.md is no Python script ... ddp.py"),
    ("ddp.py", {"NNODES": "0"}, "NNODES is '0' ... at least 1"),
    ("ddp.py", NODES | {"NODE_RANK": ""}, "NNODES is 2: set NODE_RANK ... MASTER_ADDR"),
    ("ddp.py", NODES | {"NODE_RANK": "2"}, "NODE_RANK is 2 and NNODES is 2"),
    ("nothing.py", {}, "nothing.py: no such script"), ("", {}, "say what to run"),
]


@pytest.mark.parametrize("command, environment, words", RUN_SH)
def test_run_sh(tmp_path, command, environment, words):
    result = subprocess.run(
        ["bash", ROOT / "run.sh", *command.split()], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "PYTHON": sys.executable, "NPROC": "2", **environment},
        timeout=PATIENCE,
    )
    (line,) = result.stderr.splitlines()
    assert line.startswith("run.sh: error: ") and result.returncode == 1 and in_order(words, line)
