"""Bad options, files and environments end in one line from one rank, which names the value, what is
allowed and what to change, with a status that is not 0; and nothing in the run folder is lost."""

import argparse
import datetime
import importlib
import json
import os
import platform
import resource
import shlex
import socket

import pytest
import torch
from torch.distributed import distributed_c10d

from common import launch
from common.errors import SettingError
from tests.support.processes import BARE, ROOT, SMALL, TOOLS, free_port

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
HUGE = "1" + "0" * 400
MAY_BE_0 = {"--local-rank", "--warmup-steps", "--seed", "--workers", "--save-every", "--num-experts",
            "--rank"}
TEXTS = {"--backend", "--data", "--from", "--val-data", "--out", "--model", "--stage"}  # rows below
DEFAULTS = """--steps 200 --batch-size 16 --grad-accum 1 --seq-len 128 --model tiny --seed 0
    --lr 0.002 --min-lr 0.0 --warmup-steps 10 --weight-decay 0.1 --beta1 0.9 --beta2 0.95
    --grad-clip 1.0 --data stdlib --token-dtype auto --workers 0 --dtype auto --device auto
    --backend auto --timeout 600 --deterministic False --compile False --save-every 100 --keep 2
    --async-save False --val-every 100 --val-batches 10 --log-every 10 --count True
    --profile False --stage 2 --replicate 1 --reshard-after-forward True --cpu-offload False
    --sequence-parallel True --attention ring --schedule 1f1b --microbatches 4
    --tp 1 --cp 1 --pp 1 --ep 1 --balance-rate 0.0"""  # others have none, or that of the model


class Started(Exception):
    """A script has not refused its options."""


def started(*args, **_):
    raise Started(*args)


def test_the_type_the_help_and_the_default_of_each_option(monkeypatch):
    """No option of a script takes a value that nothing checks."""
    defaults = set()
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", started)
    for module in (*SCRIPTS, *TOOLS):
        with pytest.raises(Started) as start:
            importlib.import_module(TOOLS.get(module, module)).main([])
        assert not start.value.args[0].allow_abbrev
        for action in start.value.args[0]._actions:
            name, parse = (*action.option_strings, action.dest)[0], action.type
            if module in SCRIPTS and action.default not in (None, argparse.SUPPRESS):
                defaults.add(f"{name} {action.default}")
            refused = {
                "whole number": [str(-(name in MAY_BE_0)), HUGE],
                "number": ["nan", "inf", "-1", "0" if module in TOOLS else "-0.1"],
            }.get(getattr(parse, "__name__", ""), [])
            assert (module in TOOLS or refused or action.nargs == 0 or action.choices
                    or name in TEXTS), name
            assert action.help and bool(action.metavar) >= bool(refused), name
            for text in refused:
                with pytest.raises(argparse.ArgumentTypeError):
                    parse(text)
            if HUGE in refused:
                assert parse(str(1 - (name in MAY_BE_0))) == 1 - (name in MAY_BE_0)
    words = DEFAULTS.split()
    assert {text for text in defaults if not text.startswith("--out ")} == {
        " ".join(pair) for pair in zip(words[::2], words[1::2])}


# Each row: a script, its number of ranks (0: plain python), and options; then what a message says:
# the option, its value, and what is allowed or what to do. " ... " stands for any text. A few rows
# show what is allowed.

AGAIN = f"{SMALL} --out done --steps 4"  # a folder with a finished run of two steps
SELECTIVE = "--num-experts 4 --activation-checkpointing selective"
REFUSED = f"""
single 0 --beta2 1 | --beta2: 1 ... most
single 0 --unknown | --unknown
single 0 --lr 0.1 --min-lr 0.2 | --min-lr 0.2 is above --lr 0.1
single 0 --lr 0.1 --min-lr 0.1 | it starts
single 0 --num-hidden-layers 10001 | num_hidden_layers ... 10001 ... at most 10000
single 0 --head-dim 7 | head_dim 7 ... odd
single 0 --num-attention-heads 6 --num-key-value-heads 3 --head-dim 8 | it starts
single 0 --num-attention-heads 7 | 7 does not divide hidden_size 128
single 0 --num-key-value-heads 3 | 3 does not divide num_attention_heads 8
single 0 --model nowhere | --model nowhere ... choose from tiny, small ... config.json
single 0 --model file | file cannot be read (JSONDecodeError
single 0 --device cuda | --device cuda ... no GPU ... --device cpu
ddp 2 --local-rank=1 | it starts
ddp 2 --local_rank 0 | it starts
single 0 --profile --steps 3 | --steps 3 ... at least 4
single 0 --from '' | --from: ... empty
single 0 --from done | --from ... done is no checkpoint: name one, such as ... step-00000002
single 0 --out '' | --out: ... empty
single 0 --out file/run | file/run ... Not a directory
single 0 --data '' | --data '' ... 'stdlib'
single 0 --data with-loop | loop cannot be read
single 0 --data odd.bin | odd.bin has 301 bytes
single 0 --data empty | --data empty holds 0 tokens ... --seq-len 128 takes 129
single 0 --data mixed | mixed mixes .bin files
single 0 --data big.bin | token 256, beyond a vocabulary of 256: raise --vocab-size ... no ids
single 0 --val-data '' | --val-data: ... empty
single 0 --val-data nowhere | --val-data nowhere: no such file
single 0 --val-data file --batch-size 79 | --val-data has 78 samples ... --batch-size 79
single 0 {AGAIN} --steps 1 | finished step 2 ... --steps is 1: raise --steps
single 0 {AGAIN} --hidden-size 64 | --hidden-size is 32 in done/ ... 64 ... another --out, or remove
single 0 {AGAIN} --batch-size 4 | --batch-size is 8 in done/ ... 4
single 0 {AGAIN} --seq-len 16 | --seq-len is 32 in done/ ... 16
single 0 {AGAIN} --seed 1 | --seed is 0 in done/ ... 1
single 0 {AGAIN} --data other | samples in --data ... resume with the same
single 0 {AGAIN} --from other/step-00000001 | done holds a run that began from no other ... --from is
single 0 --out . | --out . has ... and no run ... such as run
single 2 | started as 2
ddp 2 --backend mpi | --backend: mpi is not allowed ... nccl on GPUs and gloo on CPUs ... no MPI
zero 2 --stage 0 | --stage 0 ... fsdp.py
zero 2 --stage 3 | --stage 3 ... fsdp.py
fsdp 3 --replicate 2 | --replicate 2 does not divide the world size 3: use 1 or 3
fsdp 2 --model mixtral | --model mixtral ... ep.py
fsdp 2 --cpu-offload | --cpu-offload ... leave --cpu-offload out
tp 4 --num-attention-heads 6 --hidden-size 48 --num-key-value-heads 2 | --num-attention-heads 6
tp 4 --num-key-value-heads 2 | --num-key-value-heads 2 ... 4 tensor-parallel ... multiple of 4
tp 4 --intermediate-size 90 | --intermediate-size 90
tp 4 --vocab-size 257 | --vocab-size 257
tp 4 --seq-len 30 | --seq-len 30
tp 4 --seq-len 30 --no-sequence-parallel | it starts
cp 2 --activation-checkpointing selective --compile | selective ... --compile ... full
cp 3 --seq-len 36 --compile | it starts
cp 1 --seq-len 7 | it starts
cp 4 --seq-len 36 | --seq-len 36 ... 8 equal ... multiple of 8, such as 32 or 40
cp 4 --seq-len 6 | such as 8
cp 2 --seq-len 7 --attention ulysses | --seq-len 7 ... 2 equal chunks, 1 for each
cp 3 --seq-len 36 --attention ulysses | --num-attention-heads 8 ... by 3 ranks
pp 2 --schedule loopedbfs --stages-per-rank 2 --num-hidden-layers 2 | it starts
pp 4 --microbatches 3 | --microbatches 3 ... 1f1b on 4 ranks: use at least 4
pp 2 --schedule 1f1b --stages-per-rank 2 | --stages-per-rank 2 ... 1f1b ... use 1
pp 4 --schedule loopedbfs --stages-per-rank 2 | 4 ranks x 2 stages are 8, but 4 layers
pp 2 --schedule zerobubble --microbatches 5 --batch-size 20 | multiple of 2, such as 4 or 6
pp 2 --microbatches 20 --grad-accum 2 | --batch-size 16 ... use a multiple of 40, such as 40
pp 2 --schedule dualpipev --compile | --compile with --schedule dualpipev
pp 2 --schedule zbv --activation-checkpointing | -checkpointing with --schedule zbv
hybrid_3d 4 --dp 3 | (4) ... dp (3) x tp (1) x cp (1) x pp (1) = 3
hybrid_3d 4 --cp 4 --seq-len 36 | --seq-len 36 ... 8 equal parts (2 x --cp)
hybrid_3d 8 --cp 2 --tp 4 --seq-len 20 | --cp 2 is 10 positions ... --tp 4
hybrid_3d 2 --pp 2 --microbatches 1 | --microbatches 1 ... at least --pp 2
hybrid_3d 2 --pp 2 --microbatches 2 --grad-accum 3 | --batch-size 16 ... 6 equal parts
hybrid_3d 2 --pp 2 --num-hidden-layers 1 | --pp 2 ... 1 layers
hybrid_3d 2 --pp 2 --num-hidden-layers 2 --compile | it starts
hybrid_3d 4 --cp 2 --tp 2 --compile --activation-checkpointing selective | selective with --compile
hybrid_3d 2 --tp 2 --intermediate-size 91 | --intermediate-size 91
hybrid_3d 2 --tp 2 --intermediate-size 91 --num-experts 4 | it starts
hybrid_3d 2 --dp 2 --num-experts 4 --no-sequence-parallel | it starts
hybrid_3d 4 --cp 4 --replicate 2 | --replicate 2 does not divide dp (1)
hybrid_3d 2 {SELECTIVE} | selective with --num-experts ... use full
hybrid_3d 4 --tp 2 --ep 2 | --ep 2 ... give --num-experts
hybrid_3d 4 --tp 4 --num-key-value-heads 2 | --num-key-value-heads 2
hybrid_3d 2 --tp 2 --vocab-size 257 | --vocab-size 257
hybrid_3d 1 --seq-len 7 | it starts
hybrid_3d 2 --cp 2 --seq-len 6 | --seq-len 6 ... 2 x --cp
hybrid_3d 2 --tp 2 --num-experts 4 --no-sequence-parallel | --no-sequence-parallel with --num
hybrid_3d 2 --tp 2 --num-experts 4 --seq-len 31 | 31 positions ... --tp 2 ... multiple of 4 (end)
hybrid_3d 4 --tp 2 --pp 2 --num-experts 4 --ep 4 | --ep 4 ... the 2 ranks ... use 1 or 2
hybrid_3d 8 --replicate 2 --tp 2 --num-experts 6 --ep 4 | --ep 4 ... --num-experts 6: use 1 or
hybrid_3d 8 --replicate 2 --num-experts 8 --ep 8 | --ep 8 ... the 4 ranks ... use 1 or 2 or 4
hybrid_3d 1 --balance-rate 1e-3 | --balance-rate 0.001
examples.diloco 4 --replicas 3 | --replicas 3 ... world size 4: use 1 or 2 or 4
examples.diloco 1 | --replicas 2 ... world size 1: use 1
ep 2 | give --num-experts, or use fsdp.py
ep 2 {SELECTIVE} | selective with --num-exper
ep 4 --num-experts 4 --ep 3 --expert-size 25 | --ep 3 ... 4 ranks ... use 1 or 2 or 4
ep 4 --num-experts 6 | --ep 4 does not divide --num-experts 6: use 1 or 2
ep 4 --num-experts 6 --expert-size 25 --ep 3 | a multiple of 4 ... and an --ep that divides 4
ep 4 --num-experts 6 --ep 2 --expert-size 25 | --ep 2 leaves 2 ranks ... 128 and --expert-size 25
ep 4 --num-experts 6 --ep 2 --hidden-size 129 --head-dim 16 --expert-size 24 | --ep 2 ... 129
ep 1 --num-experts 2 --experts-per-token 3 | experts_per_token 3 ... num_experts 2
ep 1 --num-experts 2 --experts-per-token 1 | experts_per_token 1 never trains
ep 1 --num-experts 1 | it starts
ep 1 --expert-size 8 | expert_size 8 ... give num_experts
"""


def in_order(words, line):
    """Whether ``line`` has what stands between the " ... " in ``words``, in this order."""
    for part in words.split(" ... "):
        _, found, line = line.partition(part)
        if not found:
            return False
    return True


TINY_CONFIG = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,
               "num_hidden_layers": 2, "num_attention_heads": 4}
FILES = {
    "file": "text " * 2000, "other": "test " * 2000, "odd.bin": "\0" * 301,
    "big.bin": "\0\1" * 5000, "mixed/a.bin": "text" * 99, "mixed/b.txt": "text" * 99,
    "empty/.hidden": "", "with-loop/a.txt": "text",
    "0/letters": "a" + "x" * 9999, "1/letters": "b" + "x" * 9999,  # the same name for other data
    "1/config.json": json.dumps(TINY_CONFIG | {"hidden_size": 64}),
    "mixtral/config.json": json.dumps(
        TINY_CONFIG | {"model_type": "mixtral", "num_key_value_heads": 4}),
}


@pytest.fixture(scope="module")
def made(server, tmp_path_factory):
    """A working folder with data of every bad kind, and with a finished run of two steps."""
    folder = tmp_path_factory.mktemp("refusals")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "with-loop" / "loop").symlink_to("loop")
    server.run("single.py", 0, f"{SMALL} --steps 2 --data file", folder=folder, out="done")
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    """The working folder; no test writes into it, but for what each start writes."""
    def written():
        return {path: path.stat().st_mtime_ns for path in made.rglob("*")
                if path.is_file() and path.name not in ("lock", "run-id")}

    before = written()
    monkeypatch.chdir(made)
    yield made
    assert written() == before


# In this process: a script refuses its options before its ranks connect.


def test_options(folder, monkeypatch):
    for row in REFUSED.strip().splitlines():
        command, words = row.split(" | ")
        script, world, *options = shlex.split(command)
        module = importlib.import_module(script)
        monkeypatch.setattr(module, "load_steps", started)
        monkeypatch.setattr(module, "start_process_group", started, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "gloo" in command)
        ranks = {"RANK": "0", "WORLD_SIZE": world} if world != "0" else {}
        monkeypatch.setattr(os, "environ", {**BARE, **ranks})
        with pytest.raises(Started if words == "it starts" else SettingError) as error:
            module.main(["--data", "file", "--out", "out", *options])
        assert words == "it starts" or in_order(words, f"{error.value} (end)"), (row, error.value)


def test_a_finished_run_is_done(folder, capsys):
    """Started again it says so, and writes nothing."""
    options = f"{SMALL} --steps 2 --data file --out done"
    assert importlib.import_module("single").main(options.split()) == []
    assert "finished step 2, its last: raise --steps" in capsys.readouterr().out


TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
       "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "mine"}
CONNECTIONS = [
    *[({"RANK": value}, f"RANK is '{value:.40}' ... below 2147483648")
      for value in ("", "-1", HUGE, "2147483648")],
    ({"WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE is 0"),
    ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
    ({"RANK": None}, "RANK is None and WORLD_SIZE is 2"),
    *[({"RANK": None, "WORLD_SIZE": None, name: "2"}, f"{name} is 2 but RANK is not set ... run.sh")
      for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")],
    ({"MASTER_ADDR": "no-such-machine.invalid"},
     "rank 0 cannot connect ... MASTER_ADDR no-such-machine.invalid, MASTER_PORT"),
    ({"RANK": "1"}, "rank 1 cannot connect ... --timeout"),
    ({"MASTER_PORT": "{taken}"}, "MASTER_PORT {taken} ( ... ddress already in use ... a free port"),
    ({"MASTER_PORT": "{taken}", "RANK": "1"}, "(what answers there is no store"),
    ({"MASTER_PORT": "-5"}, "MASTER_PORT is '-5'"),
    ({"WORLD_SIZE": "4", "GLOO_SOCKET_IFNAME": None, "MASTER_ADDR": "no-such-machine.invalid"},
     "rank 0 cannot connect"),  # with 2 ranks on each of 2 machines, not through this one alone
]


def test_ranks_that_cannot_connect(monkeypatch):
    args = argparse.Namespace(device="cpu", backend="auto", deterministic=False, timeout=1,
                              on_all_ranks={})
    limit, raised = resource.getrlimit(resource.RLIMIT_NOFILE)[1], []
    monkeypatch.setattr(resource, "setrlimit", lambda *limits: raised.append(limits))
    for change, words in CONNECTIONS:
        with socket.create_server(("127.0.0.1", 0)) as taken, free_port() as free:
            port = str(taken.getsockname()[1])
            env = {**TWO, "MASTER_PORT": str(free), **change}
            monkeypatch.setattr(os, "environ", {
                name: value.replace("{taken}", port) for name, value in env.items()
                if value is not None})
            with pytest.raises(SettingError) as error:
                launch.start_process_group(args)
            assert in_order(words.replace("{taken}", port), str(error.value)), error.value
            assert os.environ.get("GLOO_SOCKET_IFNAME") == env["GLOO_SOCKET_IFNAME"]
    assert set(raised) == {(resource.RLIMIT_NOFILE, (limit, limit))}  # gloo has many sockets
    waits = {distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout}
    assert waits == {datetime.timedelta(seconds=1)}  # of the groups of a mesh, whatever the backend
    args.backend = "nccl"
    with pytest.raises(SettingError, match="--backend nccl does not fit: .* on CPUs, use gloo"):
        launch.start_process_group(args)


def test_one_task_of_another_launcher(monkeypatch):
    """And one of several that has a rank."""
    for env, expected in (({}, (0, 1)), ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2))):
        monkeypatch.setattr(os, "environ", env | {name: str(expected[1]) for name in launch.TASKS})
        assert launch.rank_and_world_size() == expected


def test_what_ranks_compare(folder, monkeypatch):
    """Before they connect: NCCL would wait for a rank on the CPU."""
    found = {}
    monkeypatch.setattr(
        launch, "find_difference", lambda *call: found.update(call[-1]) or "they differ")
    monkeypatch.setattr(os, "environ", BARE.copy())
    with pytest.raises(SettingError, match="they differ"):
        importlib.import_module("ddp").main(["--lr", "0.5", "--model", "1"])
    assert found["the type of device"] == "cpu" and found["torch"] == torch.__version__
    assert found["Python"] == platform.python_version()
    assert (found["--lr"], found["--hidden-size"]) == (0.5, 64)  # as 1/config.json has it
    assert found.keys() >= {"TORCH_GLOO_LAZY_INIT", "the hash of common/model.py"}
    assert "b is None on rank 0 and 2 on rank 1: " in launch.name_difference({}, {"b": 2}, 1)


# In processes: one line, from one rank


@pytest.mark.parametrize("command, world, code, words", [
    ("single.py --data '\udcff\x1b[2J\n'", 0, "", r"--data \udcff\x1b[2J\n: no such file"),
    # Models that a strategy cannot take
    ("fsdp.py", 2, "tied()", "two units share a parameter ... in one"),
    ("pp.py --schedule zbv", 1, "tied()", "model.embed_tokens.weight ... lm_head.weight"),
    ("pp.py", 2, "own_parameter()", "model.gate: del"),
    # Ranks that differ
    ("ddp.py", 2, "sys.argv += ['--lr', '0.5'] * rank",
     "--lr is ... on rank 0 and 0.5 on rank 1: start all ranks with the same"),
    (f"ddp.py {AGAIN} --out ../done --data letters", 2, "os.chdir(str(rank))",
     "samples in --data is"),
    ("hybrid_3d.py --tp 2", 2, "own_parameter()", "model.gate: add its module"),
])
def test_a_command(server, folder, command, world, code, words):
    """``code`` runs before the command on each rank."""
    script, *options = shlex.split(command)
    result = server.run(script, world, ["--data", "file", "--out", "out", *options], folder=folder,
                        pass_out=False, expect_ok=False, inject=code)
    assert all(status not in (0, -9) for status in result.statuses), result.output
    # A rank that still connects when the other one ends may log that.
    (line,) = [line for line in result.lines if "connectFullMesh" not in line]
    assert line.startswith(f"{script}: error: ") and line.isprintable() and len(line) < 600
    assert in_order(words, line), line
