"""tools/prepare.py and tools/bench.py; and what every tool says of a path that is wrong."""

import ast
import importlib
import json
import signal

import numpy as np
import pytest

from common.data import TokenDataset
from common.options import SettingError
from tests.support.commands import RUN, finish, start
from tests.support.processes import TOOLS
from tests.support.sample import needs, table, thorough
from tools import bench, command, flatten, prepare


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level tokenizer.json, which any text goes through without loss."""
    tokenizers = needs("tokenizers")
    tokens = [*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "</s>"]
    vocabulary = {token: number for number, token in enumerate(sorted(tokens))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.enable_truncation(5)  # files of real models may have such settings
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", vocabulary["</s>"])])
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
    with the options that the tool prints."""
    documents = [f"{i} näïve 猫 🦊 </s> \n \r\n tab\t"[:i % 30 + 5] for i in range(600)]
    documents += documents[:100]
    path = write_jsonl(tmp_path / "all.NDJSON", documents)
    train, validation, output = run_prepare(path, "--val", 0.2)
    assert train == [document for document in documents if document not in validation]
    assert validation == [document for document in documents if document not in train]
    assert 0.13 < len(validation) / 700 < 0.27
    vocab_size = len(json.loads(bpe.read_text())["model"]["vocab"])
    said = (f"give the scripts --data {tmp_path}/tokens/train.bin --token-dtype uint16 "
            f"--vocab-size {vocab_size}; ")
    assert output.splitlines()[-1].startswith(said)
    dataset = TokenDataset(str(tmp_path / "tokens/train.bin"), 16, "uint16", vocab_size)
    assert f"train.bin: {len(dataset.tokens):,} tokens" in output
    parts = [write_jsonl(tmp_path / f"{i}.json{'l' * (i > 0)}", documents[::-1][i::7])
             for i in range(7)]
    *sides, _ = run_prepare(*parts, "--val", 0.2, out="parts")
    assert [set(side) for side in sides] == [set(train), set(validation)]


def test_what_is_a_document_in_text_files(run_prepare, tmp_path, monkeypatch):
    """The whole file; only a block that goes to val.bin divides it."""
    monkeypatch.setattr(prepare.read_texts, "__defaults__", (2**8,))
    short, long = tmp_path / "a.txt", tmp_path / "b.txt"
    short.write_bytes(b"\xef\xbb\xbfone\r\ntwo")  # a byte-order mark is no text
    lines = [*(f"猫 {i:07}\n" for i in range(100)), "🦊" * 2**10]
    long.write_text("".join(lines))
    train, _, output = run_prepare(short, long, "--val", 0)
    assert train == ["one\r\ntwo", "".join(lines)] and "has the </s> that the token" in output
    train, validation, output = run_prepare(short, long, "--val", 0.5, "--bos", "</s>", out="bos")
    assert "the tokenizer itself adds" not in output
    blocks = train[1::2], validation[1::2]  # each document begins and ends with a token
    assert not any(train[::2]) and not any(validation[::2]) and all(map(len, blocks))
    assert sum(map(len, map("".join, blocks))) == len("one\r\ntwo" + "".join(lines))
    assert all(block.endswith("\n") or block in "".join(lines) for block in blocks[1])


def test_bad_lines_can_be_left_out(run_prepare, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": null}\n{"text": "\\ud83d"}\n{"text": "\xff"}\n{\n'
                     b'[1]\n{"text": "b"}')
    train, _, output = run_prepare(path, "--val", 0, "--skip-bad-lines")
    assert train == ["a", "b"] and "left out: 5 bad lines" in output
    with pytest.raises(SettingError, match="a.jsonl.gz is compressed: unpack it first"):
        next(prepare.read_texts("a.jsonl.gz", None, None))


def the_line(main, words):
    """The one line with which a tool ends, from a SettingError."""
    with pytest.raises(SystemExit) as end:
        command.run(main, [str(word) for word in words])
    (line,) = end.value.code.splitlines()
    return line


@pytest.mark.parametrize("text, words, said", table(r"""
b'{"text": "good"}\n\n{' | | bad.jsonl, line 3 is not
b'{"text": "good"}\n[1]' | | bad.jsonl, line 2 is not
b'{"text": "good"}\n{"body": "x"}' | | bad.jsonl, line 2 is not
b'{"text": "\xff"}' | | bad.jsonl, line 1 is not
b'{"text": "x"}' | --tokenizer {} | bad.jsonl is no tokenizer.json (
b'\xff\xfe{\0}\0' | | line 1 is not {"text": "..."} in UTF-8 (
b'{"text": null}' | | write each line so, or leave such out by --skip-bad-lines
b' \n' | | bad.jsonl: no text
b'{"text": " "}' | | bad.jsonl: no text
b'{"text": "x"}' | --val 0.999999 | --val 0.999999: all documents are in val.bin
b'{"text": "x"}' | --val nan | --val nan:
b'{"text": "x"}' | --val 1 | --val 1.0:
b'{"text": "x"}' | --eod <eos> | --eod <eos>: the tokenizer has no such
b'{"text": "x"}' | --out {} | bad.jsonl exists
b'{"text": "x"}' | --bos <s> | --bos <s>: the tokenizer has no such
None | | No such file
"""))
def test_bad_input_of_prepare(bpe, tmp_path, text, words, said):
    """Each ends with one line that names the value, and leaves nothing."""
    bad = tmp_path / "bad.jsonl"
    if text != "None":
        bad.write_bytes(ast.literal_eval(text))
    line = the_line(prepare.main, [
        bad, "--tokenizer", bpe, "--out", tmp_path / "out", "--eod", "</s>",
        *words.format(bad).split()])
    assert said in line and list(tmp_path.iterdir()) == [bad] * bad.exists()
    assert len(line) < 200 + len(str(bad))


@pytest.mark.parametrize("tool, words, said", table("""
flatten | no.py | flatten.py: error: no.py is no script
flatten | folder | folder is no script
flatten | list.json | list.json is no script
flatten | broken.py | (broken.py, line 1)
flatten | bytes.py | 0xff in position 0: invalid start byte (bytes.py, line 1)
flatten | no_main.py | no_main.py has no function main
flatten | fsdp.py --no-such-option | unrecognized arguments: --no-such-option
dry_run | 1 folder | folder is no script
dry_run | --rank 0 1 broken.py | cannot be imported: SyntaxError
plan | --model tiny --devices 2 --seq-len 64 --device-memory 1 --only ddp.py --json no/plan.json
  | No such file or directory: 'no/plan.json'
bench | --only fsdp.py --trace no/trace.json | No such file or directory: 'no/trace.json'
export | folder out | folder is neither a checkpoint nor a run folder
export | run out | run is no checkpoint
import_hf | folder out | No such file or directory: 'folder/config.json'
import_hf | list.json out | list.json is no JSON file with an object
"""))
def test_a_wrong_path_is_one_line(tmp_path, monkeypatch, capsys, tool, words, said):
    """It names the path."""
    monkeypatch.chdir(tmp_path)
    for folder in "folder", "run":
        (tmp_path / folder).mkdir()
    for name in "list.json", "run/run.json":
        (tmp_path / name).write_text("[]")
    (tmp_path / "broken.py").write_text("def main(:")
    (tmp_path / "bytes.py").write_bytes(b'def main(): "\xff"')
    (tmp_path / "no_main.py").touch()
    tool = importlib.import_module(TOOLS[tool])
    assert said in the_line(tool.main, words.split())
    assert not (tmp_path / "out").exists() and "Traceback" not in capsys.readouterr().err


def test_flatten_finds_a_script_of_this_repository(tmp_path, monkeypatch, capsys):
    """As other tools do, from another folder."""
    monkeypatch.chdir(tmp_path)
    flatten.main(["fsdp.py"])
    assert capsys.readouterr().out == flatten.flatten(command.ROOT / "fsdp.py")


# The benchmark


@pytest.mark.parametrize("words, said", table("""
--no-such-option | unrecognized arguments: --no-such-option
--only fsdp.py --cpu-offload | unrecognized arguments: --cpu-offload
--hidden-size 60 | num_attention_heads 8 does not divide hidden_size 60
--steps=9 | --steps is the sum of --warm-up and --timed
--only no.py | no.py is no script
--trace trace.json | give a name that ends in .json, and --only SCRIPT
"""))
def test_what_a_benchmark_refuses(monkeypatch, words, said):
    """Before its first round."""
    monkeypatch.setattr(bench, "measure", None)
    assert said in the_line(bench.main, ["--nproc", "2", *words.split()])


@thorough
def test_the_benchmark_runs(tmp_path):
    """A script of one process, one of two, and a copy. It leaves no file. What fails says so in a
    line; Ctrl-C ends it."""
    def bench(words):
        return start([*RUN, "bench", "--nproc", 2, "--rounds", 1, "--warm-up", 1, "--timed", 1,
                      *words.split()], tmp_path, TMPDIR=str(tmp_path))

    (tmp_path / "my.py").write_text((command.ROOT / "ddp.py").read_text())
    output = finish(bench("--only single.py tp.py my.py --vocab-size 512 --seq-len 32"))
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["| `single.py`", "| `tp.py`", "| `my.py`"], output
    assert all(float(row[2].split()[0]) > 0 for row in rows)
    (tmp_path / "my.py").unlink()
    output = finish(bench("--only ddp.py --batch-size 3"))
    assert "ddp.py failed: " in output.splitlines()[-1]
    assert "--batch-size 3 cannot be shared evenly by 2" in output.splitlines()[-1]
    assert {path.name[:14] for path in tmp_path.iterdir()} <= {"torchinductor_"}  # torch's cache
    process = bench("--only single.py")
    while "timed steps; --vocab-size 32000" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process).splitlines()[-1] == "bench.py: error: stopped"
    finish(bench("--only ddp.py --vocab-size 512 --seq-len 32 --trace trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("all_reduce" in event.get("name", "") for event in events)
