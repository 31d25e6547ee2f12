"""Start-up and tear-down of a process, alone or as one of many."""

import functools
import os
import sys
import time
import traceback
import warnings

import torch
import torch.distributed as dist

from common.environment import pick_gloo_interface, rank_and_world_size
from common.errors import SettingError


def pick_device(args):
    """The device of this process: a GPU of its own, or the CPU."""
    if args.device == "cpu" or not torch.cuda.is_available():
        if args.device == "cuda":
            raise SettingError("--device cuda: torch finds no GPU here; use --device cpu")
        return torch.device("cpu")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= gpus:
        raise SettingError(
            f"LOCAL_RANK {local_rank} has no GPU, this machine has {gpus}: start at most {gpus} "
            f"processes here (--nproc_per_node={gpus}), or use --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def start_process(args):
    """Start-up of a script that is one process. Returns its device."""
    _, world_size = rank_and_world_size()
    if world_size > 1:
        raise SettingError(
            f"{args.script} is one process and was started as {world_size}: start it with plain "
            f"python, or take a script that shares the work, such as ddp.py"
        )
    return pick_device(args)


@functools.cache
def _store():
    """The key-value store through which the processes find each other.

    The store of torchrun's agent outlives its processes, and after a restart still holds the addresses
    of those that died: there, keys carry the number of the restart. Several agents may count differently,
    so run.sh gives the processes of each start a store of their own.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise SettingError(f"RANK is set but not {' and '.join(missing)}: launchers set all of them")
    store, _, _ = next(dist.rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def start_process_group(args):
    """Start-up of one process of many: NCCL for tensors on GPUs, gloo for those on CPUs. Returns the
    device of this process."""
    rank, world_size = rank_and_world_size()
    store = _store()  # first: where only some ranks fail, one of these can say why
    device = pick_device(args)
    if not dist.is_initialized():
        if rank == 0:
            store.set("device", device.type)
        elif (first := store.get("device").decode()) != device.type:  # they would wait for each other
            raise SettingError(
                f"rank {rank} is on {device.type} and rank 0 on {first}: mend the machine whose GPUs torch does not "
                f"find, or use --device cpu"
            )
        pick_gloo_interface()
        on_gpu = device.type == "cuda"
        if on_gpu:  # no user can act on these: a mesh splits gloo like NCCL, and pipelines send one by one
            warnings.filterwarnings("ignore", message="Tried to pass options to ProcessGroupGloo")
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=device if on_gpu else None,
        )
        dist.barrier()  # who ends before all are connected leaves the others with errors of their own
    return device


def launch(main):
    """Run ``main()`` and end the process: the last line of every script.

    A ``SettingError`` becomes one line on stderr. Of several processes that fail, one speaks, since
    the others mostly fail because it did.

    The process ends by ``os._exit``. An ordinary exit of a good run can abort or hang: a thread of
    gloo may still have to release a tensor, for which it needs the interpreter, which is being taken
    down. What Python would still have done by then, flushing, is done here. The process group is
    destroyed after ``main`` has returned and dropped what uses it.
    """
    status, failure = 1, None
    try:
        main()
        status = 0
    except SettingError as error:
        failure = f"{os.path.basename(sys.argv[0])}: error: {error}"
    except SystemExit as exit:  # --help
        status = exit.code or 0
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        failure = traceback.format_exc().rstrip()
    # From here on the frames of main are gone, and with them its progress bar and what it sent with.
    if failure:
        _report(failure)
    elif status == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _report(failure):
    """Print why this process fails, unless another has told why it does."""
    rank, world_size, failed = 0, 1, 0
    try:
        rank, world_size = rank_and_world_size()
        if _store.cache_info().currsize:
            failed = _store().add("failed", 1)
            first = failed == 1
        else:  # before they know of each other all find the same fault
            first = rank == 0
    except SettingError:  # no rank is known
        first = True
    except dist.DistError:
        failure, first = f"rank {rank} ends, because a process that it needs has ended", True
    if first:
        # The progress bar of rank 0 may stand in the line.
        print("\n" * (rank > 0) + failure, file=sys.stderr)
    if failed and rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # The store is in this process: give the others a moment to see that they need not speak.
        deadline = time.monotonic() + 2
        while _store().add("failed", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.01)
