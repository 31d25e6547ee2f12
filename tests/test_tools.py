"""tools/prepare.py and tools/plot.py."""

import json
import os
import random
import signal
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from common.data import TokenDataset
from tests.processes import ROOT
from tools import command, plot, prepare, text


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """The path of a byte-level tokenizer, which any text goes through without loss."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the lazy dog, the quick fox"] * 9, trainer)
    tokenizer.enable_truncation(5)  # files of real models may have such settings
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def run_prepare(bpe, tmp_path, capsys):
    """Runs the tool. Returns [documents of train.bin, documents of val.bin] in words, and what it
    printed."""
    tokenizers = pytest.importorskip("tokenizers")

    def run_prepare(*options, tokenizer=bpe, out="tokens", dtype="uint16"):
        folder = tmp_path / out
        words = [*options, "--tokenizer", tokenizer, "--out", folder]
        prepare.main([str(word) for word in words])
        loaded = tokenizers.Tokenizer.from_file(str(tokenizer))
        sides = []
        for name in ("train.bin", "val.bin"):
            path = folder / name
            ids = np.fromfile(path, dtype) if path.exists() else np.array([], int)
            (ends,) = np.nonzero(ids == loaded.token_to_id("</s>"))
            *parts, rest = np.split(ids, ends + 1)
            assert not len(rest)
            sides.append([loaded.decode(part[:-1].tolist(), skip_special_tokens=False)
                          for part in parts])
        return sides, capsys.readouterr().out

    return run_prepare


def write_jsonl(path, documents, field="text"):
    lines = (json.dumps({"id": 1, field: document}) + "\n" for document in documents)
    path.write_text("".join(lines))
    return path


def stories(number, seed=0):
    words = "the lazy dog quick fox näïve 猫 🦊 </s> \n \r\n  tab\t".split(" ")
    source = random.Random(seed)
    return [f"{i} " + " ".join(source.choices(words, k=source.randrange(1, 30)))
            for i in range(number)]


def test_tokens_are_those_of_the_text(run_prepare, bpe, tmp_path):
    """Whole documents in their order, with special tokens only between them; and the scripts' data
    reads them with the options that the tool prints."""
    documents = stories(50)
    path = write_jsonl(tmp_path / "a.jsonl", ["", *documents, ""])
    path.write_text(path.read_text() + "\n  \n")  # empty lines
    (train, validation), output = run_prepare(path, "--val", 0)
    assert train == documents and validation == []
    vocab_size = len(json.loads(bpe.read_text())["model"]["vocab"])
    assert output.splitlines()[-1] == (f"give the scripts --data {tmp_path}/tokens/train.bin "
                                       f"--token-dtype uint16 --vocab-size {vocab_size}")
    size = (tmp_path / "tokens/train.bin").stat().st_size // 2
    assert f"train.bin: {size:,} tokens in 50 documents" in output
    dataset = TokenDataset(str(tmp_path / "tokens/train.bin"), 16, "uint16", vocab_size)
    assert dataset.tokens == size
    ids = np.fromfile(tmp_path / "tokens/train.bin", "uint16").astype(int)
    assert dataset[1][0].tolist() == ids[16:32].tolist()
    assert dataset[1][1].tolist() == ids[17:33].tolist()


@pytest.mark.parametrize("largest, dtype", [(65535, "uint16"), (65536, "uint32")])
def test_the_largest_id_chooses_the_type(run_prepare, tmp_path, largest, dtype):
    """Even if a vocabulary has gaps, and so fewer tokens than ids."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 3, "b": largest, "?": 0, "</s>": 7}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("a b a b b " * 20)
    (train, _), output = run_prepare(
        tmp_path / "a.txt", "--val", 0, "--eod", "</s>", tokenizer=tmp_path / "words.json",
        dtype=dtype,
    )
    assert train == ["a b a b b" + " a b a b b" * 19]
    assert f"--token-dtype {dtype} --vocab-size {largest + 1}" in output
    dataset = TokenDataset(str(tmp_path / "tokens/train.bin"), 4, dtype, largest + 1)
    assert dataset[0][0].tolist() == [3, largest, 3, largest]


def test_split_is_by_document(run_prepare, tmp_path):
    """Disjoint and complete; the same in any order and in any files; equal documents together."""
    documents = stories(600)
    path = write_jsonl(tmp_path / "all.jsonl", documents + documents[:100])
    (train, validation), _ = run_prepare(path, "--val", 0.2)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(documents + documents[:100])
    assert 0.13 < len(validation) / 700 < 0.27
    (tmp_path / "parts").mkdir()
    for i in range(7):
        write_jsonl(tmp_path / f"parts/{i}.jsonl", documents[::-1][i::7], "body")
    sides, _ = run_prepare(tmp_path / "parts", "--val", 0.2, "--field", "body")
    assert [set(side) for side in sides] == [set(train), set(validation)]
    (_, more), _ = run_prepare(path, "--val", 0.4)
    assert set(validation) < set(more)
    first = {name: (tmp_path / "tokens" / name).read_bytes() for name in ("train.bin", "val.bin")}
    run_prepare(path, "--val", 0.4, out="again")
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}


def test_what_is_a_document_in_text_files(run_prepare, tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").write_text("no")
    (folder / "b.md").write_bytes(b"\xef\xbb\xbfone\r\ntwo")  # a byte-order mark is no text
    (folder / "sub/a.txt").write_text("x\n\ny\n\n\nz\n")
    assert run_prepare(folder, "--val", 0)[0][0] == ["one\r\ntwo", "x\n\ny\n\n\nz\n"]
    assert run_prepare(folder, "--val", 0, "--separator", "")[0][0] == [
        "one\r\ntwo", "x\n", "y\n", "z\n"
    ]
    monkeypatch.setattr(text, "PIECE", 10)
    lines = ["1234\n", "5678\n", "9\n", "a line longer than ten bytes\n", "猫🦊" * 9]
    (folder / "b.md").write_text("".join(lines))
    (train, _), _ = run_prepare(folder / "b.md", "--val", 0)
    assert train[0] == "1234\n5678\n" and train[1] == "9\n"
    assert "".join(train) == "".join(lines)
    assert all(len(document) <= 11 for document in train)
    long = write_jsonl(tmp_path / "a.jsonl", lines)  # these are never cut, but have a limit
    assert run_prepare(long, "--val", 0)[0][0] == lines
    monkeypatch.setattr(text, "LONGEST_LINE", 30)
    with pytest.raises(command.SettingError, match="a.jsonl, line 4: this must be a JSON object"):
        run_prepare(long)


def test_the_end_of_a_document(bpe):
    pytest.importorskip("tokenizers")
    assert [text.load_tokenizer(str(bpe), eod)[2] for eod in (None, "", "<pad>")] == [
        "</s>", "", "<pad>"
    ]


@pytest.mark.parametrize("name", ["a.txt", "one line.txt", "a.jsonl"])
def test_memory_does_not_grow(bpe, tmp_path, monkeypatch, name):
    """A file four times as long takes no more memory."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(text, "PIECE", 2**12)
    monkeypatch.setattr(text, "BATCH", 2**14)
    path, peaks = tmp_path / name, []
    for lines in (2000, 500, 2000):  # the first time only to import and to allocate what stays
        line = "the lazy dog " * 5 + ("" if name == "one line.txt" else "\n")
        if name == "a.jsonl":
            write_jsonl(path, [line] * lines)
        else:
            path.write_text(line * lines)
        tracemalloc.start()
        prepare.main([str(path), "--tokenizer", str(bpe), "--out", str(tmp_path / "out"),
                      "--val", "0"])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1]


KILLED = """
import os, pathlib, signal, sys

from tools import text
text.BATCH = 1
def texts():
    yield from ["the quick fox"] * 9
    os.kill(os.getpid(), signal.SIGKILL)
tokenizer, _, eod = text.load_tokenizer(sys.argv[1], None)
text.write_tokens(texts(), tokenizer, eod, "uint16", 0.5, pathlib.Path(sys.argv[2]))
"""


@pytest.mark.parametrize("before", [False, True])
def test_killed(bpe, tmp_path, before):
    """No half file has the name of a whole one, and an earlier output stays as it was."""
    pytest.importorskip("tokenizers")
    write_jsonl(tmp_path / "a.jsonl", stories(99))
    out, old = tmp_path / "out", {}
    if before:
        prepare.main([str(tmp_path / "a.jsonl"), "--tokenizer", str(bpe), "--out", str(out)])
        old = {path.name: path.read_bytes() for path in out.iterdir()}
        assert set(old) == {"train.bin", "val.bin"}
    killed = subprocess.run([sys.executable, "-c", KILLED, bpe, out], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    left = [path for path in out.iterdir() if not path.name.startswith(".")]
    assert {path.name: path.read_bytes() for path in left} == old
    assert len(list(out.iterdir())) == len(old) + 1


def test_failed(run_prepare, tmp_path, monkeypatch):
    """What cannot end leaves nothing; and a train.bin never stands beside an older val.bin."""
    good = write_jsonl(tmp_path / "good.jsonl", stories(99))
    run_prepare(good, "--val", 0.5)
    out = tmp_path / "tokens"
    old = {path.name: path.read_bytes() for path in out.iterdir()}
    write_jsonl(tmp_path / "bad.jsonl", [*stories(9), 3])
    with pytest.raises(command.SettingError):
        run_prepare(tmp_path / "bad.jsonl")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == old

    def rename_once(path, target):
        os.rename(path, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "rename", rename_once)
    with pytest.raises(KeyboardInterrupt):
        run_prepare(good, "--val", 0.4)
    assert [path.name for path in out.iterdir()] == ["val.bin"]


def test_nothing_for_validation(run_prepare, tmp_path):
    """The val.bin of an earlier run does not stay."""
    path = write_jsonl(tmp_path / "a.jsonl", stories(99))
    assert all(run_prepare(path, "--val", 0.5)[0])
    sides, output = run_prepare(path, "--val", 1e-9)
    assert len(sides[0]) == 99 and not (tmp_path / "tokens/val.bin").exists()
    assert "no document was drawn for val.bin" in output


def the_line(main, words):
    """The one line with which a tool ends, from a SettingError."""
    with pytest.raises(SystemExit) as end:
        command.run(main, [str(word) for word in words])
    assert isinstance(end.value.code, str) and "\n" not in end.value.code
    return end.value.code


BAD_LINES = {  # in a .jsonl file
    b"{": "JSONDecodeError", b"[1]": "TypeError", b'"text"': "TypeError", b"3": "TypeError",
    b'{"body": "x"}': "KeyError: 'text'", b'{"text": 3}': "AttributeError",
    b'{"text": null}': "AttributeError", b'{"text": "\\ud800"}': "surrogates not allowed",
    b"[" * 10**5: "RecursionError", b'{"text": "\xff"}': "not UTF-8 (invalid start byte)",
}


@pytest.mark.parametrize("line, words", BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_bad_lines(bpe, tmp_path, line, words):
    pytest.importorskip("tokenizers")
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line)
    found = the_line(prepare.main, [path, "--tokenizer", bpe, "--out", tmp_path / "out"])
    assert found.startswith(f"prepare.py: error: {path}, line 3: ") and words in found


def test_bad_input_of_prepare(bpe, tmp_path, monkeypatch):
    """Each ends with one line that names the value."""
    pytest.importorskip("tokenizers")
    folder = tmp_path / "folder"
    folder.mkdir()
    good = folder / "a.txt"
    good.write_text("one fox\n" * 99)
    (tmp_path / "old.bin").write_bytes(b"12")
    (tmp_path / "latin.txt").write_bytes("gut\nschön\n".encode("latin1"))
    (tmp_path / "half.txt").write_bytes("x\nschö".encode()[:-1])  # a download that broke off
    (tmp_path / "nothing").mkdir()
    (tmp_path / "link").symlink_to("nowhere")

    def line(*words, tokenizer=bpe, out=tmp_path / "out"):
        found = the_line(prepare.main, [*words, "--tokenizer", tokenizer, "--out", out])
        assert found.startswith("prepare.py: error: ")
        return found[len("prepare.py: error: "):]

    assert line(tmp_path / "none").startswith(f"{tmp_path}/none: no such file or folder")
    assert line(tmp_path / "link").startswith(f"{tmp_path}/link: no such file or folder")
    assert line(tmp_path / "old.bin").startswith(f"{tmp_path}/old.bin: a .bin file holds token ids")
    assert line(tmp_path / "latin.txt").startswith(f"{tmp_path}/latin.txt, line 2: this is not UTF")
    assert "half.txt, line 2: this is not UTF-8 (unexpected end" in line(tmp_path / "half.txt")
    assert "give more text" in line(tmp_path / "nothing")
    assert "none is left for train.bin" in line(good, "--val", 0.9999999)
    for share in ("1", "-0.1", "nan"):
        assert line(good, "--val", share).startswith(f"--val {float(share)} is not allowed")
    assert "argument --val: invalid float value: 'many'" in line(good, "--val", "many")
    found = line(good, "--eod", "<eos>")
    assert found.startswith("--eod <eos>: the tokenizer has no such token") and "</s>" in found
    for tokenizer in (good, folder, tmp_path / "none"):
        assert line(good, tokenizer=tokenizer).startswith(f"--tokenizer {tokenizer}: this is no")
    assert f"--out {good}: " in line(good, out=good)
    assert "cannot be written (File exists)" in line(good, out=good)
    assert "cannot be written (Not a directory)" in line(good, out=good / "out")
    if os.path.exists("/dev/full"):  # every write to it fails: the disk is full
        monkeypatch.setattr(text.pathlib, "Path", lambda *_: type(good)("/dev/full"))
        with pytest.raises(command.SettingError, match="No space left on device.*make room"):
            text.write_tokens(iter(["x"]), text.load_tokenizer(str(bpe), "")[0], "", "uint16", 0,
                              tmp_path / "out")
    monkeypatch.undo()
    assert "required: PATH, --tokenizer, --out" in the_line(prepare.main, [])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert line(good).endswith("python -m pip install tokenizers")


def test_the_tools_start_fast():
    """Without torch; and as commands, with a status."""
    code = "import sys, tools.prepare, tools.plot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    result = subprocess.run([sys.executable, "-m", "tools.plot", "/none"], cwd=ROOT,
                            capture_output=True, text=True)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("plot.py: error: /none/metrics.jsonl cannot be read (No such")
    assert result.stderr.count("\n") == 1


def write_run(folder, curve):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "loss": loss, "lr": 1.0}) + "\n" for step, loss in curve.items()
    ))
    return folder


def test_drawn_is_what_runs_wrote(tmp_path):
    pytest.importorskip("matplotlib")
    first = {1: 5.0, 10: 4.0, 20: 3.0, 30: 2.5}
    others = {"same": first, "near": {1: 5.0, 10: 4.0 + 2**-20, 20: 3.0, 30: 2.0},
              "$x_{$": {10: 4.5, 15: 7.0}}
    folders = [write_run(tmp_path / "first", first)]
    folders += [write_run(tmp_path / name, curve) for name, curve in others.items()]
    curves = {folder.name: plot.read_curve(folder) for folder in folders}
    assert curves == {"first": first, **others}
    apart = plot.differences(curves)
    assert apart == {
        "same": dict.fromkeys(first, 0.0), "near": {1: 0.0, 10: 2**-20, 20: 0.0, 30: 0.5},
        "$x_{$": {10: 0.5},
    }
    figure = plot.draw(curves, apart)
    figure.savefig(tmp_path / "curves.png")  # no name is read as a formula
    upper, lower = figure.axes
    drawn = [dict(zip(*line.get_data())) for line in upper.lines]
    assert drawn == list(curves.values())
    ticks = dict(zip((text.get_text() for text in lower.get_yticklabels()), lower.get_yticks()))
    floor = ticks.pop("equal")
    assert 0 < floor < 2**-20 and all(float(mark[5:-2]) == np.log10(tick)
                                      for mark, tick in ticks.items())
    shown = [dict(zip(*line.get_data())) for line in lower.lines]
    assert shown == [{step: size or floor for step, size in values.items()}
                     for values in apart.values()]
    assert lower.get_yscale() == "log" and upper.get_xlim() == lower.get_xlim()
    assert [text.get_text().replace("\\", "") for text in upper.get_legend().get_texts()] == [
        *curves
    ]
    for below, above in zip(lower.lines, upper.lines[1:]):
        assert below.get_color() == above.get_color()
    assert len({line.get_color() for line in upper.lines}) == 4


def test_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = [write_run(tmp_path / name / "ddp", {1: 3.0, 2: 2.0}) for name in ("a", "$b")]
    sizes = []
    for words in ([runs[0]], runs, [*runs, "--no-diff"]):
        out = tmp_path / "curves.png"
        plot.main([str(word) for word in [*words, "--out", out]])
        header = out.read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append(int.from_bytes(header[20:], "big"))
    assert sizes[0] == sizes[2] < sizes[1]  # the second has two panels
    assert capsys.readouterr().out.splitlines()[1] == f"{out}: {runs[0]}, {runs[1]}"
    # A run that writes its last line now, and one that diverged.
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": NaN}\n{"step": 4, "lo')
    plot.main([*map(str, runs), "--out", str(tmp_path / "curves.svg")])
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_bad_input_of_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    good = write_run(tmp_path / "good", {1: 3.0, 2: 2.0})
    other = write_run(tmp_path / "other", {3: 3.0})
    empty = write_run(tmp_path / "empty", {})

    def line(*words):
        found = the_line(plot.main, words)
        assert found.startswith("plot.py: error: ")
        return found[len("plot.py: error: "):]

    assert line(tmp_path).startswith(f"{tmp_path}/metrics.jsonl cannot be read (No such file")
    assert line(good, empty).startswith(f"{empty}/metrics.jsonl has no step yet")
    assert line(good, other).startswith("other and good have no step in common")
    assert "named twice" in line(good, good) and "at least two" in line(good, "--diff")
    assert line(good, "--out", tmp_path / "x.doc").startswith(f"--out {tmp_path}/x.doc cannot be")
    assert "No such file" in line(good, "--out", tmp_path / "none/x.png")
    assert "required: RUN" in line()
    for bad in ("{", "[]", '{"step": 1}', '{"step": 1, "loss": "x"}', '{"step": 1, "loss": null}'):
        broken = tmp_path / "broken"
        write_run(broken, {1: 2.0})
        with (broken / "metrics.jsonl").open("a") as file:
            file.write(f"{bad}\n")
        assert line(broken).startswith(f"{broken}/metrics.jsonl, line 2: this must be a JSON")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert line(good).endswith("python -m pip install matplotlib")
