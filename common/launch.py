"""Start-up and tear-down of a process, alone or as one of many."""

import atexit
import ctypes
import datetime
import functools
import json
import os
import platform
import signal
import socket
import sys
import time
import traceback
import warnings

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from common.environment import (
    local_rank, master_address, pick_interface, rank_and_world_size
)
from common.errors import SettingError, printable


# Words in the errors that gloo raises when another process has died; the last one is NCCL's.
LOST = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "Broken pipe",
        "a remote process exiting")
# The errors that a too large setting or an unreadable file raises before the first step.
INPUT = (OSError, OverflowError, MemoryError, UnicodeError)
TOO_LARGE = ("can't allocate memory", "out of memory", "overflow", "not enough memory")


def pick_device(device="auto", share=False):
    """The torch.device of this process: a GPU of its own, or the CPU.

    Args:
        device: "cuda", "cpu", or "auto": a GPU if torch finds one.
        share: if there are fewer GPUs than processes, several processes may use the same GPU.

    Raises:
        SettingError: there is no GPU for this process.
    """
    if device == "cpu" or not torch.cuda.is_available():
        if device == "cuda":
            raise SettingError("--device cuda: torch finds no GPU here; use --device cpu")
        return torch.device("cpu")
    number, gpus = local_rank(), torch.cuda.device_count()
    if number >= gpus and not share:
        raise SettingError(
            f"LOCAL_RANK {number} has no GPU, this machine has {gpus}: start at most {gpus} "
            f"processes here (--nproc_per_node={gpus}), let them share a GPU by --backend gloo, or "
            f"use --device cpu"
        )
    torch.cuda.set_device(number % gpus)
    return torch.device("cuda", number % gpus)


def start_process(device="auto"):
    """Start a script that runs as one process. Returns the torch.device of the process.

    Args:
        device: see ``pick_device``.

    Raises:
        SettingError: several processes were started, or there is no GPU.
    """
    _, world_size = rank_and_world_size()
    if world_size > 1:
        raise SettingError(
            f"{_script()} is one process and was started as {world_size}: start it with plain "
            f"python, or take a script that shares the work, such as ddp.py"
        )
    return pick_device(device)


@functools.cache
def _store():
    """The key-value store through which the processes find each other.

    The store of torchrun's agent outlives the processes. After a restart it still holds the
    addresses of the processes that died, so the number of the restart becomes part of each key.
    The agents of several machines may count restarts differently. There run.sh gives each start of
    the processes its own store.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    rank, _ = rank_and_world_size()
    address, port, loopback = master_address()
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not of_agent
    listener = None
    try:
        if serves and loopback:  # by default a TCPStore listens on all interfaces
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, port), family=family).detach()
        store = dist.TCPStore(
            address, port, is_master=serves, master_listen_fd=listener, multi_tenant=not listener,
            timeout=datetime.timedelta(seconds=300),
        )
    except (OSError, RuntimeError) as error:
        raise SettingError(
            f"rank {rank} cannot {'listen on' if serves else 'reach'} MASTER_ADDR {address}, "
            f"MASTER_PORT {port}: {str(error).splitlines()[0]}"
        ) from None
    if not of_agent:
        return store
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def start_process_group(device="auto", backend="auto", timeout=600, folder=".", settings=None):
    """Start one process of several, and connect it to the others. Returns the torch.device of the
    process. End the process as ``launch`` does.

    Args:
        device: see ``pick_device``.
        backend: "nccl" for tensors on GPUs (gloo is added for tensors on CPUs); "gloo", with which
            several ranks can share a GPU; "mpi"; or "auto": nccl on GPUs, otherwise gloo.
        timeout: seconds after which a collective of any group fails, if a rank does not take part.
        folder: if that happens with NCCL, each rank writes a record of its last collectives there.
        settings: a dict of what must be the same on all ranks, such as the options.

    Raises:
        SettingError: there is no GPU for this process, ranks are on different types of device or
            have different settings or versions, torch lacks the backend, or a launcher's variable
            is missing.
    """
    rank, world_size = rank_and_world_size()
    store = _store()  # first: without a store only local rank 0 prints why it fails
    device = pick_device(device, share=backend == "gloo")
    if not dist.is_initialized():
        _check_settings(store, rank, world_size, {
            "the type of device": device.type, "torch": torch.__version__,
            "Python": platform.python_version(), **(settings or {}),
        })
        backend = _check_backend(backend, device)
        pick_interface()
        if backend == "nccl":
            # A user cannot act on these two warnings: gloo's options in a mesh, P2P in a pipeline.
            warnings.filterwarnings("ignore", message="Tried to pass options to ProcessGroupGloo")
            for name, value in nccl_variables(folder).items():
                os.environ.setdefault(name, value)
        # The groups of a mesh, and other new groups, do not inherit the default group's timeout.
        timeout = datetime.timedelta(seconds=timeout)
        distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
        dist.init_process_group(
            {"nccl": "cpu:gloo,cuda:nccl", "gloo": "gloo", "mpi": "cpu:mpi,cuda:mpi"}[backend],
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        dist.barrier()  # a rank that ends before all are connected gives the others obscure errors
    return device


def _check_settings(store, rank, world_size, settings):
    """Compare the settings of all ranks with those of rank 0. If one rank differs, all ranks raise
    a SettingError: if that rank ended alone, the others would wait for it."""
    own = json.loads(json.dumps(settings, default=str))
    if rank == 0:
        store.set("settings", json.dumps(own))
    first = json.loads(store.get("settings"))
    for name in first | own:
        if own.get(name) != first.get(name):
            store.set("difference", (
                f"{name} is {first.get(name)} on rank 0 and {own.get(name)} on rank {rank}: start "
                f"all ranks with the same"
            ))
    if store.add("compared", 1) == world_size:
        store.set("verdict", store.get("difference") if store.check(["difference"]) else "")
    if verdict := store.get("verdict").decode():
        raise SettingError(verdict)


def nccl_variables(folder):
    """The environment variables to set with NCCL, unless the user has set them: a dict."""
    return {
        # If a collective fails, for example by --timeout, each rank records its last collectives:
        # https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": os.path.join(folder, "flight-record-rank"),
        # Let gloo connect two processes when they first communicate: beside NCCL few pairs do.
        "TORCH_GLOO_LAZY_INIT": "1",
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    }


def _check_backend(backend, device):
    """Returns ``backend``, or the backend that "auto" stands for.

    Raises:
        SettingError: this torch lacks the backend, or the backend cannot work on ``device``.
    """
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise SettingError("--backend nccl needs a GPU for each process: use gloo")
    if not {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available,
            "mpi": dist.is_mpi_available}[backend]():
        raise SettingError(f"--backend {backend}: this torch is built without it, use another")
    return backend


def launch(main):
    """Run ``main()`` and end the process: the last line of every script.

    A ``SettingError`` becomes one line on stderr, and so does what bad input raises before the
    first step. If several processes fail, only the first one prints its error: the failure of one
    process usually causes the others.

    The process ends by ``os._exit``. At an ordinary exit of a good run a thread of gloo may need
    the GIL while the interpreter is finalised: the process aborts or hangs
    (https://github.com/pytorch/pytorch/issues/190489). Before ``os._exit`` the ``atexit`` handlers
    run and the output is flushed, as Python would do. The process group is destroyed after ``main``
    has returned, when no variable refers to it.
    """
    status, failure = 1, None
    try:
        _end_with_launcher()
        if rank_and_world_size()[1] > 1 and not {"-h", "--help"}.intersection(sys.argv):
            _store()  # first: without a store only local rank 0 prints why it fails
        main()
        status = 0
    except SettingError as error:
        failure = f"{_script()}: error: {error}"
    except SystemExit as exit:  # --help
        status = exit.code or 0
    except KeyboardInterrupt:
        status = 130
    except (RuntimeError, *INPUT) as error:
        failure = traceback.format_exc().rstrip()
        words = " ".join(f"{type(error).__name__}: {error}".splitlines()[:1])
        in_loop = "step" in error.__traceback__.tb_next.tb_frame.f_locals  # of main
        if not in_loop and (isinstance(error, INPUT) or any(w in words for w in TOO_LARGE)):
            failure = f"{_script()}: error: {printable(words)}"
        if any(words in str(error) for words in LOST):
            rank, _ = rank_and_world_size()
            failure = (
                f"{_script()}: error: a collective of rank {rank} failed, since another process "
                f"has ended or was silent for --timeout seconds: {error}"
            ).splitlines()[0]
    except BaseException:
        failure = traceback.format_exc().rstrip()
    # The frames of main are gone now, and with them its progress bar and its use of the group.
    if failure:
        _report(failure)
    elif status == 0 and dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # of loggers, for example
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_launcher():
    """Under torchrun: ask the kernel for SIGTERM when torchrun dies, even by SIGKILL. Otherwise its
    processes train on, and write into the folder from which a new start reads."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        launcher = os.environ.get("TORCHRUN_PID")  # set by common/torchrun.py
        if launcher and not os.path.exists(f"/proc/{launcher}"):
            raise SettingError("torchrun has ended")  # before prctl was called


def _script():
    return os.path.basename(sys.argv[0])


def _report(failure):
    """Print why this process fails, unless another process has printed why it fails."""
    rank, world_size, failed = 0, 1, 0
    try:
        rank, world_size = rank_and_world_size()
        if _store.cache_info().currsize:
            _store().set("verdict", "another rank has failed")  # for ranks that are still starting
            failed = _store().add("failed", 1)
            first = failed == 1
        else:  # not connected yet: one process of each machine prints
            first = os.environ.get("LOCAL_RANK", "0") == "0"
    except SettingError:  # the rank is not known
        first = True
    except dist.DistError:
        failure, first = f"rank {rank} ends, because a process that it needs has ended", True
    if first:
        # The progress bar of rank 0 may occupy the current line of the terminal.
        print("\n" * (rank > 0) + failure, file=sys.stderr)
    if failed and rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # This process serves the store: wait until the others have read that one has printed.
        deadline = time.monotonic() + 2
        while _store().add("failed", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.01)
