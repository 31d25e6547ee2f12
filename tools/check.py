"""Does a script that you have edited train on several processes as it does on one?

    bash run.sh check my_fsdp.py
    bash run.sh check my_tp.py --against single.py --steps 3 --grad-accum 2

It runs the script on this machine's CPUs: on one process, and then on 2, 3 and 4. It records every
step by parity, and compares: samples, the loss, gradients before they are clipped, weights, what
clipping does, and what else the script saves, such as an average of the weights (EMA). Nothing else
is needed, and no files are left. For each number of processes it prints EQUAL; or DIFFERENT, with
the first difference and its likely cause; or REFUSED, with the script's own words; or FAILED. Below
EQUAL stands what was not compared, with the options that compare it. The status is 0 if it is EQUAL
wherever it was compared, and 1 otherwise.

Other options are those of the script, and stand after it. Unless they say otherwise
the model is tiny, in float64, and can be cut into 2, 3 or 4 parts along every dimension; the batch
has 24 samples, in 2 micro-batches.

The script needs a function main(argv), with load_steps from common/, and in it the variable `loss`
(this rank's part of the loss of the batch). Parameters have the names that it gives to Checkpoints;
without it, those in `materialise`, or in the models that are variables of main. It uses the common/
beside it, if there is one. In text some targets are left out, so that ranks have different numbers
of them; let your own data do so too. What a script does wrong on one process too is EQUAL: take
another one, such as a plain loop, as the reference by --against.
Dropout differs on another number of processes, and BatchNorm depends on the size of a micro-batch:
both are reported as differences. Buffers are not compared.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback

import torch

from common.errors import SettingError, printable
from common.options import at_least
from common.torch_versions import is_lost_peer
from parity.compare import compare, read
from tools.support.command import forget_modules, load, make_parser, refuse, run
from tools.support.recorded import record

PATIENCE = 300  # seconds for the processes of one run
UNTRIED = "untried.txt"  # the options of the script that have their default
# What 2, 3 and 4 divide; in names of options that the script may have
DEFAULTS = {
    "device": "cpu", "dtype": "float64", "steps": 3, "batch_size": 24, "grad_accum": 2,
    "seq_len": 48,
    "vocab_size": 264, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 12, "num_key_value_heads": 12, "num_experts": 12, "expert_size": 24,
    "experts_per_token": 2, "warmup_steps": 1, "grad_clip": 0.5, "save_every": 0, "timeout": 60,
}


def be_rank(script, options, folder, rank, world_size, port, known_only):
    """Be one process of a run, and end. What goes wrong is written to the folder."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    }
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in 1, 2:
        os.dup2(output, stream)
    sys.argv, status = [script, *options], 1
    # After a fork, torch makes its pool of threads anew: let no two threads do so at once.
    torch.set_num_threads(1)
    recording = folder / "run.parity"
    forget_modules()  # the script may have a common/, a parity/ or tools/ of its own beside it
    try:
        module = load(script, ("main", "load_steps"))
        defaults = DEFAULTS | {"out": folder / "out"}
        untried = record(module, options, recording, defaults, known_only, ignored=True)
        if rank == 0:
            (folder / UNTRIED).write_text(", ".join(untried))
        status = 0
    except BaseException as error:  # SystemExit too
        # By its name: the script may have another class of it, from its own common/.
        own, where = type(error).__name__ == "SettingError", ""
        for frame in traceback.extract_tb(error.__traceback__):
            if not own and frame.filename.startswith(str(pathlib.Path(script).resolve().parent)):
                where = f", {pathlib.Path(frame.filename).name}:{frame.lineno}: {frame.line}"
        first = str(error).strip().partition("\n")[0]
        (folder / f"{rank}.json").write_text(json.dumps({
            "refused": own and not recording.exists(), "lost": is_lost_peer(error),
            "error": first if own else f"{type(error).__name__}: {first}{where}",
        }))
    finally:
        os._exit(status)


def train(script, options, world_size, folder, known_only=False):
    """Run a script on ``world_size`` processes. ``known_only``: leave out options that it does not
    have. Returns the path of the recording, or raises SettingError; its attribute ``refused`` says
    whether the script refuses that number."""
    folder.mkdir()
    context = multiprocessing.get_context("fork")  # this process has torch, and no threads
    port = free_port()
    ranks = [context.Process(target=be_rank,
                             args=(script, options, folder, rank, world_size, port, known_only))
             for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + PATIENCE
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < end:
        if any(rank.exitcode for rank in ranks):
            end = min(end, time.monotonic() + 5)  # the others may have more to say
        time.sleep(0.02)
    ended = [(i, rank.exitcode) for i, rank in enumerate(ranks) if (rank.exitcode or 0) < 0]
    for rank in ranks:
        rank.kill()
        rank.join()
    if all(rank.exitcode == 0 for rank in ranks):
        return folder / "run.parity"
    said = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    first = next((each for each in said if not each["lost"]), None)  # others have lost it
    if first:
        failed = SettingError(first["error"])
    else:
        what = "ranks wait for each other in vain"
        if ended:
            rank, status = ended[0]
            printed = (folder / f"{rank}.txt").read_text(errors="replace")
            words = re.search(r"what\(\): *(.+)", printed)  # of an exception in C++
            what = f"rank {rank} ends by {signal.Signals(-status).name}"
            what += f": {words[1]}" if words else ""
        if world_size > 1:
            what += ("; do all ranks start the same collectives, and call the same modules of the "
                     "model in each micro-batch?")
        failed = SettingError(what)
    failed.refused = bool(first) and first["refused"]
    raise failed


def free_port():
    """A port below those that the kernel gives to connections."""
    while True:
        port = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def compare_with(reference, path, float32_inside):
    """(verdict, what to say, what stands below an EQUAL) of a recording beside the lines of the
    reference."""
    said = compare(reference, read(path), float32_inside)
    verdict, _, rest = said.partition(": ")
    if verdict == "EQUAL":
        return verdict, f"up to {re.search('of gradients is (.*)', said)[1]}", rest
    return verdict, rest, ""


def main(argv=None):
    parser = make_parser("check", __doc__)
    parser.usage = "%(prog)s SCRIPT [options] [options of the script]"
    parser.add_argument("script", metavar="SCRIPT", help="path of a script, such as my_fsdp.py")
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[2, 3, 4], metavar="N",
                        help="numbers of processes (default: 2 3 4)")
    parser.add_argument("--against", metavar="SCRIPT", help="the script whose run on one process "
                        "is the reference (default: SCRIPT itself)")
    parser.add_argument("--float32-inside", action="store_true", help="allow what a softmax, a "
                        "norm or rotary angles in float32 make of gradients in float64")
    args, args.options = parser.parse_known_args(argv)
    torch.set_num_threads(1)
    against = args.against or args.script
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        folder = pathlib.Path(folder)
        try:
            path = train(against, args.options, 1, folder / "reference", bool(args.against))
        except SettingError as error:
            refuse(f"{against} on one process: {error}; --against takes another reference")
        reference = read(path)
        print(f"{args.script} beside {against} on one process, {len(reference)} steps: "
              f"gradients before clipping, weights after each update", flush=True)
        verdicts, notes = [], ""
        for n in args.ranks:
            try:
                verdict, said, more = compare_with(
                    reference, train(args.script, args.options, n, folder / str(n)),
                    args.float32_inside)
                notes = more or notes
            except (SettingError, ValueError) as error:
                verdict = "REFUSED" if getattr(error, "refused", False) else "FAILED"
                said = str(error)
            verdicts.append(verdict)
            processes = f"{n} process{'es' * (n > 1)}"
            print(printable(f"{processes:12} {verdict:10} {said}"), flush=True)
        untried = next(folder.glob(f"[0-9]*/{UNTRIED}"), None)
        untried = untried.read_text() if untried else ""
    for line in notes.splitlines()[2:]:
        print(line)
    if "EQUAL" in verdicts and untried:
        print(f"Not compared, give them to check: {untried}")
    if "EQUAL" in verdicts and not args.against:
        print("Not compared: what the script does wrong on one process too; give it another "
              "reference, such as --against single.py")
    if "EQUAL" not in verdicts or set(verdicts) - {"EQUAL", "REFUSED"}:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
