"""Promises 4 and 5: checkpoints hold all of a run, and nothing is lost."""

import datetime
import os
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from common.data import BatchSampler
from common.errors import SettingError
from common.services import checkpoint, checkpoint_files
from common.services.checkpoint import Checkpoints
from common.services.ddp_buckets import arrange_buckets
from tests.support.on_ranks import on_ranks
from tests.support.processes import SMALL


def tensors(folder, step=8):
    """All tensors of a checkpoint: weights and optimizer states."""
    return checkpoint_files.read(folder / f"step-{step:08d}", prefix="")


def assert_bit_equal(found, expected):
    assert found.keys() == expected.keys() and len(found) > 60
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def steps(folder):
    """Of the complete checkpoints in a run folder."""
    return [checkpoint_files.step_of(path) for path in checkpoint_files.list_checkpoints(folder)]


# On several ranks


def checkpoints_of(folder, tensors, optimizer=None, must=None, may=None, **options):
    """``tensors``: a dict of them, or a model."""
    if isinstance(tensors, nn.Module):
        tensors = tensors.state_dict(keep_vars=True)
    trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
    return Checkpoints(folder, (must or {}, may or {}), tensors,
                       optimizer or torch.optim.SGD(trained, 0.1, 0.9), **{"stop": 9, **options})


@on_ranks(4)
def test_all_ranks_hear_of_a_late_signal(folder, rank):
    """In the next step: who is early waits for the vote of all."""
    checkpoints = checkpoints_of(folder, {"weight": nn.Parameter(torch.zeros(2))}, every=0)
    with mock.patch.object(checkpoint, "stop_requested", return_value=rank == 3):
        for step in range(2):
            time.sleep(0.3 * (rank == 3))
            checkpoints.after_step(step, 1.0)
    assert checkpoints.stopping


@on_ranks(4)
def test_buffers_agree(folder, rank):
    """Buffers that differ are saved as the first rank that holds them has them, whatever their
    type. Ranks 0 and 1 hold other buffers than ranks 2 and 3, as stages of a pipeline do."""
    stage, types = rank // 2, [torch.bfloat16, torch.bool, torch.complex64, torch.int64]
    tensors = {f"stage{stage}.{dtype}": torch.full((2, 3), 10 * (rank % 2) + 1).to(dtype).T
               for dtype in types}
    tensors |= {"everywhere": torch.full((), float(rank))}
    module = nn.Module()
    for i, tensor in enumerate(tensors.values()):
        module.register_buffer(str(i), tensor)
    tensors |= {"weight": nn.Parameter(torch.zeros(2))}
    checkpoints = checkpoints_of(folder, tensors)
    checkpoints.resume()
    checkpoints.save(1)
    assert tensors["everywhere"] == 0  # this run goes on with what a resumed run starts from
    found = checkpoint_files.read(folder / "step-00000001")
    assert len(found) == 10 and found["everywhere"] == 0
    for dtype in types:
        for stage in (0, 1):
            assert found[f"stage{stage}.{dtype}"].equal(torch.full((3, 2), 1).to(dtype))


@on_ranks(2)
def test_an_average_of_sharded_weights(folder, mesh):
    """It is sharded as they are, and saved whole, beside them. Of one number rank 1 has nothing."""
    weight, scale = (nn.Parameter(distribute_tensor(x, mesh, [Shard(0)]))
                     for x in (torch.arange(5.0), torch.ones(1)))
    checkpoints = checkpoints_of(
        folder, {"weight": weight, "scale": scale, "ema": weight.detach() / 2})
    checkpoints.resume()
    checkpoints.save(1)
    average = torch.zeros_like(weight).detach()
    tensors = {"weight": weight, "scale": scale, "ema": average}
    assert checkpoints_of(folder, tensors).resume() == 1
    assert average.full_tensor().tolist() == [0, 0.5, 1, 1.5, 2]


@on_ranks(2)
def test_a_part_that_would_be_saved_as_the_whole_is_refused(folder, rank):
    """An average of the rows of a rank, as a plain tensor: rank 0's rows would be saved alone."""
    weight, other = nn.Parameter(torch.ones(2)), torch.tensor([[1.0], [1.0 + rank]]).T
    for name, tensor in {"ema": other, "bits": other > 1, "copy": nn.Parameter(other[0])}.items():
        tensors = {"weight": weight, "same": torch.ones(3), name: tensor}
        checkpoints = checkpoints_of(folder, tensors)
        checkpoints.resume()
        with pytest.raises(SettingError, match=f"model.{name} has other values on rank 1 than on "
                                               f"rank 0.* make it a DTensor"):
            checkpoints.save(1)
        assert torch.equal(tensor, tensors[name]) and not (folder / "step-00000001").exists()
    tensor.data.fill_(2.0)
    checkpoints.save(1)


@on_ranks(2)
def test_ranks_that_differ(folder, rank):
    """In settings, also in those that may change in a run; each with a folder of its own."""
    weight = {"weight": nn.Parameter(torch.ones(2))}
    for kind in ("must", "may"):
        with pytest.raises(SettingError, match="n_layer is 2 on rank 0 and 3 on rank 1"):
            checkpoints_of(folder, weight, **{kind: {"n_layer": 2 + rank}}).resume()
    with mock.patch.object(checkpoint.distributed_c10d, "default_pg_timeout",
                           datetime.timedelta(seconds=1)), \
            pytest.raises(SettingError, match="is not one folder for all machines"):
        checkpoints_of(folder / str(rank), weight).resume()  # it waits half of a second
    assert checkpoints_of(folder / str(rank), weight, every=0).resume() == 0  # it saves nothing


@on_ranks(2)
def test_each_file_has_one_writer(folder, rank):
    """Also after each rank has saved the same tensors alone. One rank compares its hash."""
    def of_all_ranks(names):
        return [name for own in checkpoint.gather(names, dist.group.WORLD) for name in own]

    weight = nn.Parameter(torch.zeros(2))
    with mock.patch.object(dist, "is_initialized", lambda: False):
        alone = checkpoints_of(folder / str(rank), {"weight": weight})
        alone.resume()
        alone.save(1)
    writers, checkpoints = [], checkpoints_of(folder / "both", {"weight": weight})
    checkpoints.resume()
    with mock.patch.object(checkpoint, "HashingWriter", side_effect=lambda path: (
            writers.append(checkpoint_files.HashingWriter(path)) or writers[-1])), \
            mock.patch.object(checkpoint, "complete", side_effect=lambda path, *sums, **run: (
                path.name.endswith(".tmp") and checkpoint_files.complete(path, *sums, **run))):
        checkpoints.save(1)  # it gets its name at the end
    (written,) = of_all_ranks(list(writers[0].sums))
    with mock.patch.object(checkpoint_files, "hash_of", wraps=checkpoint_files.hash_of) as hash_of:
        checkpoints_of(folder / "both", {"weight": weight}).resume()
    assert of_all_ranks([call.args[0].name for call in hash_of.call_args_list]).count(written) == 1


@on_ranks(2)
def test_what_must_not_be_saved(folder, rank):
    """What only one rank can know is an error on all, and leaves the checkpoint before it. The
    infinity of a mask is saved."""
    weight, mask = nn.Parameter(torch.zeros(2)), torch.tensor([0.0, float("-inf")])
    optimizer = torch.optim.SGD([weight])
    checkpoints = checkpoints_of(folder, {"weight": weight, "mask": mask}, optimizer)
    checkpoints.resume()
    checkpoints.save(1)
    assert checkpoint_files.read(folder / "step-00000001")["mask"].equal(mask)
    for value, momentum, norm, message in [
        (float("inf"), None, 1.0, "step 2 is not saved, since model.weight is not finite: lower"),
        (0.0, torch.tensor([1.0, float("nan")]), 1.0, "weight.momentum_buffer is not finite"),
        (0.0, 3, 1.0, "momentum_buffer of the optimizer is 3, and checkpoints hold tensors only"),
        (0.0, None, float("nan"), "a gradient norm is not finite"),
    ]:
        if rank == 1:
            nn.init.constant_(weight, value)
            optimizer.state[weight] = {} if momentum is None else {"momentum_buffer": momentum}
        for norm_of_step in (norm if rank == 1 else 1.0, 1.0):  # two steps that are not saved
            checkpoints.after_step(5, norm_of_step)
        with pytest.raises(SettingError, match=message):
            checkpoints.save(2)
    checkpoints.finish()
    assert {path.name for path in folder.iterdir()} == {"step-00000001", "lock", "run-id"}


@on_ranks(2)
def test_rank_0_decides(folder, rank):
    """Rank 1 sees another newest checkpoint than rank 0, as on a network file system: both load
    what rank 0 sees."""
    weight = nn.Parameter(torch.zeros(2))
    first = checkpoints_of(folder, {"weight": weight}, keep=9)
    first.resume()
    for step in (1, 2, 3):
        nn.init.constant_(weight, step)
        first.save(step)
    listed = checkpoint.list_checkpoints
    with mock.patch.object(checkpoint, "list_checkpoints",
                           lambda folder: listed(folder)[: -1 if rank == 1 else None]):
        nn.init.zeros_(weight)
        assert checkpoints_of(folder, {"weight": weight}).resume() == 3 and (weight == 3).all()


# Checkpoints of other models, taken alone


def small():
    return nn.ModuleDict({"linear": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)})


def test_imported_weights_are_a_checkpoint_of_step_0(tmp_path):
    """Only the settings that it has are compared; it is never removed; --from returns to it."""
    imported, model = small(), small()
    checkpoints = checkpoints_of(tmp_path, imported, must={"size": 4})
    checkpoints.resume()
    checkpoints.save(0)
    settings = {"size": 4, "--seed": 1}
    checkpoints = checkpoints_of(tmp_path, model, must=settings, keep=1)
    assert checkpoints.resume() == 0
    assert all(map(torch.equal, model.state_dict().values(), imported.state_dict().values()))
    for step in (1, 2):
        checkpoints.save(step)
    assert steps(tmp_path) == [0, 2]
    assert checkpoints_of(tmp_path, small(), must=settings).resume() == 2
    model, first = small(), str(tmp_path / "step-00000000")
    assert checkpoints_of(tmp_path / "new", model, must=settings).resume(first) == 0
    assert all(map(torch.equal, model.state_dict().values(), imported.state_dict().values()))
    with pytest.raises(SettingError, match="size is 4 in .*step-00000000 and 5 .* --model"):
        checkpoints_of(tmp_path / "other", small(), must={"size": 5}).resume(first)


def test_a_checkpoint_of_another_run(tmp_path):
    adam, sgd, model = torch.optim.AdamW, torch.optim.SGD, small()
    checkpoints = checkpoints_of(tmp_path, model, adam(model.parameters()), {"sizes": (1, 2)})
    assert checkpoints.resume() == 0
    checkpoints.save(1)
    fewer = small()
    fewer.linear.bias = fewer.norm.running_var = None
    more = nn.ModuleDict({"linear": nn.Linear(4, 4), "x": nn.Linear(1, 1)})
    larger = nn.ModuleDict({"linear": nn.Linear(4, 5)})
    for other, optimizer, last, message in [
        (model, adam(model.parameters()), 3, "sizes is .1, 2. in .* and .1, 3. in"),
        (model, adam(model.parameters(), amsgrad=True), 2, "amsgrad is False in .* and True in"),
        (model, sgd(model.parameters()), 2, "the optimizer is AdamW in .* and SGD in this run"),
        (fewer, adam(fewer.parameters()), 2, "no rank of this .* linear.bias, norm.running_var"),
        (more, adam(more.parameters()), 2, "x.weight has shape .1, 1. here and none there"),
        (larger, adam(larger.parameters()), 2, "linear.weight has shape .5, 4. here and .4, 4."),
        # Tensors and optimizers that do not belong together
        (model, sgd(model.linear.parameters()), 2, "norm.weight is trained, but by none of the"),
        (model.norm, sgd(model.parameters()), 2, "a parameter of shape .4, 4. that is not among"),
    ]:
        with pytest.raises(SettingError, match=message):
            checkpoints_of(tmp_path, other, optimizer, {"sizes": (1, last)}).resume()


def test_options_of_the_optimizer(tmp_path, capsys):
    """Of all groups of parameters. What decides which states there are stays as it is."""
    def resume(name, *groups, **options):
        groups = [{"params": part.parameters(), **group}
                  for part, group in zip(model.values(), groups)]
        checkpoints = checkpoints_of(tmp_path / name, model,
                                     getattr(torch.optim, name)(groups, **options))
        if checkpoints.resume() == 0:
            checkpoints.save(1)

    model = small()
    for decays in (0.1, 0.0), (0.1, 0.2):
        resume("AdamW", *({"weight_decay": decay} for decay in decays))
    assert "weight_decay was [0.1, 0.0], is [0.1, 0.2]" in capsys.readouterr().out
    resume("RMSprop", {}, {})
    with pytest.raises(SettingError, match="centered is False in .* and True in"):
        resume("RMSprop", {}, {}, centered=True)


def test_the_lock_is_held_while_the_run_lasts(run, corpus, tmp_path):
    checkpoints = checkpoints_of(tmp_path / "out", small())
    checkpoints.resume()
    result = run("single.py", 0, f"{SMALL} --data {corpus}", expect_ok=False,
                 inject="time.sleep = lambda _: None")
    assert f"out is in use by process {os.getpid()} on " in result.output and not result.ok


def test_a_save_in_the_background(tmp_path, monkeypatch):
    """It has the weights of its step, however late it begins, is complete after ``finish``, and
    needs no GPU: DCP would copy ahead on a stream of the thread's GPU, which is GPU 0 on every
    rank. The last step of a run is saved too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(torch.distributed.checkpoint.filesystem, "_OverlappingCpuLoader")
    model, copies = nn.Linear(7, 11, bias=False), []
    checkpoints = checkpoints_of(tmp_path, model, every=2, in_background=True, stop=3)
    checkpoints.resume()
    for step in range(3):
        late = threading.Event()
        checkpoints.background.submit(late.wait)
        nn.init.constant_(model.weight, step + 1)
        checkpoints.after_step(step, 1.0)
        copies.append(checkpoints.staged.get("model.weight"))
        nn.init.constant_(model.weight, 9)
        late.set()
    late.clear()
    checkpoints.background.submit(lambda: (time.sleep(0.1), late.set()))
    checkpoints.finish()
    checkpoints.finish()
    assert late.is_set() and copies[1] is copies[2] is not None  # no memory is allocated again
    assert steps(tmp_path) == [2, 3]
    for step in (2, 3):
        found = checkpoint_files.read(tmp_path / f"step-0000000{step}")["weight"]
        assert torch.equal(found, torch.full((11, 7), float(step)))


@on_ranks(2)
def test_buckets_are_arranged_without_a_trace():
    """Buffers and the random state of DDP are afterwards as before. It takes a micro-batch."""
    model, shapes = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)), []
    model[0].register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    sampler = BatchSampler(9, 8, 2, world_size=2)
    state, before = torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
    for unused in (False, True):
        replica = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
        arrange_buckets(replica, sampler, torch.ones(3))
        model.unused = nn.LayerNorm(1)
        model.forward = lambda x: model[:3](x)
    for sample in (torch.ones(3),), {"x": torch.ones(3)}:
        arrange_buckets(replica, sampler, sample)
    model.forward = lambda x, y=None: model[:3](x["deep"])
    arrange_buckets(replica, sampler, {"deep": torch.ones(3)})
    arrange_buckets(replica, sampler, {"x": {"deep": torch.ones(3)}, "y": "text"})
    model.forward = lambda x, y: None
    with pytest.raises(SettingError, match=r"takes \(x, y\), and a sample is a dict of \['a'\]"):
        arrange_buckets(replica, sampler, {"a": torch.ones(3)})
    assert torch.equal(torch.get_rng_state(), state) and set(shapes) == {(2, 3)}, shapes
    assert all(map(torch.equal, model.buffers(), before))
