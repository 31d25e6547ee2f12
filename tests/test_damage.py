"""Checkpoints that are damaged, or that a stranger wrote: refused in one line that names the file
and what to use instead, before anything is allocated."""

import json
import os
import pickle
import shutil
import subprocess

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from common import checkpoint
from common.checkpoint_files import write_hashes
from common.errors import SettingError
from tests.sample import sampled, thorough
from tests.test_checkpoint import assert_bit_equal, tensors
from tests.test_faults import OPTIONS, one_error

STEPS = f"{OPTIONS} --save-every 2"


@pytest.fixture(scope="module")
def saved(server, corpus, tmp_path_factory):
    """The run folder of ddp.py on 2 ranks, with steps 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("saved")
    return server.run("ddp.py", 2, f"{STEPS} --data {corpus}", folder=folder).out


@pytest.fixture
def out(saved, tmp_path):
    """A copy of it, as after step 6."""
    shutil.copytree(saved, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "step-00000008")
    return tmp_path / "out"


def edit_index(folder, change, rehash=True):
    """Change DCP's index as a stranger could."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    if rehash:
        write_hashes(folder, [".metadata"])


def edit_settings(folder, change):
    settings = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(change(settings)))
    write_hashes(folder, ["run.json"])


DATA = "__0_0.distcp"


def flip_a_bit(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 4
    (folder / name).write_bytes(content)


def zero_4_kb(folder, name):
    with (folder / name).open("r+b") as file:
        file.seek(100)
        file.write(bytes(4096))


def truncate(folder, name):
    os.truncate(folder / name, (folder / name).stat().st_size // 2)


def remove(folder, name):
    (folder / name).unlink()


def become_a_fifo(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)


def become_endless(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")


def become_a_folder(folder, name):
    (folder / name).unlink()
    (folder / name).mkdir()


DAMAGE = [
    (change, name)
    for change in (flip_a_bit, zero_4_kb, truncate, remove, become_a_fifo, become_endless,
                   become_a_folder)
    for name in (DATA, "__1_0.distcp", ".metadata", "run.json", f"{DATA}.sha256",
                 ".metadata.sha256")
]


@pytest.mark.parametrize("script, world", sampled([("single.py", 0), ("fsdp.py", 2)],
                                                  [("fsdp.py", 2)]))
@pytest.mark.parametrize("change, name", sampled(DAMAGE, [
    (flip_a_bit, DATA), (remove, "run.json"), (become_endless, "__1_0.distcp"),
]))
def test_a_damaged_file(run, corpus, out, script, world, change, name):
    change(out / "step-00000006", name)
    line = one_error(run(script, world, f"{STEPS} --data {corpus}", expect_ok=False))
    file = name.removesuffix(".sha256")
    assert f"{out}/step-00000006" in line and file in line
    assert line.endswith(f"use the older {out}/step-00000004: --resume-from 4")
    with pytest.raises(SettingError, match=file):
        checkpoint.read(out / "step-00000006")


@pytest.mark.parametrize("script, world", sampled([("single.py", 0), ("ddp.py", 2)],
                                                  [("ddp.py", 2)]))
def test_the_older_checkpoint_goes_on_to_the_same_end(run, corpus, saved, out, script, world):
    flip_a_bit(out / "step-00000006", DATA)
    result = run(script, world, f"{STEPS} --data {corpus} --resume-from 4")
    assert "resuming after step 4" in result.output
    if world == 2:
        assert_bit_equal(tensors(out, 8), tensors(saved, 8))
    assert [record["step"] for record in result.history] == list(range(1, 9))
    assert (out / "previous-1" / "step-00000006").is_dir()  # what was newer has moved aside


def test_a_checkpoint_to_resume_from_that_is_not_there(run, corpus, out):
    line = one_error(run("ddp.py", 2, f"{STEPS} --data {corpus} --resume-from 5", expect_ok=False))
    assert f"--resume-from 5: {out} has no such checkpoint; it has 2, 4, 6" in line


def test_no_older_checkpoint_is_there(run, corpus, out):
    flip_a_bit(out / "step-00000002", DATA)
    options = f"{STEPS} --data {corpus} --resume-from 2"
    line = one_error(run("single.py", 0, options, expect_ok=False))
    assert "; there is no older checkpoint: start anew with --no-resume or another --out" in line


def test_a_restart_by_torchrun_goes_on_from_the_newest(run, corpus, out):
    """Also if the first start was told to go back, or to start anew."""
    for option in ("--no-resume", "--resume-from 2"):
        result = run("single.py", 0, f"{STEPS} --data {corpus} {option} --steps 7 --save-every 0",
                     env={"TORCHELASTIC_RESTART_COUNT": "1"})
        assert "resuming after step 6" in result.output


# What a stranger could write, with hashes that fit


class _Absurd:
    def __reduce__(self):
        return bytes, (10**18,)


def without_states(index):
    for key in [key for key in index.state_dict_metadata if "exp_avg" in key]:
        del index.state_dict_metadata[key]


def without_a_part(index):
    index.state_dict_metadata["model.lm_head.weight"].chunks.clear()


def without_storage(index):
    del index.storage_data[MetadataIndex("model.lm_head.weight", (0, 0))]


def first_part(index):
    return index.storage_data[MetadataIndex("model.lm_head.weight", (0, 0))]


def entry(index):
    return index.state_dict_metadata["model.lm_head.weight"]


def absurd_size(index):
    size = torch.Size([2**40, 2**20])
    entry(index).size = entry(index).chunks[0].sizes = size


HOSTILE = {
    "states": (without_states, "its index has {'tensors'"),
    "a part": (without_a_part, "parts of model.lm_head.weight are missing"),
    "storage": (without_storage, "MetadataIndex(fqn='model.lm_head.weight'"),
    "another folder": (lambda index: setattr(first_part(index), "relative_path", "../x"),
                       "names the file '../x', which is not there with its hash"),
    "an absolute path": (lambda index: setattr(first_part(index), "relative_path", "/etc/passwd"),
                         "names the file '/etc/passwd', which"),
    "a file without a hash": (lambda index: setattr(first_part(index), "relative_path", "x.sha256"),
                              "names the file 'x.sha256', which"),
    "beyond the file": (lambda index: setattr(first_part(index), "offset", 2**40),
                        "its index goes beyond the end of "),
    "a negative place": (lambda index: setattr(first_part(index), "offset", -5),
                         "its index goes beyond the end of "),
    "an absurd size": (absurd_size, "is larger than its file says"),
    "a part outside": (lambda index: setattr(entry(index).chunks[0], "sizes", torch.Size([9, 99])),
                       "lies outside of the tensor"),
    "another rank": (lambda index: setattr(entry(index).chunks[0], "sizes", torch.Size([1])),
                     "is not a checkpoint of these scripts"),
    "no tensor": (lambda index: index.state_dict_metadata.update(x=3), "x is not a tensor"),
    "no table": (lambda index: setattr(index, "state_dict_metadata", [1]),
                 "is not a checkpoint of these scripts"),
}


@pytest.mark.parametrize("case", sampled(list(HOSTILE), ["states", "another folder", "a part"]))
def test_a_hostile_index(run, corpus, out, case):
    change, message = HOSTILE[case]
    folder = out / "step-00000006"
    edit_index(folder, change)
    (folder / "x").write_text("")
    line = one_error(run("ddp.py", 2, f"{STEPS} --data {corpus}", expect_ok=False))
    assert f"{folder} is not a checkpoint of these scripts" in line and message in line
    assert line.endswith(f"use the older {out}/step-00000004: --resume-from 4")
    with pytest.raises(SettingError, match="is not a checkpoint"):
        checkpoint.read(folder)


def test_an_index_that_would_allocate_without_end(run, corpus, out):
    (out / "step-00000006" / ".metadata").write_bytes(pickle.dumps(_Absurd()))
    write_hashes(out / "step-00000006", [".metadata"])
    line = one_error(run("single.py", 0, f"{STEPS} --data {corpus}", expect_ok=False))
    assert "builtins.bytes, which DCP never writes" in line


def test_data_that_do_not_fit_the_index(run, corpus, out):
    """A tensor of another shape at its place in the file: DCP's own assertion, in words."""
    folder = out / "step-00000006"

    def swap(index):
        norm = MetadataIndex("model.model.norm.weight", (0,))
        part = index.storage_data[norm]
        wrong = index.storage_data[MetadataIndex("model.lm_head.weight", (0, 0))]
        part.relative_path, part.offset, part.length = (
            wrong.relative_path, wrong.offset, wrong.length)

    edit_index(folder, swap)
    line = one_error(run("ddp.py", 2, f"{STEPS} --data {corpus}", expect_ok=False))
    assert f"{folder} cannot be read" in line


@pytest.mark.parametrize("content", sampled(
    ["null", "[]", "3", "{}", '{"may change": 3}'], ["null"]
))
def test_settings_that_are_none(run, corpus, out, content):
    folder = out / "step-00000006"
    (folder / "run.json").write_text(content)
    write_hashes(folder, ["run.json"])
    line = one_error(run("single.py", 0, f"{STEPS} --data {corpus}", expect_ok=False))
    assert f"{folder} is not a checkpoint of these scripts" in line


def test_control_characters_do_not_reach_the_terminal(run, corpus, out):
    folder = out / "step-00000006"
    edit_settings(folder, lambda settings: settings | {
        "must stay the same": settings["must stay the same"] | {"--seed": "\x1b[2Jevil\nline"}
    })
    line = one_error(run("single.py", 0, f"{STEPS} --data {corpus}", expect_ok=False))
    assert r"--seed is \x1b[2Jevil\nline in" in line
    edit_settings(folder, lambda settings: settings | {
        "must stay the same": settings["must stay the same"] | {"--seed": 0},
        "may change": settings["may change"] | {"--lr": "\x1b[2J"},
    })
    result = run("single.py", 0, f"{STEPS} --data {corpus}")
    assert r"--lr was \x1b[2J, is 0.002" in result.output and "\x1b" not in result.output


def test_links_to_old_checkpoints(run, corpus, out, tmp_path):
    """They are removed as links, and never stand in the way of a start."""
    for step in (2, 4):
        shutil.move(out / f"step-0000000{step}", tmp_path / f"kept-{step}")
        (out / f"step-0000000{step}").symlink_to(tmp_path / f"kept-{step}")
    (out / "step-00000001.old").symlink_to(tmp_path / "kept-2")
    (out / "step-00000009.tmp").symlink_to("nowhere")
    run("single.py", 0, f"{STEPS} --data {corpus} --keep 1")
    assert {path.name for path in out.glob("step-*")} == {"step-00000008"}
    assert checkpoint.read(tmp_path / "kept-2") and checkpoint.read(tmp_path / "kept-4")


# What may change between two starts of a run, and what may not


@thorough
def test_what_may_change_is_worth_a_line(run, corpus, out):
    result = run("ddp.py", 2, f"{STEPS} --data {corpus} --lr 1e-4 --steps 9")
    (line,) = [line for line in result.lines if "changed since" in line]
    assert line == (f"changed since {out}/step-00000006: --steps was 8, is 9; "
                    f"--lr was 0.002, is 0.0001")
    assert "changed" not in run("ddp.py", 2, f"{STEPS} --data {corpus} --lr 1e-4 --steps 10 "
                                f"--warmup-steps 3").output.replace("changed since", "", 1)


def test_other_data_of_the_same_length(run, corpus, out, tmp_path):
    text = open(corpus).read()
    (tmp_path / "other").write_text(text.replace("quick", "quack"))
    line = one_error(run("ddp.py", 2, f"{STEPS} --data {tmp_path}/other", expect_ok=False))
    assert "the hash of some samples in --data is " in line and "resume with the same" in line


@thorough
def test_sha256sum_reads_the_hashes(saved):
    folder = saved / "step-00000006"
    result = subprocess.run("sha256sum -c *.sha256 .*.sha256", shell=True, cwd=folder, text=True,
                            capture_output=True)
    assert result.returncode == 0 and result.stdout.count(": OK") == 4
