"""tools/prepare.py and tools/bench.py."""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch

from common.errors import SettingError
from common.tokens import TokenDataset
from tests.support.sample import thorough
from tests.test_launch import RUN, finish, start
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
    assert f"{fifo} is no regular file" in line(fifo)
    for share in ("nan", "-1", "1"):  # one of the files would be empty
        assert f"--val {float(share)}: " in line(good, "--val", share)
    assert "--eod <eos>: the tokenizer has no such" in line(good, eod="<eos>")
    assert f"--out {good} is no folder" in line(good, out=good)
    assert "an argument is empty" in line("")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install tokenizers" in line(good)


# The benchmark


def test_the_table_of_the_benchmark(monkeypatch, capsys):
    """A loop that takes twice as long as the script is at 2; the median of odd and even rounds."""
    loop, script, busy = iter([2.0, 2.0, 12.0]), iter([1.0, 2.0, 4.0]), threading.Lock()

    def measure(command, *_):
        assert busy.acquire(blocking=False)  # without --together one after the other
        time.sleep(0.01)
        busy.release()
        return (next(loop), 6.0, {}) if "tutorial" in command else (next(script), 2.0, {})

    monkeypatch.setattr(bench, "measure", measure)
    bench.main("--nproc 2 --rounds 3 --only tp.py --batch-size 4 --seq-len 8".split())
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split(" | ")[2:6] == ["16", "2.000", "2.00 (1.00 to 3.00)", "3.00 (3.00 to 3.00) |"]


def test_what_a_benchmark_measures(monkeypatch):
    """The slowest process, and the CPU seconds of all; without saves."""
    def run(words, cwd, **_):
        (given,) = [word for word in words if "--nproc-per-node=" in str(word)]
        ranks = int(given.partition("=")[2])
        for rank in range(ranks):
            pathlib.Path(cwd, f"rank-{rank}.json").write_text(str([rank + 1, rank + 2]))
        command = " ".join(map(str, words))
        assert f"/timed.py 2 5 {cwd} " in command and " --steps 5 " in command  # 3 after 2
        assert " --batch-size 16 --seq-len 128 " in command and " --save-every 0 " in command
        return types.SimpleNamespace(returncode=0)

    found, measure = [], bench.measure
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(bench, "measure", lambda *words: found.append(measure(*words)) or found[-1])
    bench.main("--nproc 2 --rounds 1 --warm-up 2 --timed 3 --only single.py tp.py".split())
    assert found == 2 * [(1, 2, {})] + 2 * [(2, 5, {})]


def test_a_benchmark_of_a_command_that_fails(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: types.SimpleNamespace(
        returncode=1, stdout="W torch\nddp.py: error: no option --bogus\n"))
    found = the_line(bench.main, "--nproc 1 --rounds 1 --only ddp.py --bogus".split())
    assert "tutorial.py ddp failed: ddp.py: error: no option --bogus" in found


def test_the_cost_of_a_step_is_without_the_warm_up(monkeypatch, tmp_path):
    """Of its seconds, and of the CPU seconds of the process."""
    clock = types.SimpleNamespace(perf_counter=iter([9.0, 15.0]).__next__, process_time=lambda: 1.0)
    monkeypatch.setattr(timed, "time", clock)
    timed.note_costs(1, 3, tmp_path / "costs.json")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for _ in range(4):
        optimizer.step()
    assert json.loads((tmp_path / "costs.json").read_text()) == [3.0, 0.0]


@pytest.mark.parametrize("strategy, batch", [("tp", 4), ("ddp", 8), ("fsdp", 8)])
def test_loops_of_the_benchmark_train_the_same(run, strategy, batch):
    """All ranks draw the same tokens: two with half of 8 sequences each train as one with 4."""
    def losses(strategy, world, batch):
        words = f"{strategy} --batch-size {batch} --seq-len 8 --steps 4"
        result = run("tools/support/tutorial.py", world, words, pass_out=False)
        return [json.loads(line.removeprefix("losses ")) for line in result.lines]

    one, two = losses("single", 0, 4), losses(strategy, 2, batch)
    assert len(two) == 2 and len(set(one[0])) == 4
    torch.testing.assert_close(torch.tensor(two), torch.tensor(2 * one), rtol=0, atol=1e-4)


@thorough
def test_the_benchmark_runs(tmp_path):
    """A loop and a script of one process, and of two."""
    options = "--nproc 2 --rounds 1 --warm-up 1 --timed 1 --together --only single.py tp.py"
    output = finish(start([*RUN, "bench", *options.split()], tmp_path))
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["| `single.py`", "| `tp.py`"], output
    assert all(float(row[3]) > 0 and float(row[5].split()[0]) > 0 for row in rows)
