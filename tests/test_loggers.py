"""What a user's loggers have been given is kept: the recipes of docs/copying.md, and whatever is
registered with atexit."""

import json
import re

from tests.support.processes import SMALL, edited
from tests.support.sample import rows
from tests.test_docs import PAGES, blocks, section

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

sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
sys.modules["wandb"] = types.SimpleNamespace(
    init=lambda **options: note("init", options), log=lambda *args, step: note("log", *args, step))
"""


def test_the_recipes(run, corpus, tmp_path):
    """They get what metrics.jsonl has, also in a resume. The second start repeats step 3."""
    page, loop = section(PAGES["docs/copying.md"], "Your own logger"), "    # Loop\n"
    imports = "\n".join(re.findall("`((?:import|from) .*?)`", page))
    script = edited(tmp_path, "ddp.py", ("import torch\n", f"{imports}\nimport torch\n"),
                    (loop, "\n".join([*blocks(page, "python"), loop])))
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


AT_EXIT = """
import atexit, logging, logging.handlers
from common.launch import launch

def main():
    handler = logging.handlers.MemoryHandler(9999, target=logging.FileHandler("log"))
    logging.getLogger().addHandler(handler)
    logging.warning("at the end")
    atexit.register(lambda: open("saved", "w").write("all"))
    {}

launch(main)
"""


@rows("end, status", """
* 1 / 0 | 1
pass | 0
raise SystemExit(3) | 3
""")
def test_what_is_registered_for_the_end_runs(run, tmp_path, end, status):
    """Also after an error: logging's handlers are flushed, as those of coverage and others."""
    (tmp_path / "mine.py").write_text(AT_EXIT.format(end))
    result = run(f"{tmp_path}/mine.py", 0, pass_out=False, expect_ok=False)
    assert result.statuses == [status]
    assert (tmp_path / "saved").read_text() == "all"
    assert (tmp_path / "log").read_text() == "at the end\n"
