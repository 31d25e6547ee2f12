"""The flat file of a script, alone in its folder, trains as the script does, and resumes. That
`check` finds it equal: test_check.py."""

import re
import shutil

from tests.support.processes import ROOT, edited
from tests.support.sample import rows
from tests.support.words import refused
from tools import flatten as tool
from tools.flatten import flatten

OPTIONS = ("--steps 3 --seq-len 32 --batch-size 8 --num-hidden-layers 2 --hidden-size 32 "
           "--dtype float64")
NAMES = "step", "loss", "grad_norm"


def write(folder, script, with_run):
    """The flat file, alone in a folder, as ``run`` takes it."""
    folder = folder / ("with-run" if with_run else "bare")
    folder.mkdir()
    (folder / script).write_text(flatten(ROOT / script, with_run))
    return str(folder / script)


@rows("command, world", """
* fsdp.py | 2
single.py | 0
ddp.py | 2
zero.py | 2
tp.py | 2
cp.py | 2
pp.py | 2
ep.py --num-experts 4 | 2
hybrid_3d.py --tp 2 | 2
hybrid_3d.py --pp 2 --num-experts 4 | 2
""")
def test_trains_as_the_script(run, corpus, held_out, tmp_path, command, world):
    script, *own = command.split()
    bare, full = (write(tmp_path, script, with_run) for with_run in (False, True))
    options = [*own, *OPTIONS.split(), "--data", corpus]
    more = [*options, *"--log-every 1 --save-every 2 --val-batches 1 --val-data".split(), held_out]
    expected = run(script, world, more, out="a")
    found = run(full, world, more, out="b")
    resumed = run(full, world, [*more, "--from", found.out / "step-00000002"], out="c")
    shown = run(bare, world, options, pass_out=False).output
    assert expected.curve(*NAMES) == found.curve(*NAMES) and len(found.curve()) == 3
    assert expected.curve("val_loss") == found.curve("val_loss") == resumed.curve("val_loss")
    assert found.curve(*NAMES)[2:] == resumed.curve(*NAMES)
    assert re.findall(r"step (\d)  loss (\S+)  norm (\S+)", shown) == [
        (str(step), f"{loss:.12g}", f"{norm:.12g}") for step, loss, norm in found.curve(*NAMES)]


@rows("script, with_run", """
fsdp.py | 0
fsdp.py | 1
ep.py | 0
ep.py | 1
""")
def test_its_text_is_of_one_file(script, with_run):
    """Whoever has it does not have common/, nor all scripts. Commands have the name that README.md
    gives it."""
    text = flatten(ROOT / script, with_run)
    assert not [line for line in text.splitlines() if len(line) > 100]
    assert not re.search(r"common/|every script|all scripts|docs/\w+\.md|checkpoint\.py", text)
    assert set(re.findall(r"(?:python|torchrun) .*?(\w+\.py)", text)) == {f"my_{script}"}


def test_a_copy_of_all_names_no_commit(tmp_path, monkeypatch):
    """As within another project, whose commit would say nothing. It may import in its own way."""
    edited(tmp_path, "fsdp.py", ("from torch import nn\n", "import torch.nn as nn\n"))
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert "at commit unknown: " in flatten(tmp_path / "fsdp.py")


@rows("common", "common\nparallel")
def test_a_script_beside_its_own_common(tmp_path, common):
    """As docs/copying.md takes it: what is in that folder goes into the file, not ours."""
    shutil.copytree(ROOT / "common", tmp_path / common)
    mine = shutil.copy(ROOT / "fsdp.py", tmp_path / "my_fsdp.py")
    for path in tmp_path.rglob("*.py"):
        text = re.sub(r"\bcommon\b", common, path.read_text())
        path.write_text(text.replace("Two parameter groups", "Own groups"))
    flat = flatten(mine)
    assert "Own groups" in flat and "class SettingError" in flat
    assert not re.search(rf"from {common}\b", flat)


def test_a_base_class_comes_first(tmp_path):
    own = ("\n\nclass Reversed(TokenDataset):\n    def __getitem__(self, index):\n"
           "        return super().__getitem__(len(self) - 1 - index)\n\n\ndef main(")
    edited(tmp_path, "single.py", ("\n\ndef main(", own),
           ("load_steps,", "TokenDataset, load_steps,"),
           ("open_dataset(args)", "Reversed(args.data, args.seq_len)"))
    flat = flatten(tmp_path / "single.py")
    assert flat.index("class TokenDataset") < flat.index("class Reversed") < flat.index("def main(")


@rows("name, own, room", r"""
same_on_all_ranks | def same_on_all_ranks(): | launch.py
tree_map_only | from jax.tree import map as tree_map_only\n\n\ndef mine(): | data.py
""")
def test_refuses_a_clash(tmp_path, name, own, room):
    """Of a function, or of what two files import from elsewhere."""
    own = own.replace(r"\n", "\n")
    edited(tmp_path, "ddp.py", ("def main(", f"{own}\n    pass\n\n\ndef main("),
           ("    args.config", f"    {name}()\n    args.config"))
    with refused(f"{name} means two things: in {room}, ddp.py|in ddp.py, {room}"):
        flatten(tmp_path / "ddp.py")
