"""The data: one order for every number of ranks, whose only state is the step."""

import argparse
import collections
import contextlib
import gzip
import os
import pathlib
import signal
import sysconfig
import tracemalloc

import numpy as np
import pytest
import torch

from common import data, torch_versions
from common.data import BatchSampler, load_batches, permute
from common.errors import SettingError
from common.tokens import TokenDataset, open_dataset
from common.services.settings import fingerprint

SIZE, BATCH = 101, 48  # an epoch ends inside a batch


def order(dp=1, grad_accum=1, start=0, stop=15, size=SIZE, **options):
    """The global batches of the steps, put together from all ranks: a list of lists."""
    ranks = [np.array(list(BatchSampler(size, BATCH, grad_accum, start=start, stop=stop, rank=rank,
                                        world_size=dp, **options))) for rank in range(dp)]
    return np.hstack([rank.reshape(stop - start, -1) for rank in ranks]).tolist()


def test_permutation_for_every_size():
    for size in [*range(1, 300), *range(300, 10_001, 397)]:
        places = permute(np.arange(size), size, (0, size))
        assert (np.bincount(places, minlength=size) == 1).all(), size


def test_permutation_looks_random():
    """Every one of the 24 orders of 4 comes about equally often; long ones have no drift."""
    orders = [tuple(permute(np.arange(4), 4, (0, epoch)).tolist()) for epoch in range(2400)]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24 and ((counts - 100) ** 2 / 100).sum() < 60  # chi-square, 23 degrees
    # The order stays as it is: a run that an earlier version saved goes on in it.
    assert permute(np.arange(5), 1000, (3, 1)).tolist() == [894, 315, 61, 310, 646]
    x = permute(np.arange(100_000), 100_000, (0, 0))
    assert abs(np.corrcoef(x, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 0.02


def test_global_batches_are_equal_in_order():
    """On any number of ranks, whatever the accumulation; and resuming gives the tail."""
    expected = order()
    for dp in (2, 3, 8):
        for grad_accum in (1, 2):
            assert order(dp, grad_accum) == expected
        for start in (1, 2, 3, 11):  # step 2 holds the end of the first epoch
            assert order(dp, start=start) == expected[start:]


def test_batches_that_cannot_be_shared_evenly():
    with pytest.raises(SettingError, match="3 data-parallel .*multiple of 3, such as 15 or 18"):
        BatchSampler(SIZE, 16, world_size=3)
    with pytest.raises(SettingError, match="3 accumulation steps: use a multiple of 6, such as 6"):
        BatchSampler(SIZE, 4, 3, world_size=2)


def test_epochs():
    """Every sample once an epoch, whatever the batch; another order each time, the same by seed."""
    for size in (101, 7, 1, 96):
        flat = [i for batch in order(size=size) for i in batch]
        epochs = [flat[i : i + size] for i in range(0, len(flat) - size + 1, size)]
        assert len(epochs) >= 3
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        if size > 1:
            assert len({tuple(epoch) for epoch in epochs}) > len(epochs) // 2
            other = [i for batch in order(size=size, seed=1) for i in batch][:size]
            assert other not in epochs[:2]


def test_replicas_are_equal():
    def rows(rank, **options):
        return list(BatchSampler(SIZE, BATCH, stop=5, rank=rank, **options))

    for rank in range(8):
        assert rows(rank, world_size=8, replication=2) == rows(rank // 2, world_size=4)
    with pytest.raises(SettingError, match="replication of 3 does not divide the world size 4"):
        rows(0, world_size=4, replication=3)


def test_large_data_costs_what_small_data_costs(tmp_path, monkeypatch):
    """A file of 8 TB, with holes, holds 10^12 samples: there is no list of them, and no walk to the
    middle. Each index is computed alone, and each sample is read alone."""
    next(iter(BatchSampler(10, BATCH)))  # what numpy imports late does not count
    asked, path = [], tmp_path / "tokens.bin"
    monkeypatch.setattr(data, "permute", lambda i, *rest: asked.append(len(i)) or permute(i, *rest))
    path.touch()
    for size, start in ((10**3, 10), (10**12, 10**10)):
        os.truncate(path, 2 * 4 * size)
        with open(path, "ab") as file:
            np.uint16(7).tofile(file)  # the last target
        tracemalloc.start()
        dataset = TokenDataset(path, 4, "uint16")
        batch = next(iter(BatchSampler(len(dataset), BATCH, start=start)))
        _, targets = dataset[size - 1]
        assert tracemalloc.get_traced_memory()[1] < 10**5
        tracemalloc.stop()
        assert asked == [BATCH] and len(set(batch)) == BATCH
        assert len(dataset) == size and targets.tolist() == [0, 0, 0, 7]
        asked.clear()
    assert max(batch) > 10**11


def test_samples_are_windows_with_shifted_targets(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    dataset = TokenDataset(tmp_path / "tokens.bin", 16)
    assert len(dataset) == 62 and len(TokenDataset(tmp_path / "tokens.bin", 20)) == 49
    inputs, targets = dataset[3]
    assert inputs.tolist() == list(range(48, 64)) and targets.tolist() == list(range(49, 65))
    assert dataset[61][1][-1] == 992
    tokens.astype(np.uint32).tofile(tmp_path / "wide.BIN")
    for vocabulary, name in (2**16, "tokens.bin"), (2**16 + 1, "wide.BIN"):  # 16 bits: to 65,535
        assert torch.equal(TokenDataset(tmp_path / name, 16, vocab_size=vocabulary)[3][0], inputs)
    assert torch.equal(TokenDataset(tmp_path / "wide.BIN", 16, "uint32")[3][0], inputs)


IDS = np.random.default_rng(0).zipf(1.2, 99_999) % 50_000  # as those of GPT-2
LONG = np.where(IDS < 30_000, IDS, IDS + 70_000)  # some are beyond 16 bits
MASKED = np.where(IDS % 50 == 7, -100, IDS)
HEADER = np.zeros(256, "int32")
HEADER[:3] = 20240520, 1, len(IDS)


@pytest.mark.parametrize("written, dtype, vocabulary, words", [
    (IDS.astype("uint16"), "auto", 50_257, ""), (IDS.astype("uint32"), "auto", 100_000, ""),
    (LONG.astype("uint32"), "auto", 128_256, ""), (IDS.astype("int32"), "uint32", 50_257, ""),
    # Short vocabularies, and padding at the start
    ((IDS % 5).astype("uint16"), "auto", 5, ""), ((IDS % 2).astype("uint16"), "auto", 2, ""),
    (np.repeat([7, 0, 9], [1, 99_999, 99]).astype("uint16"), "auto", 256, ""),
    *[(ids, dtype, vocabulary, f"seems to have ids in int64: .* write them in {fits}")
      for ids in (IDS, IDS % 256, LONG, MASKED) for dtype, vocabulary, fits in (
          ("auto", 50_257, "uint16"), ("auto", 100_000, "uint32"), ("uint32", 256, "uint16"))],
    *[(ids.astype("int32"), dtype, vocabulary, "in uint32, and not in uint16: .*-dtype uint32")
      for ids in (IDS, IDS % 256, LONG, MASKED)
      for dtype, vocabulary in (("auto", 50_257), ("uint16", 100_000))],
    (IDS.astype("uint16"), "auto", 100_000, "in uint16, and not in uint32: .*-dtype uint16"),
    (IDS.astype("uint16"), "uint32", 50_257, "in uint16, and not in uint32"),
])
def test_ids_of_another_type_are_refused(tmp_path, written, dtype, vocabulary, words):
    """Also if the type was named: the words say which one it seems to be."""
    written.tofile(tmp_path / "a.bin")
    refused = pytest.raises(SettingError, match=f"a.bin .*{words}")
    with refused if words else contextlib.nullcontext():
        inputs, _ = TokenDataset(tmp_path / "a.bin", 16, dtype, vocabulary)[0]
        assert inputs.tolist() == written[:16].tolist()


def test_files_of_other_tools_are_refused(tmp_path):
    """By their first bytes; one in a folder of others too."""
    IDS.astype("uint16").tofile(tmp_path / "a.bin")
    bad = tmp_path / "b.bin"
    for save, words in (
        (lambda: HEADER.tofile(bad), "b.bin has a header of llm.c .*20240520.*tail -c"),
        (lambda: bad.write_bytes((20240801).to_bytes(4, "little") * 9), "llm.c .* in uint32"),
        (lambda: np.save(open(bad, "wb"), IDS), "b.bin is a file of NumPy"),
        (lambda: torch.save(torch.from_numpy(IDS), bad), "b.bin is a zip file, which torch.save"),
        (lambda: bad.write_bytes(gzip.compress(IDS.tobytes())), "b.bin is compressed by gzip"),
    ):
        save()
        with pytest.raises(SettingError, match=words):
            TokenDataset(tmp_path, 16)


def test_what_is_no_text_is_refused(tmp_path):
    """A NumPy file, a compressed one, UTF-16, a checkpoint."""
    (tmp_path / "a.txt").write_text("text " * 99)
    TokenDataset(tmp_path, 4)
    for content in (np.arange(9, dtype=np.uint16).tobytes(), "text".encode("utf-16")):
        (tmp_path / "b").write_bytes(b"text" + content)
        with pytest.raises(SettingError, match="/b is no text: .*ends in .bin"):
            TokenDataset(tmp_path, 4)


def test_a_folder_is_its_files_one_after_another(tmp_path, monkeypatch):
    """A linked folder is read like any other, by the first of two links, and a loop ends. A run
    folder must be in none of them."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for name, text in (
        ("data/a.txt", "hello "), ("data/b/c.txt", ""), ("data/b/d.txt", "brave "),
        ("elsewhere/text", "new "), ("data/z.txt", "world"), ("data/.hidden", "not this"),
        ("data/.git/x", "not this"), ("lib/test/x.py", "not this"), ("lib/x.txt", "not this"),
        ("lib/site-packages/x.py", "not this"), ("lib/x.py", "code"), ("x.bin", 12 * "x"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for link in (data / "e", data / "f", elsewhere / "loop"):
        link.symlink_to(elsewhere)
    dataset = TokenDataset(data, 4)
    assert bytes(t for i in range(5) for t in dataset[i][0].tolist()) == b"hello brave new worl"
    assert bytes(dataset[4][1].tolist()) == b"orld" and dataset.tokens == 21
    args = argparse.Namespace(data=str(data), seq_len=4, token_dtype="auto", out=tmp_path / "out",
                              config=argparse.Namespace(vocab_size=256))
    open_dataset(args)
    for args.out in (data / "out", elsewhere / "runs" / "out"):
        with pytest.raises(SettingError, match="--out .* is inside --data"):
            open_dataset(args)
    args.data, args.seq_len, args.token_dtype = f"{tmp_path}/x.bin", 1, "uint32"
    args.out = tmp_path / "out"
    assert open_dataset(args).tokens == 3
    monkeypatch.setattr(sysconfig, "get_path", lambda _: f"{tmp_path}/lib")
    assert TokenDataset("stdlib", 1).tokens == len("code")
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (
        os.listdir(data / "none") if pathlib.Path(path).name == "b" else scandir(path)))
    with pytest.raises(SettingError, match="none cannot be read .No such file"):
        TokenDataset(data, 4)


def test_a_file_that_changes_is_not_read_on(tmp_path):
    """In place, in its size, or by another file of the same size and time."""
    path, new = tmp_path / "text", tmp_path / "new"
    for again in (
        lambda: path.write_bytes(bytes(1000)), lambda: os.truncate(path, 500),
        lambda: (new.write_bytes(bytes(1000)), os.utime(new, (0, 0)), os.replace(new, path)),
    ):
        path.write_bytes(b"x" * 1000)
        os.utime(path, (0, 0))
        dataset = TokenDataset(path, 16)
        assert bytes(dataset[3][0].tolist()) == b"x" * 16
        again()
        with pytest.raises(SettingError, match="text has changed since the run began: "):
            dataset[3]
    path.unlink()
    with pytest.raises(SettingError, match="text cannot be read .No such file"):
        dataset[3]


def test_any_structure_of_tensors_is_moved():
    """A map-style dataset of dicts: lists, named tuples and text in them."""
    Point = collections.namedtuple("Point", "x y")
    dataset = [{"list": [torch.tensor(i)], "point": Point(torch.tensor(i), 2.0), "text": str(i)}
               for i in range(SIZE)]
    (batch,) = load_batches(dataset, BatchSampler(SIZE, BATCH, stop=1), torch.device("meta"))
    assert batch["list"][0].device.type == batch["point"].x.device.type == "meta"
    assert isinstance(batch["point"], Point) and len(batch["text"]) == BATCH


class Stuck(list):
    def __getitem__(self, index):
        signal.pause()


def test_a_worker_that_stands_still(monkeypatch):
    monkeypatch.setattr(data, "LONG", 1)
    batches = load_batches(Stuck("ab"), BatchSampler(2, 1, stop=1), torch.device("cpu"), workers=1)
    with pytest.raises(RuntimeError, match="DataLoader timed out") as error:
        next(batches)
    assert torch_versions.is_a_setting(error.value)


@pytest.mark.parametrize("workers, dataset, reason", [
    (0, [torch.zeros(2 + i % 2) for i in range(SIZE)], "RuntimeError: stack exp"),
    (1, [torch.zeros(2 + i % 2) for i in range(SIZE)], "RuntimeError: "),  # it cannot resize
    (0, [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}] * SIZE, "KeyError: "),
    (0, [None] * SIZE, "TypeError: "),
])
def test_samples_that_do_not_make_a_batch(workers, dataset, reason):
    batches = load_batches(dataset, BatchSampler(SIZE, BATCH, stop=1), torch.device("cpu"), workers)
    with pytest.raises(SettingError, match=f"do not make a batch .{reason}.*with -100"):
        next(batches)


def test_the_fingerprint_of_tokens_notices_one_sample_in_a_hundred(tmp_path):
    """Of 20,000 samples 200, anywhere: the same number of samples, the same first and last."""
    text = np.frombuffer(("seven wizards box " * 40_000).encode(), np.uint8)[: 20_000 * 32 + 1]
    other = text.copy()
    other[np.random.default_rng(1).choice(np.arange(1, 19_999), 200, replace=False) * 32 + 7] += 1
    text.tofile(tmp_path / "a")
    other.tofile(tmp_path / "b")
    (size, one), (same, two) = (fingerprint(TokenDataset(tmp_path / name, 32)).values()
                                for name in "ab")
    assert size == same == 20_000 and one != two
