"""tools/prepare.py and tools/bench.py; and what every tool says of a path that is wrong."""

import ast
import importlib
import json
import re

import numpy as np
import pytest

from common.data import TokenDataset
from tests.support.processes import SMALL, TOOLS
from tests.support.sample import needs, rows
from tools import command, prepare


def write_tokenizer(path, largest):
    """A byte-level tokenizer.json, which any text goes through without loss, of ids up to
    ``largest``."""
    tokenizers = needs("tokenizers")
    tokens = sorted([*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "</s>"])
    vocabulary = dict(zip(tokens, range(largest - 256, largest + 1)))
    tokenizer = tokenizers.ByteLevelBPETokenizer(vocabulary, [])
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.enable_truncation(5)  # files of real models may have such settings
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", vocabulary["</s>"])])
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", 256)


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


@rows("largest, dtype", """
65535 | uint16
65536 | uint32
""")
def test_the_largest_id_chooses_the_type(run_prepare, tmp_path, largest, dtype):
    """Even if a vocabulary has gaps, and so fewer tokens than ids."""
    path = write_tokenizer(tmp_path / "words.json", largest)
    (tmp_path / "a.txt").write_text("a b a b")
    *sides, output = run_prepare(tmp_path / "a.txt", "--val", 0, tokenizer=path, dtype=dtype)
    assert sides == [["a b a b"], []]
    assert f"--token-dtype {dtype} --vocab-size {largest + 1}" in output


def test_split_is_by_document(run_prepare, tmp_path):
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
    said = (f"give the scripts --data {tmp_path}/tokens/train.bin --token-dtype uint16 "
            f"--vocab-size 257; ")
    assert output.splitlines()[-1].startswith(said)
    dataset = TokenDataset(str(tmp_path / "tokens/train.bin"), 16, "uint16", 257)
    assert f"train.bin: {len(dataset.tokens):,} tokens" in output
    parts = [write_jsonl(tmp_path / f"{i}.json{'l' * (i > 0)}", documents[::-1][i::7])
             for i in range(7)]
    *sides, _ = run_prepare(*parts, "--val", 0.2, out="parts")
    assert [set(side) for side in sides] == [set(train), set(validation)]


def test_what_is_a_document_in_text_files(run_prepare, tmp_path):
    """The whole file, without a byte-order mark, between its tokens."""
    short, long = tmp_path / "a.txt", tmp_path / "b.txt"
    short.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    long.write_text("猫 🦊\n" * 2**10)
    assert run_prepare(short, long, "--val", 0)[:2] == (["one\r\ntwo", "猫 🦊\n" * 2**10], [])
    train, *_ = run_prepare(short, long, "--val", 0, "--bos", "</s>", out="bos")
    assert train == ["", "one\r\ntwo", "", "猫 🦊\n" * 2**10]  # each begins and ends with a token


def the_line(main, words):
    """The one line with which a tool ends, from a SettingError."""
    with pytest.raises(SystemExit) as end:
        command.run(main, [str(word) for word in words])
    (line,) = end.value.code.splitlines()
    return line


@rows("text, words, said", r"""
b'{"text": "good"}\n\n{' | | bad.jsonl, line 3 is not
b'{"text": "good"}\n[1]' | | bad.jsonl, line 2 is not
b'{"text": "good"}\n{"body": "x"}' | | bad.jsonl, line 2 is not
b'{"text": "\xff"}' | | bad.jsonl, line 1 is not
b'{"text": "x"}' | --tokenizer {} | bad.jsonl is no tokenizer.json (
b'\xff\xfe{\0}\0' | | line 1 is not {"text": "..."} in UTF-8 (
b'{"text": null}' | | line 1 is not
b'{"text": "\\ud83d"}' | | line 1 is not
b' \n' | | no document is in train.bin, 0 tokens in val.bin
b'{"text": " "}' | | no document is in train.bin
b'{"text": "x"}' | --val 0.999999 | no document is in train.bin, 2 tokens in val.bin: see --val
b'{"text": "x"}' | --val 1.5 | no document is in train.bin
b'{"text": "x"}' | --val 1 | no document is in train.bin
b'{"text": "x"}' | --eod <eos> | --eod <eos>: the tokenizer has no such
b'{"text": "x"}' | --out {} | bad.jsonl exists
b'{"text": "x"}' | --bos <s> | --bos <s>: the tokenizer has no such
None | | No such file
""")
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


@rows("tool, words, said", """
flatten | no.py | flatten.py: error: no.py is no script
flatten | folder | folder is no script
flatten | list.json | list.json is no script
flatten | broken.py | (broken.py, line 1)
flatten | bytes.py | 0xff in position 0: invalid start byte (bytes.py, line 1)
flatten | no_main.py | no_main.py has no function main
flatten | fsdp.py --no-such-option | unrecognized arguments: --no-such-option
dry_run | 1 folder | folder is no script
dry_run | --rank 0 1 broken.py | cannot be imported: SyntaxError
dry_run | --rank 0 4 nothing.py | nothing.py is no script
dry_run | --rank 0 4 tools/prepare.py | tools/prepare.py has no load_steps, Run
dry_run | 4 single.py | single.py is one process: its world size is 1
dry_run | --rank 0 4 run/mine.py | run/mine.py has a common/ of its own
plan | --model tiny --devices 2 --seq-len 64 --device-memory 1 --only ddp.py --json no/plan.json
  | No such file or directory: 'no/plan.json'
export | folder out | folder is neither a checkpoint nor a run folder
export | run out | run is no checkpoint
import_hf | folder out | No such file or directory: 'folder/config.json'
import_hf | list.json out | list.json is no JSON file with an object
""")
def test_a_wrong_path_is_one_line(tmp_path, monkeypatch, capsys, tool, words, said):
    """It names the path."""
    monkeypatch.chdir(tmp_path)
    for folder in "folder", "run/common":
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run/common/launch.py").touch()
    for name in "list.json", "run/run.json", "run/mine.py":
        (tmp_path / name).write_text("[]")
    (tmp_path / "broken.py").write_text("def main(:")
    (tmp_path / "bytes.py").write_bytes(b'def main(): "\xff"')
    (tmp_path / "no_main.py").touch()
    tool = importlib.import_module(TOOLS[tool])
    assert said in the_line(tool.main, words.split())
    assert not (tmp_path / "out").exists() and "Traceback" not in capsys.readouterr().err


# The benchmark


@rows("script, words, said", """
* fsdp.py | --steps 7 --trace {}/trace.json | seconds per step
single.py | --steps 7 | seconds per step
ddp.py | --steps 5 | ddp.py: error: 5 steps: the first 5 are a warm-up; raise --steps
ddp.py | --steps 7 --trace no/trace.json | error: --trace no/trace.json cannot be
fsdp.py | --steps 7 --out {}/out | error: --out: saves would count as steps; leave it out
no.py | | no.py is no script
""")
def test_what_a_benchmark_says(run, tmp_path, script, words, said):
    """Of a script of one process, or of two; a trace of its steps after the warm-up."""
    world = 0 if script == "single.py" else 2
    words = [script, *SMALL.split(), *words.format(tmp_path).split()]
    result = run("tools/bench.py", world, words, pass_out=False, expect_ok=False)
    *_, line = [line for line in result.lines if said in line]  # a bar may stand before one
    assert result.ok == (said == "seconds per step"), result.output
    if result.ok:
        rate, seconds = map(float, re.findall(r"\d[\d.]*", line.replace(",", ""))[:2])
        assert rate == pytest.approx(8 * 32 / seconds, rel=0.01)
    if "--trace" in words and result.ok:
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert sum("Optimizer.step" in event.get("name", "") for event in events) == 2
