"""The data: one order for every number of ranks, whose only state is the step."""

import collections
import json
import os
import random
import re
import sysconfig
import tracemalloc
import types

import numpy as np
import torch

from common.data import BatchSampler, Mixture, TokenDataset, fingerprint, load_steps, permute
from common.step import seed_step
from tests.support.compare import furthest
from tests.support.processes import SMALL
from tests.support.sample import rows
from tests.support.words import refused

SIZE, BATCH = 101, 48  # an epoch ends inside a batch


def mesh_of(rank, ranks):
    """As a DeviceMesh of one dimension says it to ``rank``."""
    return types.SimpleNamespace(shape=[ranks], size=lambda: ranks, get_coordinate=lambda: [rank])


def test_permutation_for_every_size():
    for size in (*range(1, 300), *range(300, 10_001, 397)):
        places = permute(np.arange(size), size, (0, size))
        assert (np.bincount(places, minlength=size) == 1).all(), size


def test_the_order_stays_as_it_is():
    """A run that an earlier version saved goes on in it. It looked random: each of the 24 orders of
    4 came about equally often, and long ones had no drift."""
    assert permute(np.arange(5), 1000, (3, 1)).tolist() == [894, 315, 61, 310, 646]
    assert permute(np.arange(4), 4, (0, 7)).tolist() == [0, 1, 3, 2]
    assert permute(np.arange(3), 100_000, (0, 0)).tolist() == [66405, 8829, 2654]
    mixture = Mixture([range(100), range(13)], [3, 1])
    assert mixture.order(np.arange(6), 3).tolist() == [48, 87, 103, 20, 4, 69]


def test_epochs():
    """Every sample once an epoch, whatever the batch; another order each time, the same by seed."""
    for size in (101, 7, 1, 96):
        order = np.ravel([*BatchSampler(size, BATCH, stop=15)])
        epochs = order[: 720 // size * size].reshape(-1, size)
        assert (np.sort(epochs) == np.arange(size)).all()
        assert size == 1 or len(np.unique(epochs, axis=0)) > len(epochs) // 2
    assert [*BatchSampler(size, BATCH, stop=1, seed=1)] != [*BatchSampler(size, BATCH, stop=1)]


def test_large_data_costs_what_small_data_costs(tmp_path):
    """A file of 8 TB, with holes, holds 10^12 samples: there is no list of them, nor of those of a
    mixture, and no walk to the middle. Each index and each sample is read alone."""
    next(iter(BatchSampler(10, BATCH, stop=1)))  # what numpy imports late does not count
    path, size = tmp_path / "tokens.bin", 10**12
    path.touch()
    os.truncate(path, 2 * 4 * size)
    with open(path, "ab") as file:
        np.uint16(7).tofile(file)  # the last target
    mixture = Mixture([range(size), range(10**11)], [10**9 + 7, 2**31 - 1])
    tracemalloc.start()
    dataset = TokenDataset(path, 4, "uint16")
    batch = next(iter(BatchSampler(len(dataset), BATCH, start=10**10, stop=10**10 + 1)))
    _, targets = dataset[size - 1]
    mixed = mixture.order(np.arange(10**10, 10**10 + 48), 0)
    assert tracemalloc.get_traced_memory()[1] < 10**5
    tracemalloc.stop()
    assert len(dataset) == size and targets.tolist() == [0, 0, 0, 7]
    assert len({*batch}) == BATCH and max(batch) > 10**11 and mixed.max() > 10**10


@rows("dtype, options", """
uint16 | {}
uint16 | {"vocab_size": 65536}
uint32 | {"vocab_size": 65537}
uint32 | {"token_dtype": "uint32"}
""")
def test_samples_are_windows_with_shifted_targets(tmp_path, dtype, options):
    """16 bits hold ids to 65,535."""
    np.arange(1000).astype(dtype).tofile(tmp_path / "tokens.bin")
    dataset = TokenDataset(tmp_path / "tokens.bin", 20, **json.loads(options))
    inputs, targets = dataset[48]
    assert len(dataset) == 49
    assert inputs.equal(torch.arange(960, 980)) and targets.equal(torch.arange(961, 981))


# A file, its bytes and the options, both in Python; the words
@rows("name, content, options, words", """
a.bin | b"" | {} | cannot mmap an empty file of uint16
a.bin | b"six by" | {"vocab_size": 2**17} | not a multiple .* of uint32; see --token-dtype
a.bin | b"text" | {} | holds 2 tokens: one sample of --seq-len 4 takes 5; give more
a.txt | b"text" | {} | holds 4 tokens
a.txt | "some text".encode("utf-16") | {} | is no text: .* unpack .*into a file NAME.bin
a.bin | np.arange(99).tobytes() | {"token_dtype": "uint16"}
  | every second id is 0: give another --token-dtype; .*uint16
a.bin | np.arange(99).tobytes() | {"token_dtype": "uint32"}
  | every second id is 0: give another --token-dtype; .*uint32
a.txt | b"some text" | {"vocab_size": 100} | holds token 115, beyond a vocabulary of 100:
nowhere | b"" | {} | no such file or folder .give one, or 'stdlib'
none/a.txt | b"" | {} | no such file or folder
""")
def test_what_cannot_be_read(tmp_path, monkeypatch, name, content, options, words):
    monkeypatch.chdir(tmp_path)
    if name.startswith("a."):
        (tmp_path / name).write_bytes(eval(content))
    with refused(f"--data {name}.*{words}"):
        TokenDataset(name, 4, **eval(options))[0]


FOLDERS = """data/a.txt: hello |data/b/c.txt: |data/b/d.txt: brave new |data/z.txt: world
data/.hidden: not this|data/.git/x: not this|lib/test/x.py: not this|lib/x.txt: not this
lib/site-packages/x.py: not this|lib/x.py: code"""


def test_a_folder_is_its_files_one_after_another(tmp_path, monkeypatch):
    for name, text in re.findall(r"([^|\n]*): ([^|\n]*)", FOLDERS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    dataset = TokenDataset(tmp_path / "data", 4)
    assert bytes(t for i in range(5) for t in dataset[i][0].tolist()) == b"hello brave new worl"
    assert bytes(dataset[4][1].tolist()) == b"orld" and len(dataset) == 5
    monkeypatch.setattr(sysconfig, "get_path", lambda _: f"{tmp_path}/lib")
    assert bytes(TokenDataset("stdlib", 3)[0][0].tolist()) == b"cod"


Point = collections.namedtuple("Point", "x y")


def test_any_structure_of_tensors(tmp_path):
    """A map-style dataset of dicts: lists, named tuples, text and bfloat16 in them."""
    dataset = [{"point": Point([torch.tensor(i)], torch.tensor(i).bfloat16()), "text": str(i)}
               for i in range(SIZE)]
    sampler = BatchSampler(SIZE, BATCH, 2, stop=1)
    ((_, (_, second)),) = load_steps(dataset, sampler, torch.device("meta"))
    assert second["point"].x[0].device.type == second["point"].y.device.type == "meta"
    assert len(second["text"]) == BATCH // 2
    dataset[2]["column"] = torch.eye(3)[:, 0]  # its numbers are not beside each other
    seen = fingerprint(dataset, "--data")
    dataset[0]["point"].y.fill_(9)
    assert seen != fingerprint(dataset, "--data") and seen["samples in --data"] == SIZE


class Drawing(torch.utils.data.Dataset):
    """A sample: its dataset, its index, and what it draws from each generator."""

    order = weights = "of its own"

    def __init__(self, name, size):
        self.name, self.size = name, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(torch.initial_seed())
        return torch.tensor([self.name, index, torch.randint(2**31, (), generator=own),
                             torch.randint(2**31, ()), np.random.randint(2**31),
                             random.getrandbits(31)])


def states():
    return [*map(str, (torch.get_rng_state(), np.random.get_state(), random.getstate()))]


def read_on(ranks, dataset, grad_accum=1, workers=0, start=0, stop=6):
    """The samples of the global batches, put together from all ranks: a tensor for each step."""
    steps = []
    for rank in range(ranks):
        sampler = BatchSampler(len(dataset), 12, grad_accum, start=start, stop=stop,
                               mesh=mesh_of(rank, ranks))
        seed_step(0, rank)
        before, loaded = states(), load_steps(dataset, sampler, torch.device("cpu"), workers)
        steps.append([torch.cat(batch) for _, batch in loaded])
        assert states() == before  # those of training
    return [torch.cat(parts).tolist() for parts in zip(*steps)]


@rows("dataset", """
Drawing(0, 31)
Mixture([Drawing(0, 31), Drawing(1, 5), Drawing(2, 100)], [3, 1, 2])
""")
def test_draws_follow_the_place(dataset):
    """On any number of ranks, with any accumulation and workers, and after a resume."""
    dataset = eval(dataset)
    expected = read_on(1, dataset)
    for ranks, grad_accum in (1, 2), (2, 3), (3, 2), (6, 1):
        assert read_on(ranks, dataset, grad_accum) == expected
    assert read_on(1, dataset, 2, workers=2) == read_on(2, dataset, 3, workers=1) == expected
    assert read_on(3, dataset, start=4) == read_on(1, dataset, workers=1, start=4) == expected[4:]
    drawn = [tuple(sample[2:]) for batch in expected for sample in batch]
    assert len({*drawn}) == len(drawn) == 72  # a sample that comes again draws anew


@rows("weights, sizes", """
[3, 1] | [7, 5]
[1, 1, 1] | [1, 2, 3]
[5] | [11]
[10, 3, 7, 1] | [4, 13, 100, 2]
[999, 1] | [12345, 3]
""")
def test_a_mixture_has_its_proportions(weights, sizes):
    """Exactly, in each block of sum(weights), which is shuffled; and after each block no sample of
    a dataset has come twice more than another one."""
    weights, sizes = json.loads(weights), json.loads(sizes)
    mixture, block = Mixture([*map(range, sizes)], weights), sum(weights)
    indices = mixture.order(np.arange(100 * block), 3)
    ends = np.cumsum(sizes)
    dataset = np.searchsorted(ends, indices, "right").reshape(-1, block)
    assert len(weights) == 1 or len(np.unique(dataset, axis=0)) > 3
    for k, size in enumerate(sizes):
        assert ((dataset == k).sum(1) == weights[k]).all()
        own = indices[dataset.ravel() == k] - ends[k] + size
        for blocks in 1, 37, 100:
            assert np.ptp(np.bincount(own[: blocks * weights[k]], minlength=size)) <= 1


@rows("weights, sizes", """
[3] | [7, 5]
[3, 1, 1] | [7, 5]
[3, 0] | [7, 5]
[0.75, 0.25] | [7, 5]
[3, -1] | [7, 5]
[3, 1] | [7, 0]
""")
def test_weights_that_do_not_fit(weights, sizes):
    words = f"weights {weights} of datasets of {sizes} samples: each needs samples, and a whole"
    with refused(re.escape(words)):
        Mixture([*map(range, json.loads(sizes))], json.loads(weights))


def test_samples_that_change_are_refused():
    """Those of a generator that the dataset keeps: no seed and no place decides them."""
    generator = np.random.default_rng(0)

    class Own(Drawing):
        def __getitem__(self, index):
            return torch.tensor([index, generator.integers(9)])

    with refused("samples of --data change .*: let them draw from torch"):
        fingerprint(Own(0, 40), "--data")


class OpenedLate(torch.utils.data.Dataset):
    """It opens its file when the first sample is read: so each worker has an offset of its own.
    """

    file = None

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(self.path, "rb")
        self.file.seek(index)
        return torch.tensor([*self.file.read(1)])


def test_no_worker_has_a_file_that_another_process_has_opened(tmp_path):
    (tmp_path / "data").write_bytes(bytes(SIZE))
    dataset = OpenedLate(tmp_path / "data")
    wrapped = torch.utils.data.Subset(dataset, range(9))
    found = fingerprint(wrapped, "--data", workers=2)
    assert dataset.file is None and found == fingerprint(wrapped, "--data")


def test_what_wraps_a_mixture_is_refused():
    """It would read by index, and lose the weights."""
    first, _ = torch.utils.data.random_split(Mixture([range(9), range(9)], [3, 1]), [9, 9])
    with refused("a Mixture is read by place alone.* wrap or split its datasets"):
        fingerprint(first, "--data")


TRAINING = f"{SMALL} --steps 6 --save-every 2 --log-every 1 --dtype float64"


def test_a_run_of_several_files(run, tmp_path, corpus):
    """Mixed by weights, it is the same on two ranks, and with other weights no resume; without
    weights all samples come equally often."""
    (tmp_path / "b.bin").write_bytes(np.arange(2000, dtype=np.uint16).tobytes())
    options = f"{TRAINING} --vocab-size 2048 --data {corpus} --data b.bin"
    expected = run("single.py", 0, f"{options} --weights 3 1")
    found = run("ddp.py", 2, f"{options} --weights 3 1", out="found")
    assert furthest(found.curve(), expected.curve()) < 1e-10
    for more, words in {"--weights 1 3": "step-00000006 and [1, 3] in this run",
                        "": "weights of --data is [3, 1] in ",
                        "--weights 3": "weights [3] of datasets of"}.items():
        other = run("single.py", 0, f"{options} {more} --steps 8", expect_ok=False)
        assert not other.ok and words in other.output
    run("single.py", 0, options, out="equally")
