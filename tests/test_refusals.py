"""Promise 6: wrong options, files and environments are refused in one line, which names the value,
what is allowed and what to change, before training."""

import argparse
import importlib
import json
import os
import shlex
import socket

import pytest
import torch

from common.model import LLAMA_3_1
from common.options import SettingError
from tests.support.processes import BARE, ROOT, SMALL, TOOLS
from tests.support.sample import rows, table
from tests.support.words import in_order

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
HUGE = "1" + "0" * 400
MAY_BE_0 = {"--warmup-steps", "--seed", "--workers", "--save-every", "--num-experts", "--rank"}
TEXTS = {"--data", "--from", "--val-data", "--out", "--model"}  # rows below
DEFAULTS = """--steps 200 --batch-size 16 --grad-accum 1 --seq-len 128 --model tiny --seed 0
    --lr 0.002 --min-lr 0.0 --warmup-steps 10 --weight-decay 0.1 --beta1 0.9 --beta2 0.95
    --grad-clip 1.0 --token-dtype auto --workers 0 --dtype auto --device auto
    --backend auto --timeout 600 --deterministic False --compile False --save-every 100 --keep 2
    --async-save False --val-every 100 --val-batches 10 --log-every 10
    --stage 2 --replicate 1 --reshard-after-forward True --cpu-offload False
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
    for module in (*SCRIPTS, *sorted(TOOLS.keys() - {"flatten"})):  # that one has no main
        with pytest.raises(Started) as start:
            importlib.import_module(TOOLS.get(module, module)).main([])
        assert not start.value.args[0].allow_abbrev
        for action in start.value.args[0]._actions:
            name, parse = (*action.option_strings, action.dest)[0], action.type
            if module in SCRIPTS and action.default not in (None, argparse.SUPPRESS):
                defaults.add(f"{name} {action.default}")
            least = {"--ranks": 2}.get(name, 1 - (name in MAY_BE_0))
            refused = {
                "whole number": [str(least - 1), HUGE],
                "number": ["nan", "inf", "-1", "0" if module in TOOLS else "-0.1"],
            }.get(getattr(parse, "__name__", ""), [])
            assert (module in TOOLS or refused or action.nargs == 0 or action.choices
                    or name in TEXTS), name
            assert action.help and bool(action.metavar) >= bool(refused), name
            for text in refused:
                with pytest.raises(argparse.ArgumentTypeError):
                    parse(text)
            if HUGE in refused:
                assert parse(str(least)) == least
    words = DEFAULTS.split()
    assert defaults == {" ".join(pair) for pair in zip(words[::2], words[1::2])}


# Each row: a script, its number of ranks (0: plain python), and options; then what a message says:
# the option, its value, and what is allowed or what to do. " ... " stands for any text. A few rows
# show what is allowed.

AGAIN = f"{SMALL} --out done --steps 4"  # a folder with a finished run of two steps
SELECTIVE = "--num-experts 4 --activation-checkpointing selective"
LONG = "x" * 300
REFUSED = table("""
single 0 --beta2 1 | --beta2: 1 is not allowed: it must be at least 0, and less than 1 (end)
single 0 --lr -1 | --lr: -1 is not allowed: it must be at least 0, and less than inf (end)
single 0 --lr inf | must be at least 0, and less than inf
single 0 --steps 0 | must be at least 1, and less than 2147483648 (end)
single 0 --steps 2147483648 | must be at least 1, and less than 2147483648
single 0 --unknown | --unknown
single 0 --lr 0.1 --min-lr 0.2 | --min-lr 0.2 is above --lr 0.1
single 0 --lr 0.1 --min-lr 0.1 | it starts
single 0 --head-dim 7 | head_dim 7 ... odd
single 0 --num-attention-heads 6 --num-key-value-heads 3 --head-dim 8 | it starts
single 0 --num-attention-heads 7 | 7 does not divide hidden_size 128
single 0 --num-key-value-heads 3 | 3 does not divide num_attention_heads 8
single 0 --model nowhere | --model nowhere ... No such file ... it is one of tiny, small
single 0 --model bad.json | --model bad.json: Expecting value ... JSON file
single 0 --model unknown.json | --model unknown.json ... unexpected ... 'bias' ... import_hf
single 0 --model text.json | --model text.json: num_hidden_layers is 'two' ... int
single 0 --model null.json | --model null.json: vocab_size is None
single 0 --model zero.json | num_hidden_layers is 0
single 0 --model list.json | --model list.json ... it is one of tiny
single 0 --model rope.json | rope_scaling ... 'yarn' ... not like that of Llama 3.1
single 0 --model half.json | rope_scaling ... not like that of Llama 3.1
single 0 --model five.json | rope_scaling is 5: it must be dict
single 0 --model binary.json | --model binary.json: Expecting value
single 0 --model {LONG} | name too long
single 0 --device cuda | --device cuda: torch finds no GPU here; use cpu
single 0 --out file/run | Not a directory: 'file/run'
single 0 --data '' | --data : no such file ... 'stdlib'
single 0 --data {LONG} | --data x ... cannot be read or written ... name too long
single 0 --data folder.bin | --data folder.bin cannot be read or written ... directory
single 0 --val-data {LONG} | --val-data x ... name too long
single 0 --out {LONG} | name too long
single 0 --from {LONG} | name too long
single 0 --from file | file is no checkpoint
single 0 --data big.bin | token 256, beyond a vocabulary of 256 ... --vocab-size ... --token-dtype
single 0 --data big.bin --token-dtype uint32 | token 16777472
single 0 --out done/step-00000002 | --out done/step-00000002 is a checkpoint ... run folder
single 0 --val-data nowhere | --val-data nowhere: no such file
single 0 --val-data '' | --val-data : no such file
single 0 --model true.json | num_hidden_layers is True
single 0 --model infinite.json | rope_theta is inf
single 0 --val-data file --batch-size 79 | (--val-data) has 78 samples ... --batch-size 79
single 0 {AGAIN} --hidden-size 64 | hidden_size is 32 in done/ ... 64 ... another --out
single 0 {AGAIN} --batch-size 4 | --batch-size is 8 in done/ ... 4
single 0 {AGAIN} --seq-len 16 | --seq-len is 32 in done/ ... 16
single 0 {AGAIN} --model scaled.json | rope_scaling is None in done/ ... llama3
single 2 | started as 2
zero 2 --stage 0 | --stage: invalid choice: 0 (choose from 1, 2)
fsdp 3 --replicate 2 | --replicate 2 does not divide the world size 3: use a divisor
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
cp 4 --seq-len 36 | 36 positions ... 8 equal chunks: use a multiple of 8
cp 2 --seq-len 7 --attention ulysses | 7 positions ... 2 equal chunks
cp 3 --seq-len 36 --attention ulysses | 8 query and 4 key/value heads ... by 3 ranks
pp 2 --schedule loopedbfs --stages-per-rank 2 --num-hidden-layers 2 | it starts
pp 2 --schedule 1f1b --stages-per-rank 2 | --stages-per-rank 2 ... 1f1b ... use 1
pp 4 --schedule loopedbfs --stages-per-rank 2 | there are 8 stages ... but 4 layers
pp 2 --schedule zbv --stages-per-rank 3 | --stages-per-rank 3 ... zbv ... use 2
pp 2 --microbatches 20 --grad-accum 2 | --batch-size 16 ... use a multiple of 40, such as 40
pp 2 --schedule dualpipev --compile | --compile with --schedule dualpipev
pp 2 --schedule zerobubble --activation-checkpointing selective | with --schedule zerobubble
pp 2 --schedule zbv --activation-checkpointing | -checkpointing with --schedule zbv
hybrid_3d 4 --dp 3 | (4) ... dp (3) x tp (1) x cp (1) x pp (1) = 3
hybrid_3d 4 --cp 4 --seq-len 36 | 36 positions ... 8 equal chunks
hybrid_3d 8 --cp 2 --tp 4 --seq-len 20 | --cp 2 is 10 positions ... --tp 4
hybrid_3d 2 --pp 2 --microbatches 2 --grad-accum 3 | --batch-size 16 ... 6 equal parts
hybrid_3d 2 --pp 2 --num-hidden-layers 1 | --pp 2 ... 1 layers
hybrid_3d 2 --pp 2 --num-hidden-layers 2 --compile | it starts
hybrid_3d 4 --cp 2 --tp 2 --compile --activation-checkpointing selective | selective with --compile
hybrid_3d 2 --tp 2 --intermediate-size 91 | --intermediate-size 91
hybrid_3d 2 --tp 2 --intermediate-size 91 --num-experts 4 | it starts
hybrid_3d 2 --dp 2 --num-experts 4 --no-sequence-parallel | it starts
hybrid_3d 4 --cp 4 --replicate 2 | --replicate 2 does not divide dp (1)
hybrid_3d 2 {SELECTIVE} | selective with --num-experts ... use full
hybrid_3d 4 --tp 2 --ep 2 | --ep ... give --num-experts
hybrid_3d 4 --tp 4 --num-key-value-heads 2 | --num-key-value-heads 2
hybrid_3d 2 --tp 2 --vocab-size 257 | --vocab-size 257
hybrid_3d 1 --seq-len 7 | it starts
hybrid_3d 2 --cp 2 --seq-len 6 | 6 positions ... 4 equal chunks
hybrid_3d 2 --tp 2 --num-experts 4 --no-sequence-parallel | --no-sequence-parallel with --num
hybrid_3d 2 --tp 2 --num-experts 4 --seq-len 31 | --seq-len 31 ... 2 tensor-parallel
hybrid_3d 4 --tp 2 --pp 2 --num-experts 4 --ep 4 | --ep 4 must divide the 2 ranks
hybrid_3d 8 --replicate 2 --tp 2 --num-experts 6 --ep 4 | --ep 4 ... --num-experts 6
hybrid_3d 8 --replicate 2 --num-experts 8 --ep 8 | --ep 8 must divide the 4 ranks
hybrid_3d 1 --balance-rate 1e-3 | --balance-rate ... give --num-experts
examples.diloco 4 --replicas 3 | --replicas 3 ... world size 4: use a divisor
examples.diloco 1 | --replicas 2 ... world size 1: use a divisor
ep 2 | give --num-experts, or use fsdp.py
ep 2 {SELECTIVE} | selective with --num-exper
ep 4 --num-experts 4 --ep 3 --expert-size 25 | --ep 3 must divide the 4 ranks
ep 4 --num-experts 6 | --ep 4 must divide ... --num-experts 6
ep 4 --num-experts 6 --ep 2 --expert-size 25 | --ep 2 leaves 2 ranks ... 128 and --expert-size 25
ep 4 --num-experts 6 --ep 2 --hidden-size 129 --head-dim 16 --expert-size 24 | --ep 2 ... 129
ep 1 --num-experts 2 --experts-per-token 3 | experts_per_token 3 ... num_experts 2
ep 1 --num-experts 2 --experts-per-token 1 | experts_per_token 1 never trains
ep 1 --num-experts 1 | it starts
ep 1 --expert-size 8 | expert_size 8 ... give num_experts
""", AGAIN=AGAIN, LONG=LONG, SELECTIVE=SELECTIVE)


FILES = {
    "file": "text " * 2000, "big.bin": "\0\1" * 5000,
    "0/letters": "a" + "x" * 9999, "1/letters": "b" + "x" * 9999,  # the same name for other data
    "1/more": "x" * 9999,
    "folder.bin/file": "text " * 99, "text.json": '{"num_hidden_layers": "two"}',
    "null.json": '{"vocab_size": null}', "zero.json": '{"num_hidden_layers": 0}',
    "list.json": "[1, 2]", "rope.json": '{"rope_scaling": {"rope_type": "yarn"}}',
    "true.json": '{"num_hidden_layers": true}', "infinite.json": '{"rope_theta": Infinity}',
    "five.json": '{"rope_scaling": 5}', "scaled.json": json.dumps(
        {"num_key_value_heads": 4, "rope_scaling": LLAMA_3_1}),
    "half.json": '{"rope_scaling": {"rope_type": "llama3", "factor": 8}}',
    "binary.json": "\0\1", "bad.json": "no JSON",
    "unknown.json": '{"hidden_size": 32, "bias": true}',
}


@pytest.fixture(scope="module")
def made(server, tmp_path_factory):
    """A working folder with data, good and bad, and with a finished run of two steps."""
    folder = tmp_path_factory.mktemp("refusals")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    server.run("single.py", 0, f"{SMALL} --steps 2 --data file", folder=folder, out="done")
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    """The working folder; no test changes a file in it."""
    def written():
        return {path: path.stat().st_mtime_ns for path in made.rglob("*") if path.is_file()}

    before = written()
    monkeypatch.chdir(made)
    yield made
    assert before.items() <= written().items()


# In this process: a script refuses its options before its ranks connect.


def test_options(folder, monkeypatch):
    wrong = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command, words in (row.values for row in REFUSED):
        script, world, *options = shlex.split(command)
        module = importlib.import_module(script)
        monkeypatch.setattr(module, "load_steps", started)
        monkeypatch.setattr(module, "start_process_group", started, raising=False)
        ranks = {"RANK": "0", "WORLD_SIZE": world} if world != "0" else {}
        monkeypatch.setattr(os, "environ", {**BARE, **ranks})
        try:
            module.main(["--data", "file", "--out", "out", *options])
        except Started:
            said = "it starts"
        except SettingError as error:
            said = f"{error} (end)"
        if not in_order(words, said):
            wrong.append((command, said))
    assert not wrong, "\n".join(f"{command}\n    {said}" for command, said in wrong)


# In processes: what a user reads, one line from each rank that has the error


# Variables of the one process that starts, "NAME=": it is unset; options; what its line says
@rows("variables, options, words", """
RANK= WORLD_SIZE= SLURM_STEP_NUM_TASKS=2 | | SLURM_STEP_NUM_TASKS is 2 but RANK is not set: each
  process would train alone; start the script by torchrun
RANK= WORLD_SIZE= OMPI_COMM_WORLD_SIZE=2 | | OMPI_COMM_WORLD_SIZE is 2 but RANK is not set
* RANK= WORLD_SIZE=2 | | WORLD_SIZE is 2 but RANK is not set: each process would train alone
RANK= WORLD_SIZE= PMI_SIZE=2 | | PMI_SIZE is 2 but RANK is not set: each process would train alone
* WORLD_SIZE=abc | | WORLD_SIZE is 'abc', and must be a whole number
MASTER_ADDR=no-such-machine.invalid | | rank 0 cannot connect to others by gloo ... MASTER_ADDR
  no-such-machine.invalid must be the machine of rank 0, MASTER_PORT
* WORLD_SIZE=2 | | rank 0 cannot connect ... must start within --timeout seconds
WORLD_SIZE=2 RANK=1 | | rank 1 cannot connect ... --timeout
MASTER_PORT={taken} | | address already in use ... MASTER_PORT {taken} free there
| --backend nccl | cannot connect to others by nccl (
| --backend mpi | cannot connect to others by mpi (
""")
def test_ranks_that_cannot_connect(server, folder, variables, options, words):
    with socket.create_server(("127.0.0.1", 0)) as server_of_another:
        taken = str(server_of_another.getsockname()[1])
        pairs = [word.split("=") for word in variables.replace("{taken}", taken).split()]
        env = {name: value or None for name, value in pairs}
        result = server.run("ddp.py", 1, f"--data file --timeout 2 {options}", env=env,
                            folder=folder, pass_out=False, expect_ok=False,
                            inject="time.sleep = lambda _: None")  # of another rank than 0
    *_, line = result.lines  # torch logs before it
    assert result.statuses == [1] and line.startswith("ddp.py: error: "), result.output
    assert in_order(words.replace("{taken}", taken), line), line


# A command and its ranks; how many of these say it; code that runs before on each rank; the words
@rows("command, world, most, code, words", """
ddp.py --steps 0 | 2 | 1 | | --steps: 0 is not allowed: it must be at least 1
ddp.py --lr fast | 2 | 1 | time.sleep(2 * (rank == 0)) | --lr ... 'fast'
hybrid_3d.py --cp 5 | 2 | 1
  | os.environ.update(DP_SIZE='1', CP_SIZE='2', TP_SIZE='3', PP_SIZE='4')
  | (2) must equal dp (1) x tp (3) x cp (5) x pp (4) = 60
fsdp.py --replicate 3 | 2 | 1 | | --replicate 3 does not divide the world size 2: use a
ddp.py --batch-size 7 | 2 | 2 | | --batch-size 7 cannot be ... a multiple of 2, such as 8
ddp.py --batch-size 4 --grad-accum 3 | 2 | 2 | | by 2 data-parallel ... 3 accumulation steps: use
  other ranks, or, ... a multiple of 6, such as 6
ddp.py --data big.bin | 2 | 2 | | holds token 256
ddp.py --timeout 7 | 2 | 2 | timeouts = []; [before(torch.distributed, name, lambda *_, timeout=0,
  **__: timeouts.append(str(timeout))) for name in ('init_process_group', 'new_group')];
  before(Run, 'resume', lambda *_: common.options.refuse([(True, str(timeouts))]))
  | error: ['0:00:07', '0:00:07', '0:00:07']
ddp.py | 2 | 2 | os.environ.update(GLOO_SOCKET_IFNAME='mine', NCCL_SOCKET_IFNAME='mine');
  before(torch.distributed, 'init_process_group', lambda *_, **__: common.options.refuse([(True,
  str([os.environ[x] for x in ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME',
  'TORCH_DIST_USE_NCCL2')]))])) | (['mine', 'mine', '0'])
ddp.py | 2 | 2 | os.environ.update(LOCAL_WORLD_SIZE='1'); before(torch.distributed,
  'init_process_group', lambda *_, **__: common.options.refuse([(True,
  str(os.environ.get('GLOO_SOCKET_IFNAME')))])) | by gloo (None)
ddp.py | 2 | 2 | sys.argv += ['--model', 'nowhere'] * rank; time.sleep = lambda _: None
  | --model nowhere: ... No such file
ddp.py | 2 | 2 | setattr(TokenDataset, '__len__', lambda _: 0) | the dataset has no samples
single.py | 0 | 1 | common.data.open_dataset = lambda _: [] | the dataset has no samples
single.py | 0 | 1 | changed(TokenDataset, '__getitem__', lambda sample, *_: (sample[0],
  sample[1].index_fill(0, torch.tensor([3]), -1)))
  | error: --data: ... targets below 0: the mask is -100
ddp.py --workers 1 | 2 | 2 | changed(TokenDataset, '__getitem__', lambda sample, *_:
  common.options.refuse([(multiprocessing.parent_process(), 'my words')]) or sample)
  | error: my words
fsdp.py | 2 | 2 | tied() | two units ... share model.embed_tokens.weight ... in one
hybrid_3d.py --tp 2 | 2 | 2 | tied() | two units ... share model.embed_tokens.weight ... in one
hybrid_3d.py --pp 2 | 2 | 2 | tied() | several stages have the parameter model.embed_tokens.weight
pp.py --schedule zbv | 1 | 1 | tied() | model.embed_tokens.weight ... lm_head.weight
pp.py | 2 | 2 | own_parameter() | model.gate
pp.py --microbatches 1 | 2 | 2 | | --microbatches 1, schedule 1f1b: Number
pp.py --schedule zerobubble --microbatches 5 --batch-size 20 | 2 | 2 | | zerobubble: ... multiple of
pp.py --schedule zbv --num-hidden-layers 2 | 1 | 1 | changed(common.model.Layer, 'forward',
  lambda y, *_: y[:, 1:])
  | stage 0 returns [4, ... and make_schedule was told [4, ... tell it what this stage returns
hybrid_3d.py --pp 2 --microbatches 1 | 2 | 2 | | --microbatches 1, schedule 1f1b: Number
cp.py --attention ulysses --seq-len 36 | 3 | 3 | | 8 query and 4 key/value heads ... by 3 ranks
hybrid_3d.py --tp 2 | 2 | 2 | own_parameter() | model.gate
ddp.py | 2 | 2 | sys.argv += ['--lr', '0.5'] * rank
  | --lr is 0.002 on rank 0, 0.5 on rank 1: it must be the same
ddp.py | 2 | 2 | common.step.__file__ = (common.step, common.model)[rank].__file__
  | the code is ... on rank 0 ... on rank 1
examples/diloco.py | 2 | 2 | common.step.__file__ = (common.step, common.model)[rank].__file__
  | the code is ... on rank 0 ... on rank 1
ddp.py | 2 | 2 | torch.__version__ = str(rank) | torch is 0 on rank 0, 1 on rank 1
ddp.py --data ../file --val-data letters | 2 | 2 | os.chdir(str(rank)) | hash of --val-data is
ddp.py --data ../file --val-data . | 2 | 2 | os.chdir(str(rank)) | samples in --val-data is
ddp.py {AGAIN} --out ../done --data letters | 2 | 2 | os.chdir(str(rank)) | hash of --data is
""", AGAIN=AGAIN)
def test_a_command(server, folder, command, world, most, code, words):
    """A row of a data worker keeps its traceback out of it. One rank alone that has an error, and
    is not rank 0, waits for that one before it says it."""
    script, *options = shlex.split(command)
    data = [] if "--data" in options else ["--data", "file"]
    result = server.run(script, world, data + options, folder=folder, pass_out=False,
                        expect_ok=False, inject=code)
    assert all(status not in (0, -9) for status in result.statuses), result.output
    lines = [line for line in result.lines if "error" in line.lower()]
    assert "Traceback" not in result.output and 1 <= len(lines) <= most, result.output
    name = script.rpartition("/")[2]
    for line in lines:  # a bar may precede it
        assert f"{name}: error: " in line and in_order(words, line), line
