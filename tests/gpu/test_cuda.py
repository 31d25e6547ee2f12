"""What only GPUs can show, on as many as there are: each script over NCCL follows its CPU curve.

    bash run.sh test tests/gpu/test_cuda.py

It ends with a block to paste into an issue: for each script whether it follows the curve of one
process on the CPU; tokens/s, MFU and bytes of a 1B Llama. docs/first-gpus.md says more. Some 40 to
50 minutes are expected: nobody has run it. Without a GPU all of it is skipped, here and in one
piece. tests/gpu/test_gpus.py checks on the CPU what can be checked there.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from common.services import checkpoint_files
from common.services.checkpoint_files import list_checkpoints
from tests.gpu import gpus
from tests.conftest import VISIBLE_GPUS
from tests.gpu.gpus import EXPERTS, EXPERTS_1B, SMALL, UNCOUNTED_1B, WITHIN, llama_1b
from tests.support.processes import ROOT
from tests.test_same_run import furthest


def ask_nvidia(*fields):
    """What nvidia-smi says of each GPU that is visible, a list of lists of strings. The tests
    themselves see none."""
    if not shutil.which("nvidia-smi"):
        return []
    output = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True,
    )
    rows = [line.split(", ") for line in output.stdout.splitlines()] * (not output.returncode)
    if VISIBLE_GPUS is None:
        return rows
    visible = [number for number in VISIBLE_GPUS.split(",") if number]
    if all(number.isdigit() for number in visible):
        return [rows[int(number)] for number in visible if int(number) < len(rows)]
    return rows[: len(visible)]  # named otherwise, such as by their UUIDs


CARDS = ask_nvidia("name", "driver_version", "memory.total")
if not CARDS:
    pytest.skip("test_cuda.py needs a GPU, here is none", allow_module_level=True)

N = max(n for n in (1, 2, 4, 8) if n <= len(CARDS))  # ranks
MEMORY = min(int(memory) for *_, memory in CARDS) * 2**20
CURVES, EACH_SCRIPT = gpus.curves(N), gpus.each_script(N)


@pytest.fixture
def on_gpus(run, corpus):
    """Run a command, which has all options of its model, where it sees the GPUs that the other
    tests hide."""
    def on_gpus(command, world_size, options, visible=VISIBLE_GPUS, **kwargs):
        world_size *= not command.startswith("single.py")  # plain python
        result = run(command, world_size, f"{options} --data {corpus} --device cuda",
                     env={"CUDA_VISIBLE_DEVICES": visible}, **kwargs)
        assert "process" in result.output and " on cpu" not in result.output
        return result

    return on_gpus


@pytest.fixture
def on_cpu(once):
    """The curve of one process on the CPU, in float32, with further options of the model."""
    def on_cpu(options=""):
        script = "ep.py" if EXPERTS in options else "single.py"
        return once(script, 0, f"{SMALL} {options}").curve()

    return on_cpu


@pytest.fixture(scope="module")
def table(request):
    """A dict from commands to rows of the block that is printed at the end: see gpus.py."""
    rows = {}
    yield rows
    names = [name for name, *_ in CARDS]
    facts = {
        "cards": f"{len(CARDS)} x {' and '.join(sorted(set(names)))}, of which {N} were used",
        "torch": torch.__version__, "driver": CARDS[0][1],
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "commit": subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True,
                                 capture_output=True).stdout.strip() or "no git",
    }
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n\n{gpus.block(facts, rows)}\n")


# What is computed


@pytest.mark.parametrize("command", CURVES)
def test_follows_the_cpu(on_gpus, on_cpu, table, command):
    row = table.setdefault(command, {})
    row["distance"] = None  # unless it ends
    curve = on_gpus(command, N, f"{SMALL} {CURVES[command]}").curve()
    row["distance"] = furthest(curve, on_cpu(CURVES[command]))
    assert row["distance"] < WITHIN


@pytest.mark.parametrize("options, command", [
    # Two ranks share a GPU over gloo. The others are refused: see ``gloo_on_gpus``.
    *[("--backend gloo", command) for command in (
        "ddp.py", "zero.py --stage 1", "zero.py --stage 2", "fsdp.py",
        "cp.py --attention ulysses", "cp.py --attention allgather")],
    *[("--compile --activation-checkpointing", command)
      for command in ("single.py", "ddp.py", "fsdp.py", "tp.py")],
    *[("--grad-accum 2 --workers 1 --profile", command) for command in EACH_SCRIPT],
    ("--cpu-offload", "fsdp.py"),
])
def test_options_change_nothing(on_gpus, on_cpu, options, command):
    first, _, _ = (VISIBLE_GPUS or "0").partition(",")
    n, visible = (2, first) if "gloo" in options else (N, VISIBLE_GPUS)
    result = on_gpus(command, n, f"{SMALL} {options}", visible=visible)
    assert furthest(result.curve(), on_cpu()) < WITHIN
    if "--profile" in options:
        assert "gpu_memcpy" in (result.out / "trace-rank0.json").read_text()


def test_kernels(server, tmp_path):
    """Attention that also returns the log-sum-exp, and products of experts of which some have no
    row (https://github.com/pytorch/pytorch/issues/172439)."""
    result = server.run("tests/gpu/kernels.py cuda", 0, folder=tmp_path, pass_out=False,
                        env={"CUDA_VISIBLE_DEVICES": VISIBLE_GPUS})
    gpus.check_kernels(result.lines)


# What is saved


@pytest.mark.parametrize("command", ["ddp.py", "fsdp.py"])
def test_cpu_resumes_what_gpus_saved_in_the_background(run, on_gpus, corpus, on_cpu, command):
    out = on_gpus(command, N, f"{SMALL} --async-save --save-every 5 --keep 9").out
    assert len(list_checkpoints(out)) == 4
    for later in ("step-00000015", "step-00000020"):
        shutil.rmtree(out / later)
    curve = run("single.py", 0, f"{SMALL} --data {corpus}").curve()
    assert furthest(curve[10:], on_cpu()[10:]) < WITHIN


@pytest.mark.parametrize("command", [*EACH_SCRIPT, f"ep.py {EXPERTS}"])
def test_a_resumed_run_is_the_same_bit_for_bit(on_gpus, command):
    """With --deterministic: otherwise the backward pass of attention adds up in any order."""
    options = f"{SMALL} --dtype bfloat16 --deterministic --save-every 10"
    whole = on_gpus(command, N, options)
    curve, last = whole.curve(), whole.out / "step-00000020"
    tensors = checkpoint_files.read(last, prefix="")
    shutil.rmtree(last)
    resumed = on_gpus(command, N, options)
    assert "resuming after step 10" in resumed.output and resumed.curve() == curve
    others = checkpoint_files.read(last, prefix="")
    assert tensors.keys() == others.keys() and len(tensors) > 100
    different = [name for name in tensors if not torch.equal(tensors[name], others[name])]
    assert not different


# What it takes


@pytest.mark.parametrize("command", EACH_SCRIPT)
def test_a_1b_llama_takes_what_a_dry_run_counts(on_gpus, table, tmp_path, command):
    """The peak of a dry run, of all tensors, is at most the allocator's, which also has what no
    tensor holds: workspaces of kernels, and the rounding of each block up to 512 bytes."""
    n = 1 if command == "single.py" else N
    path, row = tmp_path / "dry.json", table.setdefault(command, {})
    subprocess.run(
        [sys.executable, "-P", "-m", "tools.dry_run", "--rank", "0", "--json", path, str(n),
         *command.split(), *llama_1b(n).split()],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True,
    )
    row["counted"] = counted = json.loads(path.read_text())["peak"]["in all"]
    if counted > 0.95 * MEMORY:
        pytest.skip(f"it takes {counted / 1e9:.0f} GB of a card's {MEMORY / 1e9:.0f}")
    allocated = train_1b(on_gpus, row, command, n)
    assert 0.8 * counted <= allocated <= 1.2 * counted + 2**27, (counted, allocated)


@pytest.mark.parametrize("command", UNCOUNTED_1B)
def test_a_1b_llama_trains(on_gpus, table, command):
    train_1b(on_gpus, table.setdefault(command, {}), command, N)


def train_1b(on_gpus, row, command, n):
    """Train, complete the row of the table, and return the bytes that the allocator had."""
    row |= {"tokens_per_second": None, "allocated": None}  # unless it ends
    result = on_gpus(command, n, llama_1b(n))
    assert f"{gpus.PARAMETERS_1B[command == EXPERTS_1B]:,} parameters" in result.output
    summary = result.summary
    row |= {name: summary[name] for name in ("tokens_per_second", "allocated")}
    losses = [loss for (loss,) in result.curve("loss")]
    assert losses[0] > 11 and losses[-1] < losses[0] - 1
    if summary["mfu"]:  # the peak of this card is known
        row["mfu"] = summary["mfu"]
        assert 0.05 < summary["mfu"] < 0.9
    return row["allocated"]


# How it ends


@pytest.mark.skipif(N < 2, reason="needs two GPUs")
def test_a_rank_that_stops_leaves_records(on_gpus):
    """After --timeout NCCL's watchdog of rank 0 writes down its last collectives, gives the other
    ranks a minute to do so (4 times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC), and aborts the process.
    Rank 1, which stands still, is killed 30 s later."""
    result = on_gpus("ddp.py", 2, f"{SMALL} --timeout 20", expect_ok=False, timeout=300,
                     inject="at(3, signal_self, 'SIGSTOP', on=1)")
    assert result.statuses == [-signal.SIGABRT, -signal.SIGKILL], result.output
    assert "Watchdog" in result.output
    assert (result.out / "flight-record-rank0").stat().st_size > 0
