"""Checkpoints that any script writes and any other reads, at any number of ranks.

A run folder holds ``step-00000100/`` for each of the newest checkpoints: the shards that
``torch.distributed.checkpoint`` (DCP) wrote, every rank its own part in parallel, and ``run.json``,
what must stay the same when the run goes on. Tensors are named after the model's parameters: ``model.NAME`` is the
weight, ``optimizer.NAME.exp_avg`` a state of its optimizer. How they were sharded when they were
saved does not matter when they are loaded.

A checkpoint is written under another name and renamed when all of it is on disk: what carries the
right name is complete. Loading runs no code that a file chose (see ``_SafeReader``).
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import re
import shutil
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

from common.errors import SettingError


class Checkpoints:
    """The checkpoints of one run.

    ``parameters`` maps each parameter's name to the tensor that ``optimizer`` updates, whole or a
    DTensor. All ranks call each method.
    """

    def __init__(self, args, sampler, parameters, optimizer):
        self.args, self.parameters, self.optimizer = args, parameters, optimizer
        self.run = _run(args, sampler)
        self.saving = None  # (future, temporary name, name) of a save that goes on meanwhile
        # Its collectives must not mix with those of training.
        self.group = dist.new_group(backend="gloo") if args.async_save and dist.is_initialized() else None

    def resume(self):
        """Make the run folder ready and load the newest complete checkpoint in it, if there is one.
        Returns the steps done: 0 for a new run. See ``load``.

        Raises:
            SettingError: the folder cannot be written, or its run has finished.
        """
        args = self.args
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=args.out):
                pass
            if _rank() == 0:
                for cut_short in [*args.out.glob("step-*.tmp"), *args.out.glob("step-*.old")]:
                    shutil.rmtree(cut_short)
                if not args.resume or not list_checkpoints(args.out):
                    _move_aside(args.out)
        except OSError as error:
            raise SettingError(
                f"--out {args.out} cannot be written ({error.strerror}): choose another folder"
            ) from None
        _barrier()
        found = list_checkpoints(args.out)
        if not found:
            return 0
        done = step_of(found[-1])
        if done >= args.steps:
            raise SettingError(
                f"{args.out} holds a run that has finished step {done}, and --steps is {args.steps}: "
                f"raise --steps to train on, or start anew with --no-resume or another --out"
            )
        load(found[-1], self.run, self.parameters, self.optimizer)
        return done

    def after_step(self, step):
        """Save if it is time to (see ``due``); call it at the end of every step."""
        if self.saving and self.saving[0].done():
            self.finish()
        if due(self.args, step):
            self.save(step + 1)

    def save(self, step):
        """Write the checkpoint after ``step`` steps, with ``--async-save`` in the background. Only the
        ``--keep`` newest remain."""
        self.finish()
        final = self.args.out / f"step-{step:08d}"
        temporary = final.with_suffix(".tmp")
        if _rank() == 0:
            temporary.mkdir()
            (temporary / "run.json").write_text(json.dumps(self.run, indent=1))
        _barrier()
        if not temporary.exists():
            raise SettingError(
                f"--out {self.args.out} is not one folder for all machines: choose a shared one"
            )
        tensors = _tensors(self.parameters, self.optimizer)
        writer = dcp.FileSystemWriter(temporary)
        with _in_words(step, self.args.out):
            if self.args.async_save:
                # DCP copies what is on a GPU to the host, and what is there by deepcopy: that fails for a
                # DTensor whose part begins inside a storage (its wrapper looks as if it had one of its own).
                tensors = {k: v.clone() if v.device.type == "cpu" else v for k, v in tensors.items()}
                future = dcp.async_save(tensors, storage_writer=writer, process_group=self.group)
                self.saving = future, temporary, final
            else:
                dcp.save(tensors, storage_writer=writer)
                self.publish(temporary, final)
        _barrier()

    def finish(self):
        """Wait for a save that goes on in the background: none is left behind at the end of a run."""
        if self.saving:
            (future, temporary, final), self.saving = self.saving, None
            with _in_words(step_of(final), self.args.out):
                future.result()
            self.publish(temporary, final)

    def publish(self, temporary, final):
        """Rank 0 gives a checkpoint that all ranks have written its name, and removes older ones."""
        if _rank() == 0:
            _flush_to_disk(temporary)
            temporary.rename(final)
            _flush_to_disk(self.args.out)
            for old in list_checkpoints(self.args.out)[: -self.args.keep]:
                # Renamed first: a removal that is cut short must not leave what looks complete.
                shutil.rmtree(old.rename(old.with_suffix(".old")))


def due(args, step):
    """Whether to save when ``step`` (from 0) is done: every ``--save-every`` steps, and the last."""
    return args.save_every > 0 and ((step + 1) % args.save_every == 0 or step + 1 == args.steps)


def list_checkpoints(folder):
    """The complete checkpoints of a run folder, oldest first."""
    found = [path for path in pathlib.Path(folder).glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint):
    return int(checkpoint.name.removeprefix("step-"))


@torch.no_grad()
def load(checkpoint, run, parameters, optimizer):
    """Load a checkpoint in place, into ``parameters`` and the states of ``optimizer``; see ``save``.

    Raises:
        SettingError: it was saved by another ``run`` or model, or is not to be trusted.
    """
    reader, stored, saved = _open(checkpoint)
    for key, value in run.items():
        if saved.get(key) != value:
            raise SettingError(
                f"{checkpoint} was saved with {key} {saved.get(key)}, this run has {value}: "
                f"go on with the same, or start anew with --no-resume or another --out"
            )
    for name, parameter in parameters.items():
        entry = stored.get(f"model.{name}")
        if entry is None or entry.size != parameter.shape:
            raise SettingError(
                f"{checkpoint} is of another model: {name} has shape {tuple(parameter.shape)} here and "
                f"{tuple(entry.size) if entry else 'none'} there"
            )
    _make_states(stored, parameters, optimizer)
    _load(_tensors(parameters, optimizer), reader)


def read(checkpoint, prefix="model."):
    """The tensors of a checkpoint whose names start with ``prefix``, whole, on the CPU, by the rest
    of their names: with the default, a ``state_dict`` of the model. One process is enough.

    Raises:
        SettingError: it is not a checkpoint, or not to be trusted.
    """
    reader, stored, _ = _open(pathlib.Path(checkpoint))
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items() if name.startswith(prefix)
    }
    _load(tensors, reader)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _open(checkpoint):
    """Returns DCP's reader, what it has stored under each name, and run.json."""
    try:
        saved = json.loads((checkpoint / "run.json").read_text())
        reader = _SafeReader(checkpoint)
        stored = reader.read_metadata().state_dict_metadata
    except (OSError, ValueError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise SettingError(f"{checkpoint} is not a checkpoint of these scripts: {error}") from None
    for name, entry in stored.items():
        if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
            raise SettingError(f"{checkpoint} is not to be trusted: {name} is not a tensor")
    return reader, stored, saved


def _load(tensors, reader):
    with warnings.catch_warnings():  # that a single process loads alone
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader)


@contextlib.contextmanager
def _in_words(step, out):
    """Around a save: without the warning that a process saves alone, and an error in words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except dcp.CheckpointException as error:  # raised on all ranks, though one failed
        rank, (cause, _) = next(iter(error.failures.items()))
        raise SettingError(
            f"the checkpoint of step {step} could not be written to {out} (rank {rank}: {cause}); "
            f"the ones before it are intact: make room and start again"
        ) from None


def _run(args, sampler):
    """What must not change between saving and loading: the model, and what orders the data, whose
    state is the step only as long as these are the same."""
    model = {f"--{k.replace('_', '-')}": v for k, v in dataclasses.asdict(args.config).items()}
    return model | {
        "--seed": sampler.seed,
        "--batch-size": sampler.batch_size,
        "--seq-len": args.seq_len,
        "a number of samples in --data of": sampler.size,
    }


def _tensors(parameters, optimizer):
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _make_states(stored, parameters, optimizer):
    """Make room for the optimizer states that are stored: an optimizer makes them at its first step."""
    for key, entry in stored.items():
        if key.startswith("optimizer."):
            name, state = key.removeprefix("optimizer.").rsplit(".", 1)
            if name in parameters:
                parameter = parameters[name]
                optimizer.state[parameter][state] = (
                    torch.zeros_like(parameter) if entry.size == parameter.shape
                    else torch.zeros(entry.size, dtype=entry.properties.dtype, device=parameter.device)
                )


class _SafeReader(dcp.FileSystemReader):
    """DCP's reader, but its index, a pickle, may name nothing but the classes that DCP writes.

    Tensors are read with ``weights_only=True`` by DCP itself; other values, which it unpickles, are
    refused by ``load``.
    """

    def read_metadata(self, *args, **kwargs):
        with (pathlib.Path(self.path) / ".metadata").open("rb") as file:
            return _MetadataUnpickler(file).load()


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        written_by_dcp = (
            (module == "torch.distributed.checkpoint.metadata" and name in _METADATA_CLASSES)
            or (module, name) in _OTHER_CLASSES
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        )
        if not written_by_dcp:
            raise pickle.UnpicklingError(f"its index asks for {module}.{name}, which DCP never writes")
        return super().find_class(module, name)


_METADATA_CLASSES = {
    "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
    "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
}
_OTHER_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def _move_aside(out):
    """Move an earlier run out of the way, into the first free ``previous-N`` of the folder."""
    earlier = [*out.glob("step-*"), *out.glob("*.json"), *out.glob("*.jsonl")]
    if earlier:
        number = 1
        while (out / f"previous-{number}").exists():
            number += 1
        (out / f"previous-{number}").mkdir()
        for path in earlier:
            path.rename(out / f"previous-{number}" / path.name)


def _flush_to_disk(folder):
    """Make the names in a folder survive a power cut (DCP flushes the files themselves)."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier():
    if dist.is_initialized():
        dist.barrier()
