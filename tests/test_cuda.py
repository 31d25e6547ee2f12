"""What only GPUs can show, on as many as there are: each script over NCCL follows its CPU curve.

    bash run.sh test tests/test_cuda.py

Without a GPU all of it is skipped, here and in one piece.
"""

import shutil
import subprocess

import pytest
import torch

from common import checkpoint
from tests.conftest import VISIBLE_GPUS
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
        "--warmup-steps 3 --save-every 0")
SCRIPTS = [
    "single.py", "ddp.py", "zero.py --stage 1", "zero.py --stage 2", "fsdp.py", "tp.py",
    "tp.py --no-sequence-parallel", "cp.py", "cp.py --attention ulysses",
    "cp.py --attention allgather", "pp.py --microbatches 8",
    "pp.py --microbatches 8 --schedule gpipe", f"hybrid_3d.py {GRID}",
]


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
def expected(single):
    """The curve of single.py on the CPU, in float32."""
    return single(BASE)


@pytest.mark.parametrize("command", SCRIPTS)
def test_follows_the_cpu(on_gpus, expected, command):
    assert furthest(on_gpus(command, N).curve(), expected) < 5e-4


# The others send from rank to rank, which gloo does on the CPU only.
@pytest.mark.parametrize("command", [
    "ddp.py", "zero.py --stage 1", "zero.py --stage 2", "fsdp.py", "tp.py",
    "cp.py --attention ulysses", "cp.py --attention allgather", "hybrid_3d.py --tp 2",
])
def test_two_ranks_share_a_gpu_over_gloo(on_gpus, expected, command):
    assert furthest(on_gpus(command, 2, "--backend gloo").curve(), expected) < 5e-4


@pytest.mark.parametrize("options", [
    "--compile", "--activation-checkpointing", "--compile --activation-checkpointing", "--profile",
    "--grad-accum 2 --workers 1",
])
@pytest.mark.parametrize("command", [
    "single.py", "ddp.py", "zero.py", "fsdp.py", "tp.py", "cp.py", "pp.py --microbatches 8",
    f"hybrid_3d.py {GRID}",
])
def test_options_change_nothing(on_gpus, expected, command, options):
    result = on_gpus(command, N, options)
    assert furthest(result.curve(), expected) < 5e-4
    if "--profile" in options:
        assert "gpu_memcpy" in (result.out / "trace-rank0.json").read_text()


def test_offloading_changes_nothing(on_gpus, expected):
    assert furthest(on_gpus("fsdp.py", N, "--cpu-offload").curve(), expected) < 5e-4


@pytest.mark.parametrize("command", SCRIPTS)
def test_bfloat16_learns(on_gpus, command):
    losses = [loss for (loss,) in on_gpus(command, N, "--dtype bfloat16").curve("loss")]
    assert losses[0] > 5.4 and losses[-1] < losses[0] - 1


@pytest.mark.parametrize("command", ["ddp.py", "zero.py", "fsdp.py", f"hybrid_3d.py {GRID}"])
def test_cpu_resumes_what_gpus_saved_in_the_background(run, on_gpus, corpus, expected, command):
    out = on_gpus(command, N, "--async-save --save-every 5 --keep 9").out
    assert len(checkpoint.list_checkpoints(out)) == 4
    for later in ("step-00000015", "step-00000020"):
        shutil.rmtree(out / later)
    curve = run("single.py", 0, f"{BASE} --data {corpus}").curve()
    assert furthest(curve[10:], expected[10:]) < 5e-4


@pytest.mark.parametrize("command", ["single.py", "ddp.py", "zero.py", "fsdp.py", "tp.py"])
def test_counted_bytes_are_what_is_allocated(on_gpus, command):
    """The counted peak of all tensors is at most the allocator's, which also has what no tensor
    holds: workspaces of kernels, and the rounding of each block up to 512 bytes."""
    model = "--model small --seq-len 512 --batch-size 8 --steps 4"
    summary = on_gpus(command, N, model).summary
    allocated, counted = summary["allocated"], summary["peak"]["in all"]
    assert 0.8 * counted <= allocated <= 1.2 * counted + 2**27, (counted, allocated)


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
