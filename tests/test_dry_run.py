"""tools/dry_run.py counts what a real run counts, without running it."""

import json

import pytest

from common.model import PRESETS
from tests.support.processes import ROOT
from tests.support.sample import sampled, thorough
from tools import dry_run as tool

# Script and options, its world size, and the ranks to play.
RUNS = [
    ("single.py --grad-accum 2 --activation-checkpointing", 0, [0]),
    ("ddp.py --grad-accum 2 --dtype bfloat16 --activation-checkpointing", 2, [1]),
    ("zero.py --stage 1 --grad-accum 2", 2, [0]),
    ("zero.py --stage 2 --grad-accum 2 --dtype bfloat16 --batch-size 12", 3, [2]),
    ("fsdp.py --grad-accum 2 --dtype bfloat16 --activation-checkpointing", 2, [1]),
    ("fsdp.py --no-reshard-after-forward --grad-accum 2", 2, [0]),
    ("fsdp.py --replicate 2", 4, [3]),
    ("tp.py --no-sequence-parallel --dtype bfloat16 --grad-accum 2", 2, [1]),
    ("tp.py --activation-checkpointing --vocab-size 8192 --batch-size 32", 2, [0]),  # in chunks
    ("cp.py", 2, [1]),
    ("cp.py --attention ulysses --num-key-value-heads 4", 4, [3]),
    ("cp.py --attention allgather --grad-accum 2 --dtype bfloat16", 2, [0]),
    ("pp.py", 4, [0, 2]),
    ("pp.py --schedule gpipe --grad-accum 2 --activation-checkpointing", 2, [0]),
    ("pp.py --schedule interleaved1f1b", 2, [0]),
    ("pp.py --schedule zerobubble", 2, [0]),
    ("pp.py --schedule dualpipev", 2, [1]),
    ("hybrid_3d.py --tp 2 --cp 2 --pp 2", 8, [0, 6]),
    ("hybrid_3d.py --tp 2 --dtype bfloat16 --grad-accum 2", 4, [3]),
    ("hybrid_3d.py --cp 2 --replicate 2 --activation-checkpointing", 4, [0]),
    # To all experts: as balanced as a dry run assumes
    ("ep.py --num-experts 4 --experts-per-token 4 --ep 1", 2, [0]),
    ("ep.py --num-experts 4 --experts-per-token 4 --ep 2 --activation-checkpointing", 4, [0, 3]),
    ("hybrid_3d.py --num-experts 4 --experts-per-token 4 --tp 2 --ep 2", 4, [0, 3]),
    ("diloco.py --inner-steps 3 --grad-accum 2 --dtype bfloat16", 4, [3]),
    ("examples/ddp_convnet.py --batch-size 32", 2, [1]),
    ("examples/fsdp_gpt2.py --dropout 0.1", 2, [0]),
    ("examples/fsdp_muon.py", 2, [1]),
    ("examples/cp_documents.py --separator 255", 2, [1]),  # one document: no text has this byte
]
SAMPLE = RUNS[:1]


def count(command, world_size, rank=0, nproc_per_node=8):
    """What a dry run counts as one rank."""
    script, *more = command.split()
    options = ["--dtype", "float32", *more]
    return tool.count_apart(str(ROOT / script), options, world_size, rank, nproc_per_node)


def test_selective_checkpointing_is_between_all_and_nothing():
    """It keeps more than full checkpointing, and repeats no matrix product and no attention."""
    options = "--model small --seq-len 256 --batch-size 4 --vocab-size 256"
    kept, selective, full = (
        count(f"single.py {options} {more}", 1) for more in (
            "", "--activation-checkpointing selective", "--activation-checkpointing",
        )
    )
    assert kept["operations"] == selective["operations"] < 0.85 * full["operations"]
    peaks = [each["peak"]["activations"] for each in (full, selective, kept)]
    assert peaks[0] < 0.5 * peaks[1] and peaks[1] < 0.7 * peaks[2]


@pytest.fixture
def dry_run(server, tmp_path):
    def dry_run(command, world_size, *options, **kwargs):
        """What it prints, and what it writes with --json."""
        script, *more = command.split()
        path = tmp_path / "dry.json"
        result = server.run(
            "tools/dry_run.py", 0,
            [*options, "--json", path, world_size, ROOT / script, "--dtype", "float32", *more],
            folder=tmp_path, pass_out=False, **kwargs,
        )
        return result, json.loads(path.read_text()) if path.exists() else None

    return dry_run


# Every rank writes what it has counted.
EVERY_RANK = """
import json
from common.services.report import Report
close = Report.close
def write_and_close(report, theory=None):
    counter = report.counter
    found = {"held": counter.held, "peak": counter.peak, "collectives": counter.collectives()}
    (report.args.out / f"rank{rank}.json").write_text(json.dumps(found))
    return close(report, theory)
Report.close = write_and_close
"""


@pytest.mark.parametrize("command, world, ranks", sampled(RUNS, SAMPLE))
def test_it_counts_what_a_run_counts(run, corpus, command, world, ranks):
    """Each collective with its calls and bytes; parameters, gradients and optimizer states to the
    byte. Activations too, unless a thread of gloo still holds a tensor that it has sent: on a busy
    machine it may hold several, so there is a second and a third attempt."""
    if "gpt2" in command:
        pytest.importorskip("transformers")
    names = ("collective", "group", "calls", "bytes")
    dry = {rank: count(command, world or 1, rank) for rank in ranks}
    options = ["--steps", 4, "--save-every", 0]  # the third is counted, and is not logged
    options += [] if "examples" in command else ["--data", corpus]
    for attempt in range(3):
        result = run(command, world, options, out=f"out{attempt}", inject=EVERY_RANK)
        real = {rank: json.loads((result.out / f"rank{rank}.json").read_text()) for rank in ranks}
        for rank in ranks:
            counted, expected = ([[part[name] for name in names] for part in found["collectives"]]
                                 for found in (dry[rank], real[rank]))
            assert sorted(counted) == sorted(expected)
            for kind in ("parameters", "gradients", "optimizer states"):
                assert dry[rank]["held"].get(kind, 0) == real[rank]["held"].get(kind, 0), kind
        peaks = [(dry[rank]["peak"][kind], real[rank]["peak"][kind])
                 for rank in ranks for kind in ("activations", "in all")]
        if all(predicted <= counted <= 1.03 * predicted for predicted, counted in peaks):
            return
    raise AssertionError(f"predicted and counted peaks: {peaks}")


def test_the_fake_world(server, tmp_path):
    """Whatever the peak of a run is: it may hide a tensor too many at another moment."""
    server.run("tests/support/as_outside.py", 0, folder=tmp_path, pass_out=False)


@thorough
def test_the_ranks_of_a_pipeline(dry_run):
    """Without --rank it is the stage that holds most: here the last, which has the head."""
    options = "--vocab-size 32768 --batch-size 4 --microbatches 4"
    result, most = dry_run(f"pp.py {options}", 2)
    first = count(f"pp.py {options}", 2)
    assert most["rank"] == 1 and most["peak"]["in all"] > first["peak"]["in all"]
    assert "pp.py as rank 1 of 2, a dry run" in result.output
    assert most["bubble"] == 1 / 5 and "bubble: at least 20.0% of a step" in result.lines


@thorough
def test_the_first_line_says_when_it_counts_as_on_a_gpu(dry_run):
    """A real run on the CPU would be in float32."""
    result, _ = dry_run("single.py --hidden-size 32 --dtype auto", 1)
    assert result.lines[0] == (f"{ROOT / 'single.py'} as rank 0 of 1, a dry run in bfloat16: "
                               f"--dtype auto counts as on GPUs")


@thorough
def test_floating_point_operations():
    """PaLM's count, and the scores of attention once more in the backward pass. Recomputing layers
    is one more forward pass of each, without its last product, whose result nobody needs."""
    config, T, B = PRESETS["small"], 256, 2
    width = config.num_attention_heads * config.head_dim
    palm = B * T * config.flops_per_token(T)
    attention = B * T * config.num_hidden_layers * width * T
    options = f"--model small --seq-len {T} --batch-size {B}"
    plain = count(f"single.py {options}", 1)
    assert plain["operations"] == palm + attention
    split = count(f"tp.py {options}", 2)
    assert split["operations"] == plain["operations"] / 2
    again = count(f"single.py {options} --activation-checkpointing", 1)
    head = 2 * B * T * config.hidden_size * config.vocab_size
    forward = (palm - 3 * head - 6 * attention) / 3 + 2 * attention
    last = 2 * B * T * config.num_hidden_layers * config.hidden_size * config.intermediate_size
    assert again["operations"] == plain["operations"] + forward - last


@thorough
def test_a_ring_crosses_machines_at_some_edges():
    found = count("ddp.py", 8, nproc_per_node=4)
    assert found["between_machines"] == pytest.approx(found["sent"] * 2 / 8, abs=1)


@thorough
def test_an_all_to_all_crosses_machines_at_some_pairs():
    found = count("cp.py --attention ulysses --num-key-value-heads 4", 4, nproc_per_node=2)
    crossing = {part["collective"]: part["between_machines"] / part["bytes"]
                for part in found["collectives"]}
    assert crossing == pytest.approx({"all-to-all": 2 / 3, "all-reduce": 1 / 2})


@thorough
@pytest.mark.parametrize("rank, share", [(0, 0), (1, 1 / 2)])
def test_a_pipeline_knows_to_whom_it_sends(rank, share):
    """Of ranks 0 and 1 on one machine, and 2 and 3 on another, 1 sends to 0 and to 2."""
    found = count("pp.py", 4, rank, nproc_per_node=2)
    (part,) = [part for part in found["collectives"] if part["collective"] == "send"]
    assert part["between_machines"] == part["bytes"] * share


def test_it_reads_and_writes_nothing(dry_run, tmp_path):
    """Not the data, not the run folder; and the file has the names of a summary.json."""
    result, found = dry_run(
        "fsdp.py --data /no/such/file --out earlier --model llama3-8b --num-hidden-layers 1 "
        "--batch-size 64", 64, "--rank", 0, "--device-memory", 4,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dry.json"]
    assert {"held", "peak", "sent", "theory", "collectives"} < found.keys()
    assert "does not fit into 4 GB" in result.lines[-1]
    assert not any("epoch" in line or "tokens/s" in line for line in result.lines)


REFUSED = {
    "--rank 0 6 hybrid_3d.py --tp 4": "World size (6) must equal dp (1) x tp (4)",
    "--rank 0 2 cp.py --compile --activation-checkpointing selective": "selective with --comp",
    "--rank 0 2 single.py": "single.py is one process",
    "--rank 0 4 fsdp.py --replicate 3": "--replicate 3 does not divide the world size 4: use 1 or",
    "--rank 0 4 nothing.py": "nothing.py is no script: give the path of a .py file",
    "--rank 0 4 tools/bench.py": "tools/bench.py has no load_steps, Checkpoints, Report",
    "--rank 0 4 README.md": "README.md is no script",
    "--rank 0 4 tests/test_cp.py": "tests/test_cp.py has no main, load_steps",
    "--rank 0 0 fsdp.py": "0 is not allowed",
    "--rank 0 four fsdp.py": "invalid whole number value: 'four'",
    "--rank 4 4 fsdp.py": "--rank 4: the ranks of 4 are 0 to 3",
    "--rank 0 4 fsdp.py --no-such-option": "unrecognized arguments: --no-such-option",
    "4": "the following arguments are required: SCRIPT",
    "--rank 0 --json /proc/none/file 1 single.py": "No such file or directory",
}


def test_bad_input_is_one_line(server):
    commands = [command.split() for command in REFUSED]
    result = server.run("tests/support/refusals.py", 0, ["dry_run", json.dumps(commands)],
                        folder=ROOT, pass_out=False)
    found = [line for line in result.lines if "error:" in line]
    assert len(found) == len(REFUSED) and "it ended well" not in result.output, result.output
    for (command, words), line in zip(REFUSED.items(), found):
        assert line.startswith("dry_run.py: error: ") and words in line, (command, line)


@pytest.mark.parametrize("offers, status, words", [
    ("", 1, ["mine.py:", "return loss.item()", "reads the value of a tensor"]),
    ("WITHOUT_VALUES = {'shown': lambda loss: None}\n", 0, ["floating-point operations"]),
])
def test_a_script_that_reads_a_value(server, tmp_path, offers, status, words):
    """It is refused, or names a function that is called instead."""
    text, loop = (ROOT / "single.py").read_text(), "            micro_loss.backward()\n"
    assert text.count(loop) == 1
    text = text.replace(loop, "            print(shown(micro_loss))\n" + loop)
    reads = f"def shown(loss):\n    return loss.item()\n\n\n{offers}def main("
    path = tmp_path / "mine.py"
    path.write_text(text.replace("def main(", reads))
    result = server.run("tools/dry_run.py", 0, ["--rank", 0, 1, path], folder=tmp_path,
                        pass_out=False, expect_ok=False)
    assert result.statuses == [status], result.output
    assert all(word in result.lines[-1] for word in words), result.output
