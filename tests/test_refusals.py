"""Bad options, files and environments end in one line from one rank, which names the value, what is
allowed and what to change, with a status that is not 0; and nothing in the run folder is lost."""

import argparse
import importlib
import json
import os
import shlex
import socket
import subprocess
import sys

import numpy as np
import pytest

from common import launch, options
from tests.support.processes import PATIENCE, ROOT, free_port
from tests.support.sample import sampled

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
HUGE = "1" + "0" * 400
MAY_BE_0 = {"--warmup-steps", "--seed", "--workers", "--save-every", "--resume-from",
            "--num-experts"}
TEXTS = {"--data", "--val-data", "--out", "--model", "--stage", "--wandb"}  # of rows below


def parser_of(script, monkeypatch):
    """The parser of a script, with the options of its services."""
    module, parsers = importlib.import_module(script.removesuffix(".py")), []

    def take(parser, argv):
        parsers.append(parser)
        sys.exit()

    monkeypatch.setattr(module, "parse_options", take)
    with pytest.raises(SystemExit):
        module.main([])
    return parsers[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_type_of_each_option(script, monkeypatch):
    """No option takes a value that nothing checks."""
    for action in parser_of(script, monkeypatch)._actions:
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
            with pytest.raises(argparse.ArgumentTypeError, match="it must be (at|greater than)"):
                parse(text)


# Of each table a row is a command, the number of processes and what the line says, in which " ... "
# stands for any text; 0 processes: plain python.

OPTIONS = [("single.py " + options, 0, words) for options, words in [
    ("--steps 0", "argument --steps: 0 is not allowed: it must be at least 1"),
    ("--hidden-size 0", "argument --hidden-size: 0 is not allowed: it must be greater than 0"),
    (f"--seed {HUGE}", "argument --seed: 1000"),
    ("--workers 1.5", "argument --workers: invalid whole number value: '1.5'"),
    ("--lr nan", "argument --lr: nan is not allowed"),
    ("--lr ''", "--lr: invalid number value: ''"),
    ("--batch-size 1000000000000", "1000000000000 is not allowed: ... at most 16777216"),
    ("--num-hidden-layers 100000", "num_hidden_layers is 100000: it must be at most 10000"),
    ("--beta2 1", "--beta2 ... must be"),
    ("--head-dim 7", "head_dim 7 is odd"),
    ("--num-attention-heads 7", "7 does not divide hidden_size 128"),
    ("--num-key-value-heads 3", "num_key_value_heads 3 does not divide num_attention_heads 8"),
    *[(f"--model {name or repr(name)}", f"--model {name}: no such preset or file: choose from "
       f"tiny, small ... , or give a config.json or its folder") for name in ("nowhere", "")],
    ("--model empty", "empty/config.json cannot be read (No such file"),
    ("--model file", "file cannot be read (JSONDecodeError"),
    ("--model deep", "deep/config.json: num_hidden_layers is 1000000000: ... at most 10000"),
    ("--dtype wrong", "--dtype: invalid choice: 'wrong' (choose from "),
    ("--activation-checkpointing some", "--activation-checkpointing: invalid choice: 'some'"),
    ("--unknown", "unrecognized arguments: --unknown"), ("--steps", "expected one argument"),
    ("--device cuda", "--device cuda: torch finds no GPU here"),
    ("--profile --steps 3", "--steps 3: it traces from the fourth step, use at least 4"),
    ("--out ''", "--out: it is empty: name a "),
    ("--out file", "file ... File exists"), ("--out file/run", "file/run ... Not a directory"),
    ("--out /proc/nothing/run", "/proc/nothing"), ("--out loop/run", "loop/run"),
    ("--out 'file/\udcff'", r"file/\udcff"),
    ("--data ''", "--data '': no such file or folder (give one, or 'stdlib' for"),
    *[(f"--data {name}", f"--data {name}: no such file")
      for name in ("nowhere", "dangling", "loop")],
    ("--data '\udcff\udcfe'", r"--data \udcff\udcfe: no such file"),
    ("--data '\x1b[2Jx'", r"--data \x1b[2Jx: no such file"),
    ("--data with-dangling", "dangling cannot be read (No such file or directory)"),
    ("--data with-loop", "loop cannot be read (Too many levels of symbolic links)"),
    ("--data empty", "--data empty holds 0 tokens: one sample of --seq-len 128 takes 129; give"),
    ("--data file --seq-len 2000000000", "one sample of --seq-len 2000000000 takes 2000000001"),
    ("--data wide.bin", "--data wide.bin: every second number is 0, as if uint32 were read"),
    ("--data odd.bin", "odd.bin has 301 bytes: not a whole number of uint16 tokens"),
    ("--data big.bin", "holds token 300, beyond a vocabulary of 256: raise --vocab-size"),
    ("--data mixed", "--data mixed mixes .bin files (token ids) with others (text): keep one"),
    ("--val-data ''", "--val-data: it is empty: name a file"),
    ("--val-data nowhere", "--val-data nowhere: no such file"),
    ("--val-data empty", "--val-data empty holds 0 tokens"),
    ("--val-data big.bin", "holds token 300, beyond a vocabulary of 256: raise --vocab-size"),
    ("--val-data mixed", "--val-data mixed mixes .bin files (token ids) with others (text)"),
    ("--val-data file --batch-size 79", "--val-data has 78 samples of 128 tokens in file, less "
     "than one batch of --batch-size 79: give more data, or a smaller"),
]]

STRATEGIES = [
    ("single.py", 2, "single.py is one process and was started as 2: start it with plain python"),
    ("ddp.py", 3, "--batch-size 16 cannot be shared evenly by 3 data-parallel ranks ... 15 or 18"),
    ("ddp.py --batch-size 4 --grad-accum 3", 2, "3 accumulation steps: use a multiple of 6"),
    ("ddp.py --device cuda", 2, "--device cuda: torch finds no GPU here"),
    ("ddp.py --backend nccl", 2, "--backend nccl needs a GPU for each process: use gloo"),
    ("zero.py --stage 3", 2, "--stage 3: zero.py has 1 and 2; stage 3 is fsdp.py"),
    ("fsdp.py --replicate 2", 3, "--replicate 2 does not divide the world size 3: use 1 or 3"),
    ("fsdp.py --replicate 4", 2, "--replicate 4 does not divide the world size 2: use 1 or 2"),
    ("fsdp.py --cpu-offload", 2, "but this run is on the CPU: leave --cpu-offload out"),
    *[(f"tp.py {options}", 4, f"{options} cannot be split over 4 tensor-parallel ranks: use a "
       f"multiple of 4") for options in (
        "--num-key-value-heads 2", "--intermediate-size 90", "--vocab-size 257", "--seq-len 30")],
    ("tp.py --hidden-size 48 --num-attention-heads 6 --num-key-value-heads 2", 4,
     "--num-attention-heads 6 cannot be split over 4"),
    *[(f"{command} --activation-checkpointing selective --compile", 2,
       "selective with --compile: ... leave out one, or use --activation-checkpointing full")
      for command in ("cp.py", "hybrid_3d.py --cp 2")],
    ("cp.py --seq-len 36", 4, "--seq-len 36 cannot be cut into 8 equal chunks, 2 for each of 4 "
     "ranks: use a multiple of 8, such as 32 or 40"),
    ("cp.py --seq-len 6", 4, "such as 8"),
    ("cp.py --seq-len 6 --attention allgather", 2, "into 4 equal chunks, 2 for each of 2 ranks"),
    ("cp.py --seq-len 7 --attention ulysses", 2, "into 2 equal chunks, 1 for each of 2 ranks"),
    ("cp.py --seq-len 36 --attention ulysses", 3,
     "--num-attention-heads 8 and --num-key-value-heads 4 cannot be shared evenly by 3 ranks"),
    ("cp.py --seq-len 36 --num-attention-heads 6 --num-key-value-heads 2 --hidden-size 96 "
     "--attention ulysses", 3,
     "--num-key-value-heads 2 cannot be shared evenly by 3 ranks, which --attention ulysses needs"),
    ("cp.py --attention flash", 2, "--attention: invalid choice: 'flash' (choose from"),
    ("pp.py --microbatches 3", 4,
     "--microbatches 3 is too few for --schedule 1f1b on 4 ranks: use at least 4, or another"),
    ("pp.py --schedule dualpipev --stages-per-rank 2 --microbatches 3", 2,
     "too few for --schedule dualpipev on 2"),
    ("pp.py --schedule 1f1b --stages-per-rank 2", 2,
     "--stages-per-rank 2: --schedule 1f1b has 1 stage on each rank; use 1"),
    ("pp.py --schedule zbv --stages-per-rank 1", 2,
     "--stages-per-rank 1: --schedule zbv has 2 stages on each rank; use 2"),
    ("pp.py --schedule gpipe --num-hidden-layers 1", 4,
     "4 ranks x 1 stages are 4, but 1 layers, embedding and head fill 3 at most"),
    ("pp.py --schedule loopedbfs --stages-per-rank 2", 4, "4 ranks x 2 stages are 8, but 4 layers"),
    ("pp.py --schedule zerobubble --microbatches 5 --batch-size 20", 2,
     "cannot make 2 even rounds of them on 2 ranks; use a multiple of 2, such as 4 or 6"),
    ("pp.py --microbatches 5", 2, "--batch-size 16 cannot be cut evenly into 1 accumulation steps "
     "x 5 micro-batches: use a multiple of 5, such as 15"),
    ("pp.py --schedule zbv --stages-per-rank 2 --compile", 2, "--compile with --schedule zbv"),
    ("pp.py --schedule zerobubble --activation-checkpointing", 2,
     "--activation-checkpointing with --schedule zerobubble"),
    ("hybrid_3d.py --dp 2 --tp 2 --cp 3", 4,
     "World size (4) must equal dp (2) x tp (2) x cp (3) x pp (1) = 12: change one of them"),
    ("hybrid_3d.py --tp 2", 3, "World size (3) must equal dp (1) x tp (2) x cp (1) x pp (1) = 2"),
    ("hybrid_3d.py --tp 8", 4, "World size (4) must equal dp (1) x tp (8) x cp (1) x pp (1) = 8"),
    ("hybrid_3d.py --dp 0", 2, "--dp: 0 is not allowed"),
    ("hybrid_3d.py --tp 4 --num-key-value-heads 2", 4,
     "--num-key-value-heads 2 cannot be cut into 4 equal parts (--tp): use a multiple of 4"),
    ("hybrid_3d.py --cp 4 --seq-len 36", 4,
     "--seq-len 36 cannot be cut into 8 equal parts (2 x --cp)"),
    ("hybrid_3d.py --cp 2 --tp 4 --seq-len 20", 8,
     "over --cp 2 is 10 positions, which cannot be cut into --tp 4 equal parts"),
    ("hybrid_3d.py --pp 2 --microbatches 1", 2,
     "--microbatches 1 leaves stages without work: use at least --pp 2"),
    ("hybrid_3d.py --pp 2 --microbatches 3", 2, "--batch-size 16 cannot be cut into 3 equal parts"),
    ("hybrid_3d.py --pp 2 --num-hidden-layers 1", 2, "--pp 2 stages are more than the 1 layers"),
    ("hybrid_3d.py --replicate 3", 4, "--replicate 3 does not divide dp (4)"),
    ("hybrid_3d.py --cp 4 --replicate 2", 4, "--replicate 2 does not divide dp (1)"),
    ("diloco.py --replicas 3", 4, "--replicas 3 does not divide the world size 4: use 1 or 2 or 4"),
    ("diloco.py", 0, "--replicas 2 does not divide the world size 1: use 1"),
    ("diloco.py --inner-steps 0", 2, "--inner-steps: 0 is not allowed: it must be at least 1"),
    ("ddp.py --num-experts 4", 2, "unrecognized arguments: --num-experts"),
    ("fsdp.py --model mixtral", 2, "--model mixtral is a mixture of experts: ep.py and hyb"),
    ("ep.py", 2, "ep.py trains a mixture of experts: give --num-experts, or use fsdp.py"),
    ("ep.py --num-experts 4 --ep 3", 4,
     "--ep 3 does not divide the 4 ranks that share the experts: use 1 or 2 or 4"),
    ("ep.py --num-experts 6", 4, "--ep 4 does not divide --num-experts 6: use 1 or 2"),
    # What is proposed is not refused in its turn.
    ("ep.py --num-experts 6 --expert-size 25", 4,
     "--ep 4 does not divide --num-experts 6: use a multiple of 4 as --num-experts"),
    ("ep.py --num-experts 6 --expert-size 25 --ep 4", 6,
     "--ep 4 does not divide the 6 ranks that share the experts: use 1 or 2 or 3 or 6"),
    ("ep.py --num-experts 6 --expert-size 25 --ep 3", 4, "--ep 3 does not divide the 4 ranks that "
     "share the experts: use a multiple of 4 as --num-experts, and an --ep that divides 4"),
    ("ep.py --num-experts 6 --expert-size 26 --ep 3", 4,
     "--ep 3 does not divide the 4 ranks that share the experts: use 2"),
    ("ep.py --num-experts 6 --ep 2 --expert-size 25", 4, "--ep 2 leaves 2 ranks with the same 3 "
     "experts, and neither these nor --hidden-size 128 and --expert-size 25 can be cut into 2"),
    *[(f"{command} --num-experts 4 --activation-checkpointing selective", 2,
       "--activation-checkpointing selective with --num-experts: FSDP gathers experts within a")
      for command in ("ep.py", "hybrid_3d.py")],
    ("hybrid_3d.py --tp 2 --ep 2", 4,
     "--ep 2 spreads experts, and this model has none: give --num-experts too, or leave --ep out"),
    ("hybrid_3d.py --tp 2 --num-experts 4 --no-sequence-parallel", 2,
     "--no-sequence-parallel with --num-experts: each of the --tp 2 ranks would send all tokens"),
    ("hybrid_3d.py --tp 2 --num-experts 4 --seq-len 31", 2, "--seq-len 31 over --cp 1 is 31 "
     "positions, which cannot be cut into --tp 2 equal parts: use a multiple of 4\n"),
    ("hybrid_3d.py --tp 2 --pp 2 --num-experts 4 --ep 4", 4,
     "--ep 4 does not divide the 2 ranks that share the experts: use 1 or 2"),
    ("hybrid_3d.py --replicate 2 --tp 2 --num-experts 6 --ep 4", 8,
     "--ep 4 does not divide --num-experts 6: use 1 or 2"),
    ("ep.py --num-experts 2 --experts-per-token 3", 0,
     "experts_per_token 3 is more than num_experts 2: change one of them"),
    ("ep.py --num-experts 2 --experts-per-token 1", 0,
     "experts_per_token 1 never trains the router: the weight of the one expert is always 1"),
    ("hybrid_3d.py --balance-rate 1e-3", 0, "--balance-rate 0.001: this model has no experts"),
    ("ep.py --expert-size 8", 0, "expert_size 8 is of a model with experts: give num_experts"),
]

# In the folder of a finished run
SMALL = "--hidden-size 32 --batch-size 8 --seq-len 32 --steps 2"
RESUMES = [(f"{script} --out done {options}", world, words)
           for script, world in (("single.py", 0), ("fsdp.py", 2)) for options, words in [
    ("--steps 1", "done holds a run that has finished step 2, and --steps is 1: raise --steps"),
    *[(f"--steps 4 {name} {now}", f"{name} is {saved} in done/step-00000002 and {now} in this run: "
       f"resume with the same, or start a new run with --no-resume or another --out")
      for name, saved, now in [
        ("--hidden-size", 32, 64), ("--batch-size", 8, 4), ("--seq-len", 32, 16),
        ("--seed", 0, 1)]],
    ("--steps 4 --data other", "samples in --data ... resume with the same"),
    ("--steps 4 --resume-from 1", "--resume-from 1: done has no such checkpoint; it has 2"),
    ("--resume-from 2 --no-resume", "--no-resume with --resume-from 2: the one starts a new run"),
]]

# What a launcher sets: the first of two processes, with these changes
TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
NEITHER = {"RANK": None, "WORLD_SIZE": None}
CONNECT = "rank 0 cannot connect to the others through MASTER_ADDR {}, MASTER_PORT {} ("
ENVIRONMENTS = [
    *[({name: value}, f"{name} is '{value:.40}': it must be a whole number below 2147483648")
      for name, values in {
        "RANK": ["", "-1", "one", HUGE, "2147483648"], "WORLD_SIZE": ["", "1.5", "9999999999"],
        "MASTER_PORT": ["x", "-5", ""], "TORCH_FR_BUFFER_SIZE": ["x"]}.items()
      for value in values],
    *[({"MASTER_PORT": port}, CONNECT.format("127.0.0.1", port)) for port in ("99999", None)],
    ({"RANK": "1", "TIMEOUT": "2"}, "rank 1 cannot connect to the others through MASTER_ADDR"),
    *[({"MASTER_ADDR": name}, CONNECT.format(name, "")[:-2])
      for name in ("", "no-such-machine.invalid", "a" * 250, None)],
    ({"WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE is 0: a launcher such as torchrun sets both"),
    ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2: a launcher such as torchrun sets both"),
    ({"RANK": None}, "RANK is None and WORLD_SIZE is 2: a launcher"),
    ({"WORLD_SIZE": None}, "RANK is 0 and WORLD_SIZE is None: a launcher"),
    ({"MASTER_PORT": "{taken}"}, "MASTER_PORT {taken} ( ... ddress already in use ... a free port"),
    ({"WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth99"},
     "cannot connect ... for: eth99) ... IFNAME must name"),
    *[({**NEITHER, name: "2"}, f"{name} is 2 but RANK is not set: each process would train alone; "
       f"start the script by run.sh or torchrun, which set RANK and WORLD_SIZE for each process")
      for name in launch.TASKS],
]

# A command on two ranks, and what is run before it on each of them.
DIFFERENCES = [
    *[(command, f"rank_1_has('{option}', '{value}')",
       f"{option} is ... on rank 0 and {value} on rank 1: start all ranks with the same")
      for command, option, value in [
        ("ddp.py", "--lr", "0.5"), ("zero.py", "--dtype", "float64"), ("fsdp.py", "--keep", "9"),
        ("tp.py", "--seed", "1"), ("cp.py", "--out", "elsewhere"), ("pp.py", "--hidden-size", "64"),
        ("hybrid_3d.py --tp 2", "--log-every", "2"), ("ddp.py --backend gloo", "--backend", "auto"),
        ("ddp.py", "--backend", "gloo")]],
    ("ddp.py", "os.environ.update(TORCH_GLOO_LAZY_INIT=str(rank))",
     "TORCH_GLOO_LAZY_INIT is 0 on rank 0 and 1 on rank 1"),
    ("fsdp.py --model . --data ../file", "os.chdir(str(rank))",
     "--hidden-size is 32 on rank 0 and 64 on rank 1: start all ranks with the same"),
    ("ddp.py", "other_pythons()",
     "Python is 3.99.0 on rank 0 and 3.99.1 on rank 1: start all ranks with the same"),
    ("ddp.py", "other_code('model.py')", "the hash of common/model.py is ... on rank 0 and ... on"),
    ("ddp.py --timeout 2", "slow(1, 30)",
     "rank 0 cannot connect to the others through ... must start within --timeout seconds"),
    # Before they connect over NCCL, which would wait for the rank on the CPU
    ("ddp.py", "other_devices()", "the type of device is cpu on rank 0 and cuda on rank 1"),
    *[(f"{command} --out ../out --data {data}", "os.chdir(str(rank))", words)
      for command in ("ddp.py", "pp.py") for data, words in [
        ("letters", "the hash of some samples in --data is ... on rank 0 and ... on rank 1"),
        ("length", "the number of samples in --data is 78 on rank 0 and 79 on rank 1")]],
    ("ddp.py --out ../out --data ../file --val-data letters", "os.chdir(str(rank))",
     "the hash of some samples in --val-data is ... on rank 0 and ... on rank 1: start all"),
    # Before the earlier run is moved aside
    ("ddp.py --out ../done --data letters --no-resume", "os.chdir(str(rank))",
     "the hash of some samples in --data is ... on rank 0 and ... on rank 1"),
    # A setting of a foreign model
    ("fsdp.py", "other_models()",
     "--n-layer is 2 on rank 0 and 3 on rank 1: start all ranks with the same"),
]

# Models that a strategy cannot take
MODELS = [
    *[(command, world, "tied()", "several stages have the parameter model.embed_tokens.weight = "
       "lm_head.weight: delete it from all stages but one (layers must keep their names")
      for command, world in [
        ("pp.py", 2), ("pp.py --schedule zbv", 1), ("hybrid_3d.py --pp 2", 2)]],
    *[(command, 2, "own_parameter()", "several stages have the parameter model.gate: delete")
      for command in ("pp.py", "hybrid_3d.py --pp 2")],
    *[(command, world, "own_parameter()",
       "the plan does not reach model.gate: add its module, with Repl")
      for command, world in [("tp.py", 2), ("hybrid_3d.py --tp 2 --pp 1", 2)]],
]


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory):
    """A working folder with data of every bad kind, and with a finished run of two steps."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "file").write_text("text " * 2000)
    (folder / "other").write_text("test " * 2000)
    (folder / "empty").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    for name in ("dangling", "loop"):
        (folder / f"with-{name}").mkdir()
        os.rename(folder / name, folder / f"with-{name}" / name)
        (folder / f"with-{name}" / "text").write_text("text")
        (folder / name).symlink_to(f"with-{name}/{name}")
    (folder / "mixed").mkdir()
    for name in ("a.bin", "b.txt"):
        (folder / "mixed" / name).write_bytes(bytes(500))
    (folder / "odd.bin").write_bytes(bytes(301))
    np.arange(5000, dtype=np.uint32).tofile(folder / "wide.bin")
    np.full(5000, 300, np.uint16).tofile(folder / "big.bin")
    for name, change in {
        "deep": {"num_hidden_layers": 10**9}, "0": {}, "1": {"hidden_size": 64},
        "mixtral": {"model_type": "mixtral", "num_key_value_heads": 4},
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 4, **change,
        }))
    for rank in (0, 1):
        (folder / str(rank) / "letters").write_text("ab"[rank] + "x" * 9999)
        (folder / str(rank) / "length").write_text("x" * (10_000 + 128 * rank))
    server.run("single.py", 0, f"{SMALL} --data file", folder=folder, out="done")
    return folder


def contents(folder):
    """When each file was last written, but for what each start writes."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")
            if path.is_file() and path.name not in ("lock", "run-id")}


@pytest.fixture
def refused(server, folder):
    """Run a command that must be refused."""
    before = contents(folder)

    def refused(command, world, words, **more):
        script, *options = shlex.split(command)
        defaults = shlex.split(SMALL) if "done" in options else []
        defaults += [] if "--data" in options else ["--data", "file"]
        defaults += [] if "--out" in options else ["--out", "out"]
        result = server.run(script, world, [*defaults, *options], folder=folder, pass_out=False,
                            expect_ok=False, **more)
        assert all(status not in (0, -9) for status in result.statuses), result.output
        (line,) = result.lines
        assert line.startswith(f"{script}: error: ") and line.isprintable() and len(line) < 600
        assert in_order(words, f"{line}\n"), line  # "\n" in words: nothing may follow

    yield refused
    assert contents(folder) == before


def in_order(words, line):
    """Whether ``line`` has what stands between the " ... " in ``words``, in this order."""
    for part in words.split(" ... "):
        _, found, line = line.partition(part)
        if not found:
            return False
    return True


@pytest.mark.parametrize("command, world, words", [*OPTIONS, *STRATEGIES, *RESUMES])
def test_a_command(refused, command, world, words):
    refused(command, world, words)


@pytest.mark.parametrize("change, words", ENVIRONMENTS)
def test_an_environment(refused, change, words):
    options = f"--timeout {change['TIMEOUT']}" if "TIMEOUT" in change else ""
    with socket.create_server(("127.0.0.1", 0)) as taken, free_port() as free:
        port = taken.getsockname()[1]
        env = {**TWO, "MASTER_PORT": str(free), **change}
        env = {name: value and value.replace("{taken}", str(port)) for name, value in env.items()}
        refused(f"ddp.py {options}", 0, words.replace("{taken}", str(port)), env=env)


@pytest.mark.parametrize("command, code, words", DIFFERENCES)
def test_ranks_that_differ(refused, command, code, words):
    refused(command, 2, words, inject=code)


@pytest.mark.parametrize("name", launch.TASKS)
def test_a_task_that_is_not_one_of_several(monkeypatch, name):
    monkeypatch.setattr(os, "environ", {name: "1"})
    assert launch.rank_and_world_size() == (0, 1)
    monkeypatch.setattr(os, "environ", {name: "2", "RANK": "1", "WORLD_SIZE": "2"})
    assert launch.rank_and_world_size() == (1, 2)


@pytest.mark.parametrize("command, world, code, words", MODELS)
def test_a_model(refused, command, world, code, words):
    refused(command, world, words, inject=code)


@pytest.mark.parametrize("command, environment, words", [
    ("README.md", {}, "README.md is no Python script; there are cp.py ddp.py"),
    ("nothing.py", {}, "nothing.py: no such script"), ("", {}, "say what to run"),
    ("ddp.py", {"PYTHON": "/bin/true"}, "PYTHON is '/bin/true': that is no Python"),
    ("ddp.py", {"PYTHON": "/nowhere"}, "PYTHON is '/nowhere': that is no Python"),
    *[("ddp.py", {name: value}, f"{name} is '{value}': it must be a whole number, at least {least}")
      for name, value, least in (
        ("MAX_RESTARTS", "-1", 0), ("NNODES", "0", 1), ("MASTER_PORT", "x", 1), ("NPROC", "2.5", 1),
        ("NODE_RANK", "08", 0))],
])
def test_run_sh(tmp_path, command, environment, words):
    result = subprocess.run(
        ["bash", ROOT / "run.sh", *command.split()], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "PYTHON": sys.executable, **environment}, timeout=PATIENCE,
    )
    (line,) = result.stderr.splitlines()
    assert line.startswith("run.sh: error: ") and words in line and result.returncode == 1


RIGHTS = [
    ("data/a-file", 0, "data/a-file cannot be read (Permission denied)"),
    ("data/a-folder", 0, "data/a-folder cannot be read (Permission denied)"),
    (".", 0o500, "--out runs/single cannot be written (Permission denied): choose another folder"),
]


@pytest.mark.parametrize("name, rights, words", sampled(RIGHTS, RIGHTS[-1:]))
def test_a_right_that_is_missing(tmp_path, name, rights, words):
    """Root, who has all rights, gives them up."""
    (tmp_path / "data" / "a-folder").mkdir(parents=True)
    (tmp_path / "data" / "text").write_text("text " * 1000)
    (tmp_path / "data" / "a-file").write_text("secret")
    os.chmod(tmp_path / name, rights)
    prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] * (os.getuid() == 0)
    result = subprocess.run(
        [*prefix, sys.executable, ROOT / "single.py", "--data", "data", "--steps", "1"],
        cwd=tmp_path, text=True, capture_output=True, timeout=PATIENCE,
    )
    os.chmod(tmp_path / name, 0o700)
    (line,) = result.stderr.splitlines()
    assert words in line and result.returncode == 1
