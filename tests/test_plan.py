"""tools/plan.py: a table of dry runs."""

import json
import operator
import re
import shlex
import signal
import sys

import pytest

from common.experts import MixtureConfig
from common.model import PRESETS, add_model_options, model_config
from common.options import SettingError, option_parser, parse_options
from tests.support.commands import finish, start
from tests.support.sample import rows, table, thorough
from tests.support.words import in_order, refused
from tools import command, plan
from tools.counting import extended, one_rank
from tools.counting.pipeline import AGAIN, Pipeline, Strategy

TINY = "--model tiny --seq-len 128 --dtype float32"
AXIS = operator.itemgetter("collective", "group")
SENT = operator.itemgetter("calls", "bytes", "between_machines")


def options(words, layers=4):
    """The options of a plan."""
    more = "--model tiny --devices 8 --device-memory 1e9 --seq-len 128"
    args = plan.parse(f"{more} {words}".split())
    args.config = MixtureConfig(**vars(PRESETS["tiny"]) | {"num_hidden_layers": layers})
    return args


# A command, its stages, what a formula says that each holds at least, the memory of a device; the
# ranks that are counted. Of 8 ranks the first of each stage; of stages with 2, 2, 3 and 2 layers
# not the second; 14 of rank 4 is too much for 13. Rank 0 has 10: another may have more than the
# formula says, but not that much more.
@rows("command, stages, least, memory, counted", """
tp.py | 1 | | 99 | 0
hybrid_3d.py --pp 4 | 4 | 9 9 9 9 | 99 | 0 4 6
hybrid_3d.py --pp 4 | 4 | 9 9 9 9 | 13 | 0 4
hybrid_3d.py --pp 4 | 4 | 9 9 8.9 9 | 99 | 0 6
""")
def test_what_is_counted(monkeypatch, command, stages, least, memory, counted):
    """The rank that holds most is the row."""
    monkeypatch.setattr(Pipeline, "least_at_peak", lambda pipeline, words, place=0: (
        place and float(least.split()[place])))
    found = []

    def count(script, words, world_size, rank, nproc_per_node):
        found.append(rank)
        assert (words[-2:], world_size, nproc_per_node) == (["--batch-size", "8"], 8, 4)
        return {"peak": {"in all": 10 + rank}, "rank": rank}

    monkeypatch.setattr(one_rank, "count_apart", count)
    args = options(f"--device-memory {memory / 1e9} --nproc-per-node 4", 9)
    pipeline = Pipeline(Strategy(command, 8 // stages, stages), args)
    most = plan.evaluate(pipeline, command.split(), args)["rank"]
    assert " ".join(map(str, found)) == str(counted) and found[-1] == most


# Of README.md and docs/planning.md, and what else may differ: devices, data-parallel ranks,
# stages, sequences, script, options, model, layers, the rank. From 12 layers on zero.py has another
# peak.
@rows("world, dp, pp, batch_size, script, options_, model, layers, rank", """
8 | 8 | 1 | 8 | fsdp.py | {AGAIN} | --model llama3-8b | 17 | 0
8 | 8 | 1 | 8 | zero.py --stage 1 | {AGAIN} | --model llama3-8b | 14 | 0
8 | 8 | 1 | 8 | fsdp.py --no-reshard-after-forward | {AGAIN} selective | --model llama3-8b | 17 | 0
8 | 8 | 1 | 48 | zero.py --stage 1 | --grad-accum 6 | --model llama3-1b | 16 | 0
8 | 8 | 1 | 40 | zero.py --stage 2 | --grad-accum 5 {AGAIN} | --model llama3-1b | 15 | 0
8 | 8 | 1 | 48 | ddp.py | --grad-accum 6 {AGAIN} selective | --model llama3-1b | 13 | 0
64 | 64 | 1 | 64 | fsdp.py --replicate 8 | | --model llama3-70b | 19 | 0
64 | 4 | 2 | 64 | hybrid_3d.py --tp 8 --pp 2 | --microbatches 2 | --model llama3-70b | 28 | 0
4 | 4 | 1 | 24 | cp.py --attention ring | --grad-accum 6 | --model llama3-1b | 13 | 0
8 | 8 | 1 | 8 | cp.py --attention allgather | | --model llama3-1b | 16 | 0
2 | 1 | 2 | 8 | pp.py --schedule 1f1b | --microbatches 4 {AGAIN} | --model llama3-8b | 36 | 0
64 | 8 | 8 | 64 | hybrid_3d.py --pp 8 | --microbatches 8 {AGAIN} | --model llama3-70b | 80 | 48
64 | 4 | 16 | 64 | hybrid_3d.py --pp 16 | --microbatches 16 {AGAIN} | --model llama3-70b | 80 | 0
64 | 2 | 8 | 128 | hybrid_3d.py --cp 2 --tp 2 --pp 8 | --microbatches 16
  | --model llama3-70b | 24 | 0
64 | 2 | 16 | 96 | hybrid_3d.py --tp 2 --pp 16 | --microbatches 24 {AGAIN}
  | --model llama3-70b | 48 | 60
16 | 2 | 8 | 32 | hybrid_3d.py --pp 8 --ep 2 | --microbatches 16 {AGAIN}
  | --model llama3-1b --num-experts 4 | 16 | 4
* 8 | 1 | 8 | 32 | pp.py --schedule 1f1b | --microbatches 32 | --model llama3-1b | 16 | 0
8 | 8 | 1 | 8 | ep.py --ep 4 | {AGAIN}
  | --model llama3-8b --num-experts 8 --expert-size 7168 | 13 | 0
8 | 4 | 1 | 8 | hybrid_3d.py --tp 2 --ep 4 | | --model llama3-1b --num-experts 8 | 13 | 0
""", AGAIN=AGAIN)
def test_what_is_extended_equals_what_is_counted(
    monkeypatch, world, dp, pp, batch_size, script, options_, model, layers, rank
):
    """Memory to the byte, also where another moment than in the small counts is the peak; and what
    is sent and computed, of many micro-batches in proportion."""
    jobs, count = [], one_rank.count_apart
    monkeypatch.setattr(one_rank, "count_apart", lambda *job: jobs.append(job) or count(*job))
    parser = option_parser("")
    add_model_options(parser, MixtureConfig)
    model = [*model.split(), "--num-hidden-layers", str(layers)]
    args = options(f"--devices {world} --seq-len 2048 --batch-size {batch_size}")
    args.config = model_config(parse_options(parser, model), MixtureConfig)
    words = f"{script} {options_}".split() + [*model, "--seq-len", "2048", "--dtype", "bfloat16"]
    pipeline, place = Pipeline(Strategy(script, dp, pp), args), rank * pp // world
    found = extended.Rank(pipeline, place, words, args).count()
    assert len(jobs) + ("pp" in script) > 1
    counted = count(str(command.ROOT / words[0]), [*words[1:], "--batch-size", str(batch_size)],
                    world, rank, 8)
    for kind in "peak", "held", "rank", "world_size":
        assert found[kind] == counted[kind], kind
    exactly = 1e-3 if "--microbatches" in options_ else 1e-12
    for kind in "operations", "sent", "between_machines":
        assert found[kind] == pytest.approx(counted[kind], rel=exactly), kind
    parts, wholes = (sorted(each["collectives"], key=AXIS) for each in (found, counted))
    assert [*map(AXIS, parts)] == [*map(AXIS, wholes)]
    for part, whole in zip(parts, wholes):
        if exactly < 1e-9 or part["bytes"] >= counted["sent"] / 1e3:
            assert SENT(part) == pytest.approx(SENT(whole), rel=exactly)
    least = pipeline.least_at_peak(words, place) / counted["peak"]["in all"]
    assert (0.85 if pp > 1 else 0.5) < least < 1


def counts(*peaks):
    """Of 6 and of 8 layers, whose moment i has the peak peaks(i, layers)."""
    return [{"moments": [(f"0.layers.{i} forward", {"in all": peak(i, n)})
                         for peak in peaks for i in range(n)],
             "held": {"parameters": 4 * n}, "operations": n, "collectives": []} for n in (6, 8)]


def test_a_later_moment_becomes_the_peak():
    few, some = counts(lambda i, n: 100 + n,
                       lambda i, n: 3 * n + i)

    def extend(few, some):
        return extended.extend(few, some, extended.by_layer, (6, 8), 40)

    found = extend(few, some)
    assert found["peak"] == {"in all": 120 + 39} and found["held"] == {"parameters": 160}
    assert extend(*counts(lambda i, n: i * i)) is None  # the moments between are on no line
    some["moments"].append(("another", {"in all": 1}))  # there is none with fewer layers
    assert extend(few, some) is None


@thorough
def test_a_plan_that_is_stopped_ends():
    """At once: what is being counted is not waited for. Rows were printed as they were counted."""
    words = "--model tiny --devices 8 --device-memory 99 --seq-len 128"
    process = start([sys.executable, "-m", "tools.plan", *words.split()], command.ROOT)
    next(line for line in process.stdout if "GB: " in line)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 1 and "plan.py: error: stopped" in output
    assert "Traceback" not in output


# In order, what is given first of equal ones: GB at the peak, 10^12 operations, GB sent, of these
# between machines, the bubble
ROWS = table("""
given first | 1 104 10 0 0
least | 10 100 10 0 0
sends more | 1 100 50 0 0
slow link | 1 80 110 0 0
bubble | 1 60 0 0 0.5
slow network | 1 10 1 20 0
too large | 11 1 0 0 0
larger | 12 1 0 0 0
""")


def test_what_sorts_the_rows():
    """What fits; then the larger bound, to 5 %; then both bounds, to 5 %; then the simplest."""
    args = options("--device-memory 10 --tflops 100 --link 100 --network 10")
    given = []
    for name, numbers in (row.values for row in ROWS):
        peak, operations, sent, crossing, bubble = map(float, numbers.split())
        given.append(plan.row_of(name, {
            "peak": {"in all": peak * 1e9}, "operations": operations * 1e12, "bubble": bubble,
            "between_machines": crossing * 1e9, "sent": sent * 1e9}, args))
    # Unsorted: of rows that are equal to 5 %, what was given first stays first.
    unsorted = sorted(given, key=lambda row: row["command"])
    assert [*plan.in_order(unsorted)] == given


# Stages of a pipeline, sequences, and how the batch is shared: in each of these ways
@rows("stages, batch_size, ways", """
2 | 32 | --microbatches 8, --microbatches 16, --microbatches 32
2 | 4 | --microbatches 4
2 | 12 | --microbatches 6, --microbatches 12
8 | 74 | --microbatches 37, --microbatches 74
1 | 12 | , --grad-accum 2, --grad-accum 3, --grad-accum 6
""")
def test_micro_batches_and_accumulation(stages, batch_size, ways):
    found = plan.variants(Strategy("", max(1, 2 // stages), stages), batch_size)
    assert ", ".join(map(" ".join, found)) == ways


# Devices, devices of a machine, sequences, positions of each, layers, experts of a layer; what is
# tried: a command, its data-parallel ranks, ranks of a pipeline; commands that are not.
@rows("words, tried, not_tried", """
16 8 16 8192 32 0 | tp.py 1 1, ddp.py 16 1, fsdp.py --replicate 2 16 1,
  hybrid_3d.py --cp 2 8 1, hybrid_3d.py --tp 8 2 1, hybrid_3d.py --tp 8 --pp 2 1 2,
  pp.py --schedule 1f1b 1 16 | hybrid_3d.py --pp 16, hybrid_3d.py --cp 4
16 8 12 4096 32 0 | hybrid_3d.py --tp 4 4 1 | hybrid_3d.py --tp 2, hybrid_3d.py --pp 4
1 8 4 128 4 0 | single.py 1 1 | ddp.py
8 8 8 128 4 0 | hybrid_3d.py --pp 2 4 2 | hybrid_3d.py --pp 4, pp.py --schedule 1f1b
1 8 4 128 4 12 | ep.py 1 1 | single.py
8 2 8 128 4 12 | ep.py --ep 1 8 1, ep.py --ep 2 8 1, ep.py --ep 4 8 1,
  hybrid_3d.py --pp 2 --ep 2 4 2 | fsdp.py, hybrid_3d.py --pp 2, ep.py --ep 8
8 8 8 128 4 8 | hybrid_3d.py --pp 2 --ep 4 4 2 | hybrid_3d.py --pp 2 --ep 2
""")
def test_strategies_and_why_not(words, tried, not_tried):
    """Pipelines over all ranks are pp.py's; 4,096 positions and two layers are left for a rank; 8
    ranks cannot share 12 sequences, 4 can, but not as 4 micro-batches each."""
    found, left_out = plan.strategies(*map(int, words.split()))
    commands = {" ".join(map(str, vars(each).values())) for each in found}
    assert set(tried.split(", ")) <= commands
    assert not set(not_tried.split(", ")) & {each.command for each in found}
    assert left_out["--tp beyond the 8 devices of a machine"] == words.startswith("16 ")
    assert (len(found) == 1) == words.startswith("1 ")


COUNTED = """{
    "held": {"parameters": 4e6, "gradients": 3e6, "optimizer states": 2e6},
    "sent": 8e6, "between_machines": 3e6, "operations": 4e9,
    "collectives": [
        {"collective": "all-reduce", "group": "dp", "bytes": 8e6, "between_machines": 3e6}]}"""


@pytest.fixture
def asked(monkeypatch):
    """Pretends to count, and notes what it is asked for."""
    asked = []

    def count(script, words, world_size, rank, nproc_per_node):
        asked.append(" ".join(words))
        if world_size == 3:
            raise SettingError("3 ranks")
        steps, sequences = (int(one_rank.value_of(name, words) or 1)
                            for name in ("--grad-accum", "--batch-size"))
        activations = 16e6 * sequences / steps / world_size**2 / (4 if AGAIN in words else 1)
        peak = {"in all": 10e6 + activations, "activations": activations}
        bubble = {"bubble": 0.5} if "ddp" in str(script) else {}
        return json.loads(COUNTED) | bubble | {"peak": peak, "moments": [("", peak)]}

    monkeypatch.setattr(one_rank, "count_apart", count)
    monkeypatch.setattr(Pipeline, "least_at_peak", lambda *_: 0)
    return asked


# The fewest accumulation steps that fit; then recomputing; then more devices. The bounds, and a
# command that can be pasted. Why nothing can run.
@rows("words, said", """
--device-memory 0.03 --tflops 2 --link 1 --nproc-per-node 2 --only ddp.py
  | --tflops 2 --link 1 --network 50 fits GB parameters gradients states activations sent, GB by
  axis between machines 10^12 operations bubble computes >= s sends >= s command yes 0.026 0.004
  0.003 0.002 0.016 dp 0.008 0.003 0.004 50% 0.004 0.008 ddp.py --grad-accum 4 yes ...
  0.008 ddp.py {AGAIN} selective left out: --cp that leaves a rank less than 4096
  positions the first row: NPROC=2 bash run.sh ddp.py ...
  the simplest that fits: NPROC=2 bash run.sh ddp.py
--device-memory 1 --tflops 2 --link 4 --network 1 --nproc-per-node 1 --only ddp.py
  | yes ... 0.004 0.003 ddp.py left out: --cp that leaves a rank less than 4096 positions left out:
  --tp beyond the 1 devices of a machine the first row: ...
  the simplest that fits: NPROC=1 sbatch --nodes=2 --exclusive run.sh ddp.py --model tiny
  --seq-len 128 --dtype float32 --batch-size 16 (end)
--device-memory 1 --only 'zero.py --stage 2' | run.sh zero.py --stage 2 --model
--device-memory 0.0103 --only ddp.py | by a formula nothing fits into 0.0103 GB of 2 devices
--device-memory 300 --only ddp.py --model llama3-70b
  | --network 50 left out: ... left out: ddp.py: more than 1,129 GB, by a formula nothing fits
--device-memory 1 --devices 3 --only ddp.py
  | left out: ddp.py: 3 ranks ... nothing fits into 1 GB of 3 devices
""", AGAIN=AGAIN)
def test_a_plan(asked, capsys, tmp_path, words, said):
    path = tmp_path / "plan.json"
    try:
        plan.main(shlex.split(f"{TINY} --devices 2 --batch-size 16 --json {path} {words}"))
    except SettingError as error:
        print(error)
    output = f"{' '.join(capsys.readouterr().out.split())} (end)"
    assert in_order(said, output), output
    for row in json.loads(path.read_text())["rows"]:
        assert f"{row['command']} " in output


def test_the_plan_of_a_mixtral(asked, capsys, tmp_path):
    more = {"model_type": "mixtral", "num_local_experts": 4, "head_dim": 4,
            "rope_scaling": PRESETS["llama3-405b"].rope_scaling}
    (tmp_path / "config.json").write_text(json.dumps(vars(PRESETS["tiny"]) | more))
    words = f"--model {tmp_path} --seq-len 128 --devices 2 --only ep.py --device-memory 1"
    plan.main(words.split())
    output = capsys.readouterr().out
    assert re.findall("  (ep.py.*)", output) == ["ep.py --ep 1", "ep.py --ep 2"]
    assert f"run.sh ep.py --ep 1 --model {tmp_path} " in output
    given = next(words for words in asked if "--ep 2" in words)
    words = f"--model {tmp_path} --seq-len 128 --dtype bfloat16 ... --batch-size 2"
    assert in_order(words, given), given


@rows("words, message", """
--model none --devices 2 --seq-len 128 | --model none: .*No such file
{TINY} --devices 2 --only foo.py | --only foo.py: .* ddp.py, .*fsdp.py
{TINY} --devices 12 | --devices 12 .* --nproc-per-node 8
{TINY} --devices 2 --link 0 | --link: 0 is not allowed
""", TINY=TINY)
def test_bad_input(words, message):
    with refused(message):
        plan.main(f"{words} --device-memory 1".split())
