"""What only GPUs can show, on as many as there are: each script over NCCL follows its CPU curve.

    bash run.sh test -s tests/gpu/test_cuda.py

It prints lines to paste into an issue: for each command how far it is from the curve of one
process on the CPU; tokens/s, MFU and bytes of a 1B Llama. Where there are fewer GPUs than ranks,
tools/share_gpu.py lets the ranks share them. docs/gpus.md says more. Without a GPU all of it is
skipped, here and in one piece. tests/gpu/test_gpus.py checks on the CPU what can be checked there.
"""

import shutil
import signal
import subprocess

import pytest
import torch

from common.checkpoint import list_checkpoints
from tests.conftest import ROOT, VISIBLE_GPUS
from tests.gpu.test_gpus import EXPERTS, SMALL, UNCOUNTED_1B, curves, each_script, llama_1b
from tests.support.compare import assert_bit_equal, furthest, read
from tools.counting.one_rank import count_apart

status, output = subprocess.getstatusoutput(
    "nvidia-smi --query-gpu=memory.total,name,driver_version --format=csv,noheader,nounits")
if status or VISIBLE_GPUS == "":
    pytest.skip("test_cuda.py needs a GPU, here is none", allow_module_level=True)

CARDS = output.splitlines()[: None if VISIBLE_GPUS == "all" else VISIBLE_GPUS.count(",") + 1]
GPUS = max(n for n in (1, 2, 4, 8) if n <= len(CARDS))  # in use
N = max(2, GPUS)  # ranks
MEMORY = min(int(card.split(",")[0]) for card in CARDS) * 2**20
CURVES, EACH_SCRIPT = curves(N), each_script(N)
WITHIN = 5e-4  # losses and norms of 20 steps in float32, beside those of one process on the CPU
# The tests themselves see none. As many as are in use: ranks share those.
ON_GPUS = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(GPUS))) if VISIBLE_GPUS == "all"
           else ",".join(VISIBLE_GPUS.split(",")[:GPUS])}
print(f"{GPUS} of {CARDS}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")


@pytest.fixture
def on_gpus(run, corpus):
    """Run a command, which has all options of its model."""
    def on_gpus(command, world_size, options, env={}, **kwargs):
        world_size *= not command.startswith("single.py")  # plain python
        if world_size > GPUS:
            command = f"tools/share_gpu.py {ROOT}/{command}"
        return run(command, world_size, f"{options} --data {corpus} --device cuda",
                   env=ON_GPUS | env, **kwargs)

    return on_gpus


@pytest.fixture
def on_cpu(once):
    """The curve of one process on the CPU, in float32, with further options of the model."""
    def on_cpu(options=""):
        script = "ep.py" if EXPERTS in options else "single.py"
        return once(script, 0, f"{SMALL} {options}").curve()

    return on_cpu


# What is computed


@pytest.mark.parametrize("command", CURVES)
def test_follows_the_cpu(on_gpus, on_cpu, command):
    curve = on_gpus(command, N, f"{SMALL} {CURVES[command]}").curve()
    distance = furthest(curve, on_cpu(CURVES[command]))
    print(f"\n{command}: distance {distance:.2g}")
    assert distance < WITHIN


def test_more_ranks_share_a_gpu(on_gpus, on_cpu):
    """Two on each."""
    result = on_gpus("hybrid_3d.py --tp 2", 2 * GPUS, SMALL)
    assert furthest(result.curve(), on_cpu()) < WITHIN


@pytest.mark.parametrize("options, command", [
    *[("--compile --activation-checkpointing", command)
      for command in ("single.py", "ddp.py", "fsdp.py", "tp.py")],
    *[("--grad-accum 2 --workers 1", command) for command in EACH_SCRIPT],
    ("--cpu-offload", "fsdp.py"),
    # Where the copy of a gradient to the host begins too late, some runs are wrong:
    # https://github.com/pytorch/pytorch/pull/180665
    *3 * [("--cpu-offload", "fsdp.py --replicate 2")],
])
def test_options_change_nothing(on_gpus, on_cpu, options, command):
    ranks = max(4, N) if "--replicate" in command else N
    distance = furthest(on_gpus(command, ranks, f"{SMALL} {options}").curve(), on_cpu())
    print(f"\n{command} {options}: distance {distance:.2g}")
    assert distance < WITHIN


def test_kernels(server, tmp_path):
    """Attention that also returns the log-sum-exp, and products of experts of which some have no
    row (https://github.com/pytorch/pytorch/issues/172439)."""
    server.run("tests/gpu/kernels.py cuda", 0, folder=tmp_path, pass_out=False, env=ON_GPUS)


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
    tensors = read.__wrapped__(last)  # from the disk, each time
    shutil.rmtree(last)
    resumed = on_gpus(command, N, options)
    assert "after step 10" in resumed.output and resumed.curve() == curve
    assert_bit_equal(tensors, read.__wrapped__(last))


# What it takes


@pytest.mark.parametrize("command", [*each_script(GPUS), *UNCOUNTED_1B])
def test_a_1b_llama_takes_what_a_dry_run_counts(on_gpus, command):
    """To a MB. The allocator also has what no tensor holds: workspaces of kernels, and the rounding
    of each block up to 512 bytes."""
    n, counted, held = 1 if command == "single.py" else GPUS, None, None
    if command not in UNCOUNTED_1B:
        script, *options = f"{command} {llama_1b(n)}".split()
        counted = count_apart(str(ROOT / script), options, n, 0, 8)["peak"]["in all"]
        if counted > 0.95 * MEMORY:
            pytest.skip(f"it takes {counted / 1e9:.0f} GB of a card's {MEMORY / 1e9:.0f}")
    result = on_gpus(command, n, llama_1b(n), inject="write_counts()" if counted else "")
    tokens, mfu, allocated = (
        result.history[-1].get(name) for name in ("tokens_per_second", "mfu", "peak_memory"))
    if counted:
        held = result.counts()["peak"]["in all"]
    print(f"\n{command}: {tokens:.0f} tokens/s, {mfu=}, {counted=}, {held=}, {allocated=}")
    (first,), *_, (last,) = result.curve("loss")
    assert first > 11 and last < first - 1
    assert mfu is None or 0.05 < mfu < 0.9  # None: the peak of this card is unknown
    if counted:
        assert abs(held - counted) < 2**20
        assert 0.8 * counted <= allocated <= 1.2 * counted + 2**27


# How it ends


def test_a_rank_that_stops_ends_the_run(on_gpus):
    """After --timeout NCCL's watchdog of rank 0 aborts the process, a minute later at the latest.
    Rank 1, which stands still, is killed 30 s later."""
    result = on_gpus("ddp.py", 2, f"{SMALL} --timeout 20", expect_ok=False, timeout=300,
                     inject="at(3, signal_self, 'SIGSTOP', on=1)")
    assert result.statuses == [-signal.SIGABRT, -signal.SIGKILL], result.output
    assert "Watchdog" in result.output
