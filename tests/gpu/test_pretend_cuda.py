"""The CUDA path of every script, with every tensor on a GPU that is pretended.

It shows what runs on the device, which kernels of attention are called, and that a step waits for
nothing. It does not show what kernels compute, NCCL, or time: test_cuda.py does, on a GPU.
"""

import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from tests.support.edits import edited
from tests.support.processes import ROOT
from tests.support.sample import thorough

FOLDER = ROOT / "tests" / "gpu" / "pretend_cuda"
SMALL = "--num-hidden-layers 2 --seq-len 64 --batch-size 16 --dtype bfloat16"
ROWS = {  # of each script: options, number of ranks, rank; a CPU's dry run counts the first too
    "single.py": [("--grad-accum 2", 1, 0)],
    "ddp.py": [("--grad-accum 2", 2, 1)],
    "zero.py": [("--stage 1 --grad-accum 2", 4, 3), ("--activation-checkpointing", 4, 0)],
    "fsdp.py": [("--grad-accum 2", 4, 3), ("--replicate 2 --activation-checkpointing", 4, 1),
                ("--cpu-offload", 2, 0)],
    "tp.py": [("", 2, 1), ("--no-sequence-parallel --activation-checkpointing", 4, 2)],
    "cp.py": [("", 4, 3), ("--attention allgather --activation-checkpointing --head-dim 12", 4, 0),
              ("--attention ulysses", 2, 1), ("--dtype float32", 4, 3)],
    "pp.py": [("--schedule gpipe", 2, 1), ("--grad-accum 2", 4, 1), ("--schedule zbv", 2, 1)],
    "hybrid_3d.py": [("--tp 2 --cp 2 --pp 2", 16, 9), ("--tp 2 --replicate 2", 8, 3),
                     ("--tp 2 --num-experts 8 --ep 4", 8, 5)],
    "ep.py": [("--num-experts 8 --ep 2 --grad-accum 2", 4, 3),
              ("--num-experts 8 --ep 2 --grad-accum 2 --dtype float32", 4, 3),
              ("--num-experts 8 --activation-checkpointing", 4, 0)],
    "diloco.py": [("--inner-steps 3 --grad-accum 2", 4, 3)],
}

pytestmark = [
    thorough,
    pytest.mark.skipif(
        torch.version.cuda is not None or torch.version.hip is not None,
        reason="this torch has CUDA hooks of its own: a GPU can be pretended on its CPU build only",
    ),
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="no g++, to compile tests/gpu/pretend_cuda/guard.cpp"
    ),
]


@pytest.fixture(scope="session")
def pretended(shared):
    """A function: rows (command, number of ranks, rank, device) -> what their dry runs count."""
    library, installed = shared / "guard.so", pathlib.Path(torch.__file__).parent
    with open(shared / "guard.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # while another process compiles it
        if not library.exists():
            subprocess.run(
                ["g++", "-shared", "-fPIC", "-std=c++20", "-w", FOLDER / "guard.cpp",
                 f"-I{installed}/include", f"-L{installed}/lib", "-ltorch_cpu", "-lc10",
                 f"-Wl,-rpath,{installed}/lib", "-o", library], check=True,
            )

    def run(rows):
        output = subprocess.run(
            [sys.executable, FOLDER / "run.py", library], cwd=ROOT, input=json.dumps(rows),
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
        ).stdout
        return [json.loads(line) for line in output.splitlines()]

    return run


def fused(kernel):
    """The kernels of attention that are called, and no others: "flash", "efficient" or "cudnn"."""
    name = f"_scaled_dot_product_{kernel}_attention"
    return [name, f"{name}_backward"]


@pytest.mark.parametrize("scripts", [
    "single ddp zero diloco", "fsdp tp pp", "cp", "hybrid_3d ep",  # each group starts once
])
def test_a_step_stays_on_the_gpu(pretended, scripts):
    scripts = [f"{name}.py" for name in scripts.split()]
    rows = [(f"{script} {SMALL} {options}", n, rank)
            for script in scripts for options, n, rank in ROWS[script]]
    first = [next(row for row in rows if row[0].startswith(script)) for script in scripts]
    counted = pretended([(*row, "cuda:0") for row in rows] + [(*row, "cpu") for row in first])
    counts_on_cpu = dict(zip(first, counted[len(rows) :], strict=True))
    for row, gpu in zip(rows, counted):
        command, _, _ = row
        assert "error" not in gpu, f"{command}: {gpu['error']}"
        # common/attention.py calls flash attention itself; PyTorch takes cuDNN's on an H100.
        ours = "cp.py" in command and "ulysses" not in command or "--cp " in command
        kernel = "efficient" if "float32" in command else "flash" if ours else "cudnn"
        assert gpu["attention"] == fused(kernel), command
        if "offload" in command:  # parameters go to the GPU and gradients come from it
            assert gpu["copies"] and gpu["on_cpu"], command
            continue
        # zero.py agrees on the host, over gloo, which parameters were used.
        on_cpu = {"allreduce_", "lift_fresh"} if "zero.py" in command else set()
        assert gpu["copies"] == [] and {each.split()[0] for each in gpu["on_cpu"]} <= on_cpu, (
            command, gpu["on_cpu"])
        experts = "experts" in command
        grouped = experts and "float32" not in command
        assert gpu["products"] == (["_grouped_mm"] if grouped else []), command
        # The CPU waits for the counts once in each of 2 layers and in each pass, forward or again
        # forward: ep.py has 2 passes here.
        assert gpu["waits"] == 2 * experts * (2 if "ep.py" in command else 1), command
        if cpu := counts_on_cpu.get(row):
            assert gpu["sent"] == cpu["sent"] and gpu["collectives"] == cpu["collectives"], command
            for kind in ("parameters", "gradients", "optimizer states"):
                assert gpu["held"][kind] == cpu["held"][kind], (command, kind)
            # To the byte, where the kernels are the same: a norm under CUDA's autocast would keep
            # its weight in float32 too. Other peaks have CUDA's gradient of SiLU, which needs more.
            if "cp.py" in command:
                assert gpu["peak"]["in all"] == cpu["peak"]["in all"], command


def test_examples_stay_on_the_gpu(pretended):
    """Models of others, whose masks the memory-efficient kernel takes."""
    pytest.importorskip("transformers", reason="pip install -r examples/requirements.txt")
    more = "--seq-len 64 --num-hidden-layers 2 --dtype bfloat16"
    gpt2, ring, ulysses, muon = pretended([
        ("examples/fsdp_gpt2.py --seq-len 64 --dtype bfloat16", 2, 1, "cuda:0"),
        (f"examples/cp_documents.py {more}", 4, 3, "cuda:0"),
        (f"examples/cp_documents.py --attention ulysses --head-dim 12 {more}", 2, 0, "cuda:0"),
        (f"examples/fsdp_muon.py {more}", 2, 1, "cuda:0"),
    ])
    for counted in (gpt2, ring, ulysses, muon):
        assert "error" not in counted, counted["error"]
        kernel = "cudnn" if counted is muon else "efficient"
        assert counted["attention"] == fused(kernel) and counted["sent"] > 0
        assert counted["copies"] == counted["on_cpu"] == []


def test_offloading_leaves_buffers_on_the_gpu(pretended, tmp_path):
    """A buffer with two names that materialise has put beside the offloaded parameters, and that a
    norm uses."""
    moving = "    move_buffers(model, device)"
    used = """
    norm = model.model.norm
    norm.register_buffer("scale", torch.ones(norm.weight.shape))
    norm.register_buffer("again", norm.scale)
    norm.register_forward_hook(lambda norm, _, out: out * norm.again)
"""
    copy = edited(tmp_path, "fsdp.py", (moving, used + moving), name="moves.py")
    (found,) = pretended([(f"{copy} {SMALL} --cpu-offload", 2, 0, "cuda:0")])
    assert "error" not in found, found["error"]
