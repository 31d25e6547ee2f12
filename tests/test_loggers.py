"""The recipes of docs/copying.md give W&B and TensorBoard what metrics.jsonl has, also in a resume.
Both packages have stand-ins here."""

import json
import re

from tests.support.processes import ROOT, SMALL, edited

STAND_INS = """
import types

def note(*call):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(call, default=str) + chr(10))

class SummaryWriter:
    def __init__(self, folder, purge_step):
        note("start", folder, purge_step)

    def add_scalar(self, *values):
        note("scalar", *values)

    def flush(self):
        note("flush")

sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
sys.modules["wandb"] = types.SimpleNamespace(
    init=lambda **options: note("init", options), log=lambda *args, step: note("log", *args, step))
"""


def test_the_recipes(run, corpus, tmp_path):
    """The second start repeats step 3."""
    page = (ROOT / "docs" / "copying.md").read_text().partition("\n## Your own logger\n")[2]
    page = page.partition("\n## ")[0]
    recipes = "".join(re.findall(r"(?s)```python\n(.*?)```", page))
    imports = "\n".join(re.findall("`((?:import|from) .*?)`", page))
    loop = "    for step, batch in "
    script = edited(tmp_path, "ddp.py", ("import torch\n", f"{imports}\nimport torch\n"),
                    (loop, f"{recipes}\n{loop}"))
    options = f"{SMALL} --steps 4 --log-every 1 --save-every 2 --data {corpus}"
    run(script, 2, options, expect_ok=False,
        inject=f"{STAND_INS}\nat(4, signal_self, 'SIGKILL', on=0)")
    result = run(script, 2, options, inject=STAND_INS)
    calls = {}
    for line in (tmp_path / "calls.jsonl").read_text().splitlines():
        name, *values = json.loads(line)
        calls.setdefault(name, []).append(values)
    (first,), (again,) = calls["init"]
    assert (first["id"], first["resume"], first["config"]["batch_size"]) == ("out", "allow", 8)
    assert [purge_step for _, purge_step in calls["start"]] == [1, 3] and again["id"] == "out"
    assert [step for _, step in calls["log"]] == [1, 2, 3, 3, 4]
    assert [record for record, _ in calls["log"]][-2:] == result.history[-2:]
    assert calls["scalar"] == [[name, value, step] for record, step in calls["log"]
                               for name, value in record.items()]
    assert len(calls["flush"]) == 5
