"""The CUDA path of every script, with every tensor on a GPU that is pretended.

It shows what runs on the device, which kernels of attention are called, and that a step waits for
nothing. It does not show what kernels compute, NCCL, or time: test_cuda.py does, on a GPU.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from tests.support.processes import ROOT
from tests.support.sample import needs, table, thorough

FOLDER = ROOT / "tests" / "gpu" / "pretend_cuda"
SMALL = "--seq-len 64 --batch-size 16 --dtype bfloat16"
# Command, number of ranks, rank, kernels of attention: PyTorch takes cuDNN's on an H100, and the
# memory-efficient ones for a mask; cp.py calls flash attention itself.
ROWS = {"scripts": table("""
single.py --grad-accum 2 | 1 | 0 | cudnn
ddp.py --grad-accum 2 | 2 | 1 | cudnn
zero.py --stage 1 --grad-accum 2 | 4 | 3 | cudnn
zero.py --activation-checkpointing | 4 | 0 | cudnn
fsdp.py --grad-accum 2 | 4 | 3 | cudnn
fsdp.py --replicate 2 --activation-checkpointing | 4 | 1 | cudnn
fsdp.py --cpu-offload | 2 | 0 | cudnn
tp.py | 2 | 1 | cudnn
tp.py --no-sequence-parallel --activation-checkpointing | 4 | 2 | cudnn
pp.py --grad-accum 2 | 4 | 1 | cudnn
pp.py --schedule zbv | 2 | 1 | cudnn
cp.py | 4 | 3 | flash
cp.py --attention allgather --activation-checkpointing --head-dim 12 | 4 | 0 | flash
cp.py --attention ulysses | 2 | 1 | cudnn
cp.py --dtype float32 | 4 | 3 | efficient
hybrid_3d.py --tp 2 --cp 2 --pp 2 | 16 | 9 | flash
hybrid_3d.py --tp 2 --num-experts 8 --ep 4 | 8 | 5 | cudnn
ep.py --num-experts 8 --ep 2 --grad-accum 2 | 4 | 3 | cudnn
ep.py --num-experts 8 --activation-checkpointing --dtype float32 | 4 | 0 | efficient
"""), "examples": table("""
examples/fsdp_gpt2.py | 2 | 1 | efficient
examples/cp_documents.py | 4 | 3 | efficient
examples/cp_documents.py --attention ulysses --head-dim 12 | 2 | 0 | efficient
examples/fsdp_muon.py | 2 | 1 | cudnn
examples/diloco.py --inner-steps 1 --grad-accum 2 | 4 | 3 | cudnn
""")}

pytestmark = [thorough, pytest.mark.skipif(
    bool(torch.version.cuda or torch.version.hip or not shutil.which("g++")),
    reason="needs g++, and a CPU build of torch: others have CUDA hooks of their own",
)]


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    """guard.cpp, compiled."""
    installed = pathlib.Path(torch.__file__).parent
    path = tmp_path_factory.mktemp("guard") / "guard.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-std=c++20", "-w", FOLDER / "guard.cpp",
         f"-I{installed}/include", f"-L{installed}/lib", "-ltorch_cpu", "-lc10",
         f"-Wl,-rpath,{installed}/lib", "-o", path], check=True,
    )
    return path


@pytest.mark.parametrize("group", ROWS)  # each starts once
def test_a_step_stays_on_the_gpu(guard, group):
    if group == "examples":
        needs("transformers")
    rows = [row.values for row in ROWS[group]]
    jobs = [(command.replace(".py", f".py {SMALL}"), n, rank) for command, n, rank, _ in rows]
    done = subprocess.run(
        [sys.executable, FOLDER / "watch.py", guard], cwd=ROOT, input=json.dumps(jobs),
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    for (command, _, _, kernel), line in zip(rows, done.stdout.splitlines(), strict=True):
        found = json.loads(line)
        name = f"_scaled_dot_product_{kernel}_attention"
        assert found["attention"] == [name, f"{name}_backward"], command
        if "offload" in command:  # parameters go to the GPU and gradients come from it
            assert found["copies"] and found["on_cpu"], command
            continue
        # These agree on the host, over gloo, which parameters were used.
        agree = any(name in command for name in ("zero.py", "cp.py", "cp_documents.py"))
        on_cpu = {"allreduce_", "lift_fresh"} if agree else set()
        assert found["copies"] == [] and {each.split()[0] for each in found["on_cpu"]} <= on_cpu, (
            command, found["on_cpu"])
