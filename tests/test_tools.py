"""tools/prepare.py and tools/bench.py."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from common.errors import SettingError
from common.tokens import TokenDataset
from tests.support.sample import sampled, thorough
from tests.test_launch import RUN, finish, listeners, start, wait_until
from tools import bench, prepare
from tools.support import command, timed


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """The path of a byte-level tokenizer, which any text goes through without loss."""
    tokenizers = pytest.importorskip("tokenizers")
    tokens = [*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "</s>"]
    vocabulary = {token: number for number, token in enumerate(sorted(tokens))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.enable_truncation(5)  # files of real models may have such settings
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def run_prepare(bpe, tmp_path, capsys):
    """Runs the tool. Returns the documents of train.bin and those of val.bin, in words, and what it
    printed."""
    import tokenizers

    def run_prepare(*options, tokenizer=bpe, out="tokens", dtype="uint16"):
        words = [*options, "--tokenizer", tokenizer, "--out", tmp_path / out, "--eod", "</s>"]
        prepare.main([str(word) for word in words])
        loaded = tokenizers.Tokenizer.from_file(str(tokenizer))

        def documents(name):
            ids = np.fromfile(tmp_path / out / name, dtype)
            (ends,) = np.nonzero(ids == loaded.token_to_id("</s>"))
            *parts, rest = np.split(ids, ends + 1)
            assert not len(rest)
            return [loaded.decode(part[:-1], skip_special_tokens=False) for part in parts]

        return documents("train.bin"), documents("val.bin"), capsys.readouterr().out

    return run_prepare


def write_jsonl(path, documents):
    path.write_text("\n \n".join(json.dumps({"id": 1, "text": text}) for text in documents))
    return path


@pytest.mark.parametrize("largest, dtype", [(65535, "uint16"), (65536, "uint32")])
def test_the_largest_id_chooses_the_type(run_prepare, tmp_path, largest, dtype):
    """Even if a vocabulary has gaps, and so fewer tokens than ids."""
    import tokenizers

    vocabulary, path = {"a": 3, "b": largest, "?": 0, "</s>": 7}, tmp_path / "words.json"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    (tmp_path / "a.txt").write_text("a b a b")
    *sides, output = run_prepare(tmp_path / "a.txt", "--val", 0, tokenizer=path, dtype=dtype)
    assert sides == [["a b a b"], []]
    assert f"--token-dtype {dtype} --vocab-size {largest + 1}" in output


def test_split_is_by_document(run_prepare, bpe, tmp_path):
    """Whole documents in their order, with special tokens only between them; disjoint and complete;
    the same in any order and in any files; equal documents together. The scripts' data reads them
    with the options that the tool prints. An earlier output is not overwritten."""
    documents = [f"{i} näïve 猫 🦊 </s> \n \r\n tab\t"[:i % 30 + 5] for i in range(600)]
    documents += documents[:100]
    path = write_jsonl(tmp_path / "all.NDJSON", documents)
    train, validation, output = run_prepare(path, "--val", 0.2)
    assert train == [document for document in documents if document not in validation]
    assert validation == [document for document in documents if document not in train]
    assert 0.13 < len(validation) / 700 < 0.27
    vocab_size = len(json.loads(bpe.read_text())["model"]["vocab"])
    assert output.splitlines()[-1] == (f"give the scripts --data {tmp_path}/tokens/train.bin "
                                       f"--token-dtype uint16 --vocab-size {vocab_size}")
    dataset = TokenDataset(str(tmp_path / "tokens/train.bin"), 16, "uint16", vocab_size)
    assert f"train.bin: {dataset.tokens:,} tokens" in output
    parts = [write_jsonl(tmp_path / f"{i}.json{'l' * (i > 0)}", documents[::-1][i::7])
             for i in range(7)]
    *sides, _ = run_prepare(*parts, "--val", 0.2, out="parts")
    assert [set(side) for side in sides] == [set(train), set(validation)]
    first = (tmp_path / "parts" / "train.bin").read_bytes()
    with pytest.raises(SettingError, match="parts/train.bin exists: "):
        run_prepare(path, "--val", 0.4, out="parts")
    assert (tmp_path / "parts" / "train.bin").read_bytes() == first


def test_what_is_a_document_in_text_files(run_prepare, tmp_path, monkeypatch):
    """All of a short one; of a long one the pieces, which end with a line if they can."""
    monkeypatch.setattr(prepare.read_documents, "__defaults__", (2**8,))
    short, long = tmp_path / "a.txt", tmp_path / "b.txt"
    short.write_bytes(b"\xef\xbb\xbfone\r\ntwo")  # a byte-order mark is no text
    lines = [*("猫 1234567\n" for _ in range(100)), "🦊" * 2**10]
    long.write_text("".join(lines))
    train, _, _ = run_prepare(short, long, "--val", 0)
    assert train[0] == "one\r\ntwo" and "".join(train[1:]) == "".join(lines)
    assert train[1].endswith("\n") and 2**8 <= len(train[1]) < 2**8 + 10
    assert all(len(document) <= 2**9 for document in train)


def the_line(main, words):
    """The one line with which a tool ends, from a SettingError."""
    with pytest.raises(SystemExit) as end:
        command.run(main, [str(word) for word in words])
    (line,) = end.value.code.splitlines()
    return line


def test_bad_input_of_prepare(bpe, tmp_path, monkeypatch):
    """Each ends with one line that names the value."""
    good, bad, fifo = tmp_path / "a.txt", tmp_path / "bad.jsonl", tmp_path / "fifo"
    good.write_text("one fox\n" * 99)
    os.mkfifo(fifo)

    def line(*words, out=tmp_path / "out", eod="</s>"):
        return the_line(prepare.main, [*words, "--tokenizer", bpe, "--out", out, "--eod", eod])

    for text in (b"{", b"[1]", b'{"body": "x"}', b'{"text": "\xff"}'):
        bad.write_bytes(b'{"text": "good"}\n\n' + text)
        assert f"{bad}, near document " in line(bad)
    for text in (b"", b" \n", b'{"text": ""}\n{"text": " "}'):
        bad.write_bytes(text)
        assert f"{bad}: no text" in line(bad)
    assert "--val 0.999999: all documents are in val.bin" in line(good, "--val", 0.999999)
    assert f"{fifo} is no regular file" in line(fifo)
    for share in ("nan", "-1", "1"):  # one of the files would be empty
        assert f"--val {float(share)}: " in line(good, "--val", share)
    assert "--eod <eos>: the tokenizer has no such" in line(good, eod="<eos>")
    assert f"--out {good} is no folder" in line(good, out=good)
    assert "an argument is empty" in line("")
    assert not any((tmp_path / "out").iterdir())

    def at_once(path, bar):  # another prepare ends first
        (tmp_path / "out" / "val.bin").write_text("of another")
        yield "one fox", 2**31

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "read_documents", at_once)
        assert "val.bin exists: " in line(good)
    assert (tmp_path / "out" / "val.bin").read_text() == "of another"
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install tokenizers" in line(good)


# The benchmark


def test_the_table_of_the_benchmark(monkeypatch, capsys):
    """A loop that takes twice as long as the script is at 2; the median of odd and even rounds. A
    row is printed when its rounds are done, and stays there if what follows is stopped."""
    loop, script = iter([2.0, 2.0, 12.0]), iter([1.0, 2.0, 4.0])

    def measure(commands, *_):
        (command,) = commands  # without --together one after the other
        if "tutorial.py ddp" in command:  # beside zero.py
            raise KeyboardInterrupt
        summary = {"mfu": 0.25, "tokens_per_second": 4.0}
        return [(next(loop), 6.0, {}) if "tutorial" in command else (next(script), 2.0, summary)]

    monkeypatch.setattr(bench, "measure", measure)
    words = "--nproc 2 --rounds 3 --only tp.py zero.py --batch-size 4 --seq-len 8 --seed 3"
    with pytest.raises(KeyboardInterrupt):
        bench.main(words.split())
    first, _, head, _, row = capsys.readouterr().out.splitlines()
    assert first.endswith("20 timed steps; --batch-size 4 --seq-len 8 --seed 3 --vocab-size 32000")
    found = dict(zip(head.split(" | ")[1:], row.split(" | ")[1:]))
    assert found == {
        "tokens/s": "16", "MFU": "100.0%", "CPU seconds per step": "2.000",
        "beside": "`tools/support/tutorial.py tp`", "its tokens/s": "16",
        "its time / script's time": "2.00 (1.00 to 3.00)",
        "its CPU time / script's CPU time |": "3.00 (3.00 to 3.00) |",
    }


class Pretended:
    """torchrun, as subprocess.Popen starts it: each rank has its costs, or the run has failed."""

    def __init__(self, words, stdout, env, **_):
        words = " ".join(map(str, words))
        self.ranks = int(words.partition("--nproc-per-node=")[2].split()[0])
        folder = words.partition("/timed.py 2 5 ")[2].split()[0]  # 3 after 2
        for rank in range(self.ranks):
            pathlib.Path(folder, f"rank-{rank}.json").write_text(str([rank + 1, rank + 2]))
        assert " -P " in words and "/tools/support/torchrun.py " in words
        assert " --vocab-size 32000 --steps 5" in words
        assert ("tutorial" in words) != (" --save-every 0 " in words)
        print("W torch\nddp.py: error: it is said twice\nddp.py: error:", file=stdout, flush=True)

    def wait(self):
        return self.ranks == 3

    poll = wait


def test_what_a_benchmark_measures(monkeypatch):
    """The slowest process, and the CPU seconds of all; without saves."""
    found, measure = [], bench.measure
    monkeypatch.setattr(subprocess, "Popen", Pretended)
    monkeypatch.setattr(bench, "measure", lambda *words: found.append(measure(*words)) or found[-1])
    bench.main("--nproc 2 --rounds 1 --warm-up 2 --timed 3 --only single.py tp.py".split())
    assert found == 2 * [[(1, 2, {})]] + 2 * [[(2, 5, {})]]
    words = "--nproc 3 --rounds 1 --warm-up 2 --timed 3 --batch-size 3 --only ddp.py"
    line = the_line(bench.main, words.split())
    assert "tutorial.py ddp failed: ddp.py: error: it is said twice" in line


@pytest.mark.parametrize("words, said", [
    ("--no-such-option", "unrecognized arguments: --no-such-option"),
    ("--only fsdp.py --cpu-offload", "unrecognized arguments: --cpu-offload"),
    ("--hidden-size 60", "num_attention_heads 8 does not divide hidden_size 60"),
    ("--steps=9", "--steps is the sum of --warm-up and --timed"),
    ("--data nowhere", "--data nowhere: no such file"),
    ("--batch-size 1", "ddp.py is timed beside PyTorch's loop ddp: --batch-size 1 cannot be"),
    ("--only hybrid_3d.py --num-experts 4",
     "hybrid_3d.py --tp 2 is timed beside PyTorch's loop tp: --num-experts 4"),
    ("--only tp.py --compile --activation-checkpointing",
     "tp.py is timed beside PyTorch's loop tp: --compile with --activation-checkpointing full"),
    ("--only no.py", "--only no.py: no such script is timed"),
])
def test_what_a_benchmark_refuses(monkeypatch, words, said):
    """Before its first round."""
    monkeypatch.setattr(bench, "measure", None)
    assert said in the_line(bench.main, ["--nproc", "2", *words.split()])


@pytest.mark.parametrize("words, size", [
    ("", "32000"), ("--model medium", ""), ("--vocab-size 300", "300"), ("--vocab-size=300", "300")
])
def test_the_vocabulary_of_a_benchmark(monkeypatch, words, size):
    """At least 32,000 tokens, if nobody names another number."""
    def measure(commands, args, options):
        given = " ".join(options).replace("=", " ").partition("--vocab-size ")[2]
        raise SettingError(f"it has {given}.")

    monkeypatch.setattr(bench, "measure", measure)
    assert the_line(bench.main, words.split()).endswith(f": it has {size}.")


def test_the_cost_of_a_step_is_without_the_warm_up(monkeypatch, tmp_path):
    """Of its seconds, and of the CPU seconds of the process."""
    clock = types.SimpleNamespace(perf_counter=iter([9.0, 15.0]).__next__, process_time=lambda: 1.0)
    monkeypatch.setattr(timed, "time", clock)
    timed.note_costs(1, 3, tmp_path / "costs.json")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for _ in range(4):
        optimizer.step()
    assert json.loads((tmp_path / "costs.json").read_text()) == [3.0, 0.0]


SAME = "--hidden-size 64 --num-hidden-layers 2 --vocab-size 1000 --seq-len 32 --batch-size 8"
CHANGED = "--grad-accum 2 --activation-checkpointing selective --lr 1e-3 --beta2 0.9 --grad-clip 2"
PAIRS = [(loop, script, more) for loop, script in bench.PAIRS + [("torchtitan", "fsdp.py")]
         for more in ("", CHANGED) if "--num-experts" not in loop or not more]


@pytest.mark.parametrize("loop, script, more", sampled(
    PAIRS,
    [("single", "single.py", CHANGED), ("ddp", "ddp.py", CHANGED), ("tp", "tp.py", CHANGED),
     ("torchtitan", "fsdp.py", CHANGED)],
))
def test_both_of_a_pair_train_the_same(once, loop, script, more):
    """As many parameters, from the same loss of an untrained model, along the same curve."""
    world = 0 if loop == "single" else 2
    options = f"{SAME} {more} --steps 4 --dtype float32"
    theirs = once(f"tools/support/tutorial.py {loop}", world, options, pass_out=False)
    found = json.loads(theirs.lines[-1])
    ours = once(script.format(n=2), world, f"{options} --save-every 0 --log-every 1")
    assert f"model tiny: {found['parameters']:,} parameters" in ours.output
    losses = [loss for (loss,) in ours.curve("loss")]
    torch.testing.assert_close(losses, found["losses"], rtol=0, atol=1e-4)
    assert abs(losses[0] - math.log(1000)) < 0.1 and len(set(losses)) == 4


def processes_in(folder):
    """The processes whose command names ``folder``."""
    return [path.parent.name for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
            if os.fsencode(folder) in path.read_bytes()]


@thorough
@pytest.mark.parametrize("name", ["", "SIGTERM"])
def test_the_benchmark_runs(tmp_path, name):
    """A loop and a script of one process, and of two. A signal leaves the row that is there, and no
    process."""
    options = "--nproc 2 --rounds 1 --warm-up 1 --timed 1 --together --only single.py tp.py"
    options += "" if name else " --vocab-size 512 --seq-len 32"  # or 32,000
    process = start([*RUN, "bench", *options.split()], tmp_path, TMPDIR=str(tmp_path))
    lines = []
    while name and not (lines and lines[-1].startswith("| `single.py`")):
        lines.append(process.stdout.readline())
        assert process.poll() is None, lines
    if name:
        runs = tmp_path / "bench-"
        wait_until(lambda: len(processes_in(runs)) == 6)  # two times torchrun, and its two ranks
        wait_until(lambda: listeners(processes_in(runs)))
        assert listeners(processes_in(runs)) == {"0100007F"}  # nothing beyond 127.0.0.1
        process.send_signal(getattr(signal, name))
    output = "".join(lines) + finish(process)
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["| `single.py`", "| `tp.py`"][:2 - bool(name)], output
    assert all(float(row[2]) > 0 and float(row[6].split()[0]) > 0 for row in rows)
    assert process.returncode == bool(name) and "Traceback" not in output, output
    assert not name or output.splitlines()[-1] == "bench.py: error: stopped"
    wait_until(lambda: not processes_in(tmp_path))
    assert not list(tmp_path.iterdir())
