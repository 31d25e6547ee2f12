"""Whole scripts as real processes, without paying for ``import torch`` each time.

A server process imports torch once and forks the ranks of each run off itself. A rank then is an
ordinary process: it runs the script as ``__main__``, with the variables that a launcher sets, and
goes through the end of the interpreter. If one fails, the server ends the others, as torchrun does.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref

ROOT = pathlib.Path(__file__).parents[2]
SMALL = "--hidden-size 32 --num-hidden-layers 2 --seq-len 32 --batch-size 8"
# The environment of a test that takes all other variables away: it still sees no GPU.
BARE = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
# What run.sh calls a tool, and its module
TOOLS = {
    "check": "tools.check", "dry_run": "tools.dry_run", "export": "tools.huggingface.export",
    "flatten": "tools.flatten", "import_hf": "tools.huggingface.import_hf", "parity": "parity",
    "plan": "tools.plan", "prepare": "tools.prepare",
}
PATIENCE = 600  # seconds after which what runs is taken to hang, however busy the machine is


class Result:
    """How a run ended: ``status`` of each rank, its terminal ``output``, and its run folder."""

    def __init__(self, statuses, output, out):
        self.statuses, self.output, self.out = statuses, output, out
        self.ok = not any(statuses)

    @property
    def lines(self):
        """The lines of the output, each state of a progress bar one of them, without empty ones."""
        return [line for line in self.output.splitlines() if line.strip()]

    @property
    def history(self):
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def again(self, number=0):
        """What ``resumed`` of inject.py has started."""
        return Result([0], "", self.out / f"again-{number}")

    def counts(self, rank=0):
        """What ``write_counts`` of inject.py has written."""
        return json.loads((self.out / f"rank{rank}.json").read_text())

    def curve(self, *names):
        names = names or ("loss", "grad_norm")
        return [[record[name] for name in names]
                for record in self.history if record.keys() >= set(names)]


class ProcessServer:
    """``start`` it, let it ``run("ddp.py", 2, "--steps 5", folder=path)``, and ``stop`` it."""

    def start(self):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # as run.sh does
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )

    def stop(self):
        self.process.communicate("\n")  # a data worker of the tests may hold the pipe open

    def run(self, script, world_size, options="", *, folder, out="out", timeout=PATIENCE, env=None,
            inject="", expect_ok=True, pass_out=True):
        """Run ``script`` with ``options`` (strings or lists, both may hold arguments) in
        ``world_size`` processes, 0 for plain python.

        ``env`` sets variables last, and unsets those that are None. ``inject`` is Python that each
        rank runs before the script, with the names of inject.py. ``out`` is the run folder, below
        ``folder``. A run that is not over after ``timeout`` seconds is killed; its ranks then have
        the status -9.
        """
        script, *first = script.split()
        options = first + (options.split() if isinstance(options, str) else [*map(str, options)])
        out = pathlib.Path(folder, out)
        job = {
            "script": str(ROOT / script),
            "argv": [*options, *(["--out", str(out)] if pass_out else [])],
            "cwd": str(folder), "world_size": world_size, "timeout": timeout, "env": env or {},
            "inject": inject,
        }
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        result = Result(answer["statuses"], answer["output"], out)
        assert result.ok or not expect_ok, (
            f"{script} {' '.join(options)}: {result.statuses}\n{result.output}"
        )
        return result


@contextlib.contextmanager
def free_port():
    """A port that nobody else gets while this lasts, but on which a rank can listen."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as whoever listens sets it
        yield held.getsockname()[1]


def with_edits(text, edits):
    """``text`` with ``edits``, pairs (text that stands in it once, new text)."""
    for before, after in edits:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def edited(folder, script, *edits, source=None):
    """Write a copy of ``script``, or of ``source``, into ``folder``, beside a link to common/, with
    ``edits``. Returns its path, as ProcessServer.run takes it."""
    folder.mkdir(exist_ok=True)
    for path in ROOT / "common", *ROOT.glob("*.py"):
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    copy = folder / script
    copy.unlink(missing_ok=True)  # it may be a link to the script itself
    copy.write_text(with_edits((ROOT / (source or script)).read_text(), edits))
    return str(copy)


# All that a script imports sooner or later, torch._dynamo by its first optimizer
MODULES = (
    "encodings.idna numpy.ma torch._dynamo torch.distributed.checkpoint torch.distributed.fsdp "
    "torch.distributed.pipelining torch.distributed.tensor.parallel torch.utils.data "
    "torch.utils.serialization.config common.materialise common.run tests"
).split()


def end_with_parent():
    """Ask the kernel for SIGKILL when the parent dies. A rank has a session of its own: otherwise
    it would stay when pytest is killed, and hold its GPU."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start_rank(job, rank, port, output):
    pid = os.fork()
    if pid:
        return pid
    end_with_parent()
    os.setsid()  # so that a kill reaches the data workers too
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(job["cwd"])
    if job["world_size"]:  # 0: as plain python
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world_size"]),
            "LOCAL_WORLD_SIZE": str(job["world_size"]), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    for name, value in job["env"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    sys.stdin.close()
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False, buffering=1)
    sys.argv = [job["script"], *job["argv"]]
    beside = os.path.dirname(job["script"])
    if beside != str(ROOT) and os.path.exists(f"{beside}/common"):  # a copy uses its own
        here = str(ROOT), str(ROOT / "tests")
        sys.path[:] = [path for path in sys.path if path not in here]
        for name in [name for name in sys.modules if name.split(".")[0] == "common"]:
            del sys.modules[name]
    sys.path.insert(0, beside)
    if job["inject"]:
        exec(job["inject"], vars(importlib.import_module("tests.support.inject")))
    runpy.run_path(job["script"], run_name="__main__")
    sys.exit()  # through the whole end of the interpreter


def serve():
    end_with_parent()
    for module in MODULES:
        importlib.import_module(module)
    for finalizer in list(weakref.finalize._registry):  # torch's, of operators: 60 ms in each rank
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # what is imported stays: collections in the ranks neither visit nor so copy it
    # More ranks than cores: a rank that wakes does not interrupt another. That is a fifth faster.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    for line in sys.stdin:
        if line == "\n":
            break
        job = json.loads(line)
        with tempfile.TemporaryFile() as output, free_port() as port:
            running = {start_rank(job, rank, port, output.fileno()): rank
                       for rank in range(max(1, job["world_size"]))}
            statuses = [-signal.SIGKILL] * len(running)
            deadline = time.monotonic() + job["timeout"]
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid in running:
                    statuses[running.pop(pid)] = os.waitstatus_to_exitcode(status)
                    if status:  # end the others, as torchrun does: by SIGTERM, in 30 s by SIGKILL
                        for other in running:
                            os.kill(other, signal.SIGTERM)
                        deadline = min(deadline, time.monotonic() + 30)
                elif time.monotonic() > deadline:
                    for pid in running:
                        os.killpg(pid, signal.SIGKILL)
                    deadline = float("inf")
                else:
                    time.sleep(0.005)
            output.seek(0)
            text = output.read().decode(errors="replace")
        print(json.dumps({"statuses": statuses, "output": text}), flush=True)
    os._exit(0)  # without the reports of libraries on what they have not freed


if __name__ == "__main__":
    serve()
