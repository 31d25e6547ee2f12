"""What only GPUs can show, on as many as there are: each script over NCCL follows its CPU curve.

    bash run.sh test tests/test_cuda.py

It ends with a table to paste into an issue: tokens/s, MFU and bytes of a 1B Llama under each
script, and how far each script's curve is from the CPU's. Some 10 minutes on one H100 are expected:
nobody has run it. Without a GPU all of it is skipped, here and in one piece.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from common.services.stored import list_checkpoints
from tests.conftest import VISIBLE_GPUS
from tests.processes import ROOT
from tests.test_same_run import furthest


def count_gpus():
    if VISIBLE_GPUS is not None:
        return len([number for number in VISIBLE_GPUS.split(",") if number])
    if not shutil.which("nvidia-smi"):
        return 0
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")


GPUS = count_gpus()
if GPUS == 0:
    pytest.skip("test_cuda.py needs a GPU, here is none", allow_module_level=True)

# Ranks: a power of 2. The sizes can be split over 8.
N = max(n for n in (1, 2, 4, 8) if n <= GPUS)
GRID = {1: "", 2: "--tp 2", 4: "--tp 2 --cp 2", 8: "--tp 2 --pp 2"}[N]
BASE = ("--hidden-size 64 --intermediate-size 128 --num-hidden-layers 6 --num-attention-heads 8 "
        "--num-key-value-heads 8 --seq-len 64 --batch-size 64 --steps 20 --log-every 1 "
        "--warmup-steps 3 --save-every 0 --dtype float32")
LLAMA_1B = (f"--model llama3-1b --seq-len 2048 --batch-size {8 * N} --dtype bfloat16 --steps 8 "
            "--activation-checkpointing --save-every 0")
SCRIPTS = [
    "single.py", "ddp.py", "zero.py --stage 1", "zero.py --stage 2", "fsdp.py", "tp.py",
    "tp.py --no-sequence-parallel", "cp.py", "cp.py --attention ulysses",
    "cp.py --attention allgather", "pp.py --microbatches 8",
    "pp.py --microbatches 8 --schedule gpipe", f"hybrid_3d.py {GRID}".strip(),
]
# Each script once
EIGHT = [command for command in SCRIPTS if command not in (
    "zero.py --stage 1", "tp.py --no-sequence-parallel", "cp.py --attention ulysses",
    "cp.py --attention allgather", "pp.py --microbatches 8 --schedule gpipe",
)]


@pytest.fixture
def on_gpus(run, corpus):
    """Run a script where it sees the GPUs that the other tests hide."""
    def on_gpus(command, world_size, options="", **kwargs):
        world_size *= command != "single.py"  # plain python
        result = run(command, world_size, f"{BASE} --data {corpus} --device cuda {options}",
                     env={"CUDA_VISIBLE_DEVICES": VISIBLE_GPUS}, **kwargs)
        assert "process" in result.output and " on cpu" not in result.output
        return result

    return on_gpus


@pytest.fixture
def expected(once):
    """The curve of single.py on the CPU, in float32."""
    return once("single.py", 0, BASE).curve()


@pytest.fixture(scope="module")
def table(request):
    """A dict from commands to rows of the table that is printed at the end."""
    rows = {}
    yield rows
    heads = ("", "tokens/s", "MFU", "GB allocated", "GB in a dry run", "from the CPU's curve")
    lines = [heads, ["---"] * len(heads)]
    for command, row in rows.items():
        lines.append([command, *(row.get(head, "") for head in heads[1:])])
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n")
        for line in lines:
            print(f"| {' | '.join(line)} |")


@pytest.mark.parametrize("command", SCRIPTS)
def test_follows_the_cpu(on_gpus, expected, table, command):
    distance = furthest(on_gpus(command, N).curve(), expected)
    table.setdefault(command, {})["from the CPU's curve"] = f"{distance:.0e}"
    assert distance < 5e-4


# The others send from rank to rank, which gloo does on the CPU only.
@pytest.mark.parametrize("command", [
    "ddp.py", "zero.py --stage 1", "zero.py --stage 2", "fsdp.py", "tp.py",
    "cp.py --attention ulysses", "cp.py --attention allgather", "hybrid_3d.py --tp 2",
])
def test_two_ranks_share_a_gpu_over_gloo(on_gpus, expected, command):
    assert furthest(on_gpus(command, 2, "--backend gloo").curve(), expected) < 5e-4


@pytest.mark.parametrize("command", ["single.py", "ddp.py", "fsdp.py", "tp.py"])
def test_compiled_layers_change_nothing(on_gpus, expected, command):
    result = on_gpus(command, N, "--compile --activation-checkpointing")
    assert furthest(result.curve(), expected) < 5e-4


@pytest.mark.parametrize("command", EIGHT)
def test_options_change_nothing(on_gpus, expected, command):
    result = on_gpus(command, N, "--grad-accum 2 --workers 1 --profile")
    assert furthest(result.curve(), expected) < 5e-4
    assert "gpu_memcpy" in (result.out / "trace-rank0.json").read_text()


def test_offloading_changes_nothing(on_gpus, expected):
    assert furthest(on_gpus("fsdp.py", N, "--cpu-offload").curve(), expected) < 5e-4


@pytest.mark.parametrize("command", [*EIGHT, "ep.py --num-experts 8"])
def test_bfloat16_learns(on_gpus, command):
    losses = [loss for (loss,) in on_gpus(command, N, "--dtype bfloat16").curve("loss")]
    assert losses[0] > 5.4 and losses[-1] < losses[0] - 1


@pytest.mark.parametrize("command", ["ddp.py", "fsdp.py"])
def test_cpu_resumes_what_gpus_saved_in_the_background(run, on_gpus, corpus, expected, command):
    out = on_gpus(command, N, "--async-save --save-every 5 --keep 9").out
    assert len(list_checkpoints(out)) == 4
    for later in ("step-00000015", "step-00000020"):
        shutil.rmtree(out / later)
    curve = run("single.py", 0, f"{BASE} --data {corpus}").curve()
    assert furthest(curve[10:], expected[10:]) < 5e-4


@pytest.mark.parametrize("command", EIGHT)
def test_a_1b_llama_takes_what_a_dry_run_counts(on_gpus, table, tmp_path, command):
    """The peak of a dry run, of all tensors, is at most the allocator's, which also has what no
    tensor holds: workspaces of kernels, and the rounding of each block up to 512 bytes."""
    summary = on_gpus(command, N, LLAMA_1B).summary
    path = tmp_path / "dry.json"
    subprocess.run(
        [sys.executable, "-P", "-m", "tools.dry_run", "--rank", "0", "--json", path,
         "1" if command == "single.py" else str(N), *command.split(), *LLAMA_1B.split()],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True,
    )
    allocated, counted = summary["allocated"], json.loads(path.read_text())["peak"]["in all"]
    table.setdefault(command, {}).update({
        "tokens/s": f"{summary['tokens_per_second']:,.0f}", "MFU": f"{summary['mfu'] or 0:.1%}",
        "GB allocated": f"{allocated / 1e9:.1f}", "GB in a dry run": f"{counted / 1e9:.1f}",
    })
    assert 0.8 * counted <= allocated <= 1.2 * counted + 2**27, (counted, allocated)


def test_experts_without_rows():
    """In the kernel, forward and backward, beside a loop; in a process that sees the GPUs."""
    call = "import tests.test_experts as t; t.test_the_kernel_and_the_loop_are_equal('cuda')"
    subprocess.run([sys.executable, "-c", call], cwd=ROOT, check=True,
                   env=os.environ | {"CUDA_VISIBLE_DEVICES": VISIBLE_GPUS or "0"})


@pytest.mark.skipif(N < 2, reason="needs two GPUs")
def test_a_rank_that_stops_leaves_records(on_gpus):
    """NCCL's watchdog ends the other ranks, and writes down their last collectives."""
    result = on_gpus("ddp.py", 2, "--timeout 20", inject="stop(3, 1)", expect_ok=False,
                     timeout=120)
    assert all(result.statuses) and "Watchdog" in result.output
    assert (result.out / "flight-record-rank0").stat().st_size > 0


def test_too_many_ranks_are_refused(run):
    result = run("ddp.py", GPUS + 1, f"{BASE} --device cuda", expect_ok=False,
                 env={"CUDA_VISIBLE_DEVICES": VISIBLE_GPUS})
    assert "let them share a GPU by --backend gloo" in result.output
    assert torch.cuda.device_count() == 0  # the tests themselves see none
