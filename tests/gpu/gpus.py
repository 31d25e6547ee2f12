"""What test_cuda.py runs on GPUs, and the block that it prints at its end. test_gpus.py checks both
on machines without a GPU."""

import json

# A model that takes little time, and whose sizes can be split over 8 ranks
SMALL = ("--hidden-size 64 --intermediate-size 128 --num-hidden-layers 6 --num-attention-heads 8 "
         "--num-key-value-heads 8 --seq-len 64 --batch-size 64 --steps 20 --log-every 1 "
         "--warmup-steps 3 --save-every 0 --dtype float32")
# Options of a row of CURVES that change what is trained: its reference gets them too.
DEEP = "--num-hidden-layers 14 --lr 5e-4"  # two stages on each of 8 ranks
EXPERTS = "--num-experts 8"
WITHIN = 5e-4  # losses and norms of 20 steps in float32, beside those of one process on the CPU


def grid(n):
    """The rank grid of hybrid_3d.py on n ranks."""
    return {1: "", 2: "--tp 2", 4: "--tp 2 --cp 2", 8: "--tp 2 --pp 2"}[n]


def each_script(n):
    """A command of each script that trains the same model."""
    return [
        "single.py", "ddp.py", "zero.py --stage 2", "fsdp.py", "tp.py", "cp.py",
        "pp.py --microbatches 8", f"hybrid_3d.py {grid(n)}".strip(),
    ]


def curves(n):
    """Commands that follow the curve of one process, each with the options that the one gets."""
    schedules = "interleaved1f1b", "loopedbfs", "zerobubble", "zbv", "dualpipev"
    return dict.fromkeys([
        *each_script(n), "zero.py --stage 1", "tp.py --no-sequence-parallel",
        "cp.py --attention ulysses", "cp.py --attention allgather",
        "pp.py --microbatches 8 --schedule gpipe",
    ], "") | dict.fromkeys(
        [f"pp.py --microbatches 16 --schedule {name}" for name in schedules], DEEP
    ) | dict.fromkeys(
        ["ep.py", f"ep.py --ep {n}", f"hybrid_3d.py --ep {min(n, 4)} {grid(n)}".strip()], EXPERTS
    )


def llama_1b(n):
    """Options of a Llama of 1.5 billion parameters, for n ranks. Most steps wait for nothing: only
    the first, the tenth and the last one are logged."""
    return (f"--model llama3-1b --seq-len 2048 --batch-size {8 * n} --dtype bfloat16 --steps 20 "
            "--lr 1e-4 --activation-checkpointing --save-every 0")


# As large as the Llama, with 8 experts in each layer
EXPERTS_1B = "ep.py --num-experts 8 --expert-size 1024"
# Of these a dry run counts something else: torch.compile, and which tokens go to which expert.
UNCOUNTED_1B = ["fsdp.py --compile", EXPERTS_1B]

PARAMETERS_1B = 1_498_482_688, 1_498_744_832  # of the Llama, and with experts

COLUMNS = {  # of a row: its names, and their heads
    "distance": "beside one process on the CPU", "tokens_per_second": "tokens/s", "mfu": "MFU",
    "counted": "bytes in a dry run", "allocated": "bytes allocated",
}


def block(facts, rows):
    """What a user can paste into an issue, in Markdown. ``facts``: a dict of strings. ``rows``:
    from commands to dicts with some of ``COLUMNS``. None: the run has failed."""
    lines = [f"- {name}: {fact}" for name, fact in facts.items()]
    lines += ["", f"| command | {' | '.join(COLUMNS.values())} |", "|---" * 6 + "|"]
    for command, row in rows.items():
        cells = [cell(row, name) for name in COLUMNS]
        lines.append(f"| `{command}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(row, name):
    if name not in row:
        return ""  # this test was not chosen
    return "**failed**" if row[name] is None else f"{row[name]:.4g}"


def check_kernels(lines):
    """What kernels.py prints: ``lines``. Rounding to bfloat16 is 0.2 % to 0.5 % of a result
    on the CPU; a log-sum-exp is always in float32. A wrong kernel is wrong by 10 % and more."""
    cases = [json.loads(line.removeprefix("kernel ")) for line in lines if "kernel" in line]
    assert len(cases) == 21
    for name, distances in cases:
        for result, distance in distances.items():
            within = 1e-4 if "float32" in name or result.endswith("lse") else 0.015
            within = 0 if "empty" in result else within
            assert distance <= within, (name, result, distance)
