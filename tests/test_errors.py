"""Bad input ends with a non-zero status and one line, from one rank, that says what to change."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from common.checkpoint_files import write_hashes
from tests.processes import PATIENCE, ROOT
from tests.sample import sampled, thorough

CASES = {  # and those of test_input.py
    "no such data file": ("--data nowhere.bin", "--data nowhere.bin: no such file"),
    "shorter than a sequence": ("--data short.txt", "one sample of --seq-len 128 takes 129"),
    "token beyond the vocabulary": ("--data big.bin",
                                    "token 300, beyond a vocabulary of 256: raise --vocab-size"),
    "unknown preset": ("--model huge", "--model huge: no such preset, choose from tiny, small"),
    "zero size": ("--hidden-size 0", "--hidden-size: 0 is not allowed: it must be greater than 0"),
    "no GPU": ("--device cuda", "--device cuda: torch finds no GPU here"),
    "unwritable folder": ("--out empty.txt/run",
                          "empty.txt/run cannot be written (Not a directory)"),
    "diverges": ("--lr 1e30 --grad-clip 0 --warmup-steps 0",
                 "training diverged; lower --lr (9.97e+29 in step 2)"),
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("a" * 128)
    np.full(5000, 300, np.uint16).tofile(tmp_path / "big.bin")


def error_lines(output):
    """The output without the start lines and the progress bar."""
    return [line for line in output.splitlines() if "error" in line or "Traceback" in line]


@pytest.mark.parametrize("script, world", sampled(
    [("single.py", 0), ("ddp.py", 2)], [("ddp.py", 2)]
))
@pytest.mark.parametrize("case", CASES)
def test_bad_input(run, files, case, script, world):
    options, message = CASES[case]
    options = f"--steps 30 --log-every 1 --out out {options}"
    result = run(script, world, options, expect_ok=False, pass_out=False)
    assert all(result.statuses), result.output
    (line,) = error_lines(result.output)
    assert line.startswith(f"{script}: error: ") and message in line
    if case not in ("token beyond the vocabulary", "diverges"):  # those are found while it runs
        assert len(result.lines) == 1


@pytest.mark.parametrize("command, world, message", [
    ("ddp.py --backend nccl", 2, "--backend nccl needs a GPU for each process: use gloo"),
    ("ddp.py --backend mpi", 2, "--backend mpi: this torch is built without it, use another"),
    ("zero.py --stage 3", 2, "--stage 3: zero.py has 1 and 2; stage 3 is fsdp.py"),
    ("fsdp.py --replicate 2", 3, "--replicate 2 does not divide the world size 3: use 1 or 3"),
    ("fsdp.py --replicate 4", 2, "--replicate 4 does not divide the world size 2: use 1 or 2"),
    ("fsdp.py --cpu-offload", 2, "but this run is on the CPU: leave --cpu-offload out"),
])
def test_bad_strategy(run, command, world, message):
    (line,) = run(command, world, expect_ok=False).lines
    assert message in line


def test_a_batch_that_the_ranks_cannot_share(run):
    result = run("ddp.py", 3, "--batch-size 16", expect_ok=False)
    (line,) = result.lines
    assert ("--batch-size 16 cannot be shared evenly by 3 data-parallel ranks" in line
            and "15 or 18" in line)


@pytest.mark.parametrize("change, message", [
    ("--hidden-size 64", "--hidden-size is 32 in {out}/step-00000002 and 64 in this run"),
    ("--batch-size 4", "--batch-size is 8 in {out}/step-00000002 and 4 in this run"),
    ("--seed 1", "--seed is 0 in {out}/step-00000002 and 1 in this run"),
    ("--seq-len 16", "--seq-len is 32 in {out}/step-00000002 and 16 in this run"),
    ("", "has finished step 2, and --steps is 2: raise --steps"),
])
def test_a_checkpoint_of_another_run(run, corpus, change, message):
    options = f"--hidden-size 32 --batch-size 8 --seq-len 32 --steps 2 --data {corpus}"
    run("single.py", 0, options)
    steps = " --steps 4" if change else ""
    for script, world in (("single.py", 0), ("ddp.py", 2), ("zero.py", 2), ("fsdp.py", 2)):
        result = run(script, world, f"{options} {change}{steps}", expect_ok=False)
        (line,) = result.lines
        assert message.format(out=result.out) in line and all(result.statuses)


def test_a_broken_checkpoint(run, corpus):
    options = f"--hidden-size 32 --seq-len 32 --steps 2 --data {corpus}"
    folder = run("single.py", 0, options).out / "step-00000002"
    for name in (".metadata", "run.json"):
        content = (folder / name).read_bytes()
        for broken in (b"", content[: len(content) // 2], b"junk"):
            (folder / name).write_bytes(broken)
            result = run("single.py", 0, f"{options} --steps 4", expect_ok=False)
            (line,) = result.lines
            assert f"{folder / name} is damaged: its SHA-256 is not the one in" in line
            write_hashes(folder, [name])
            (line,) = run("single.py", 0, f"{options} --steps 4", expect_ok=False).lines
            assert "is not a checkpoint of these scripts" in line
        (folder / name).write_bytes(content)
        write_hashes(folder, [name])
    saved = json.loads((folder / "run.json").read_text())
    saved["must stay the same"] |= {"--hidden-size": 64, "--head-dim": 8}
    (folder / "run.json").write_text(json.dumps(saved))
    write_hashes(folder, ["run.json"])
    result = run("single.py", 0, f"{options} --steps 4 --hidden-size 64", expect_ok=False)
    (line,) = result.lines
    assert ("is of another model: model.embed_tokens.weight has shape (256, 64) here "
            "and (256, 32) there") in line


def test_a_launcher_that_sets_half_of_the_variables(run):
    for world, env, message in [
        (0, {"RANK": "0"}, "RANK is 0 and WORLD_SIZE is None"),
        (0, {"RANK": "2", "WORLD_SIZE": "2"},
         "RANK 2 must be at least 0 and less than WORLD_SIZE 2"),
        (0, {"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x': it must be a whole number"),
        (0, {"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set but not MASTER_ADDR and MASTER_PORT"),
    ]:
        result = run("ddp.py", world, env=env, expect_ok=False)
        (line,) = result.lines
        assert message in line and result.statuses == [1]
    result = run("single.py", 2, expect_ok=False)
    (line,) = result.lines
    assert "single.py is one process and was started as 2" in line


@pytest.mark.parametrize("script, message", [
    pytest.param("ddp.py", "--data nowhere: no such file", marks=thorough),
    # Found by one rank, while others connect
    ("tests/different_devices.py", "the type of device is cpu on rank 0 and cuda on rank 1"),
])
def test_under_torchrun_one_line_stands_above_its_report(tmp_path, script, message):
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         ROOT / script, "--data", "nowhere"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode != 0 and result.stdout == ""
    ours = [line for line in result.stderr.splitlines() if ".py: error: " in line]
    assert len(ours) == 1 and message in ours[0]
    above = result.stderr[: result.stderr.index(ours[0])]
    assert "Traceback" not in above
