"""This process's rank and the world size, from the variables that launchers set."""

import fcntl
import os
import re
import socket
import struct

from common.errors import SettingError


def rank_and_world_size():
    """The rank of this process and the number of processes, from RANK and WORLD_SIZE or, under
    ``srun``, from Slurm's variables; (0, 1) if none of these is set. Under ``srun`` it also sets
    the variables of other launchers in ``os.environ``: RANK, MASTER_ADDR and so on.

    Raises:
        SettingError: the variables contradict each other, or MPI has started the processes.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        _read_slurm()
        _refuse_mpi()
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if (rank is None) != (world_size is None):
        raise SettingError(
            f"RANK is {rank} and WORLD_SIZE is {world_size}: a launcher sets both, such as "
            f"torchrun; unset both to run one process"
        )
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if rank >= world_size:
        raise SettingError(
            f"RANK {rank} must be at least 0 and less than WORLD_SIZE {world_size}"
        )
    return rank, world_size


def _number(name, default, least=0, most=10**9):
    """The whole number in an environment variable."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise SettingError(
            f"{name} is '{text:.40}': it must be a whole number from {least} to {most}, as "
            f"launchers set it"
        )
    return int(text)


def master_address():
    """MASTER_ADDR and MASTER_PORT, where rank 0 listens, and whether that address is loopback.

    Raises:
        SettingError: a variable is missing or invalid, or the address cannot be resolved.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise SettingError(
            f"RANK is set but not {' and '.join(missing)}: launchers set all of them"
        )
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0, 1, 65535)
    try:
        socket.getaddrinfo(address or None, port)
    except (OSError, UnicodeError):
        address = None
    if not address:
        raise SettingError(
            f"MASTER_ADDR is '{os.environ['MASTER_ADDR']}': this machine cannot resolve that "
            f"name; give the address of the machine of rank 0"
        )
    return address, port, _is_loopback(address)


def _is_loopback(address):
    # Do not resolve the name: many machines resolve their own name to 127.0.1.1.
    return address in ("localhost", "::1") or address.startswith("127.")


def local_rank():
    """The rank of this process on its machine, from LOCAL_RANK, or from RANK and LOCAL_WORLD_SIZE.

    Raises:
        SettingError: the variables are not set, so that every process would take the same GPU.
    """
    rank, world_size = rank_and_world_size()
    if "LOCAL_RANK" in os.environ or world_size == 1:
        return _number("LOCAL_RANK", 0)
    if "LOCAL_WORLD_SIZE" in os.environ:
        return rank % _number("LOCAL_WORLD_SIZE", 1, 1)
    raise SettingError(
        "RANK is set but neither LOCAL_RANK nor LOCAL_WORLD_SIZE: all processes of a machine would "
        "take the same GPU; set one of them, as torchrun does"
    )


def _read_slurm():
    """Set the usual variables if ``srun`` has started this process as one of several tasks.

    The shell of a batch job or of ``salloc`` also has SLURM_NTASKS and SLURM_PROCID, but is one
    process: only a step that srun has started has the variables SLURM_STEP_*. An interactive step
    has them too, with one task.
    """
    env = os.environ
    if _number("SLURM_STEP_NUM_TASKS", 1) == 1 or "SLURM_PROCID" not in env:
        return
    # The first host of "node[03-05,9],other": keep the first number of each bracket.
    first = re.sub(r"\[(\d+)[^]]*\]", r"\1", env.get("SLURM_STEP_NODELIST", "")).split(",")[0]
    if "MASTER_ADDR" not in env and not re.fullmatch(r"[\w.-]+", first):
        raise SettingError(
            f"cannot tell the first host of SLURM_STEP_NODELIST "
            f"'{env.get('SLURM_STEP_NODELIST', '')}': set MASTER_ADDR to its address"
        )
    # Two jobs that share a machine must not share a port.
    port = _number("SLURM_JOB_ID", 0) * 10 + _number("SLURM_STEP_ID", 0, most=2**32)
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"]
    env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
    env.setdefault("MASTER_ADDR", first)
    env.setdefault("MASTER_PORT", str(10000 + port % 20000))


def _refuse_mpi():
    """Refuse processes that ``mpirun`` has started: each of them would train alone."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "1") != "1" and "RANK" not in os.environ:
            raise SettingError(
                f"{name} is {os.environ[name]} but RANK and WORLD_SIZE are not set: start the "
                f"script by torchrun, run.sh or srun, which set them for each process"
            )


def pick_interface():
    """Let gloo use the network interface that leads to MASTER_ADDR, unless GLOO_SOCKET_IFNAME names
    another. On one machine gloo and NCCL use the loopback interface, which no other machine
    reaches.

    Raises:
        SettingError: GLOO_SOCKET_IFNAME names an interface that this machine does not have.

    By default gloo takes the address of this machine's own name. Many systems resolve that name to
    127.0.1.1, which no other machine can reach. On machine 0 MASTER_ADDR may be such a name too:
    then gloo gets the interface of the default route.
    """
    env, master = os.environ, os.environ.get("MASTER_ADDR", "localhost")
    one_machine = env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE")
    interfaces = [name for _, name in socket.if_nameindex()]
    if (one_machine or _is_loopback(master)) and "lo" in interfaces:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if "GLOO_SOCKET_IFNAME" in env:
        unknown = set(env["GLOO_SOCKET_IFNAME"].split(",")) - set(interfaces)
        if unknown:
            raise SettingError(
                f"GLOO_SOCKET_IFNAME is '{env['GLOO_SOCKET_IFNAME']}': the network interfaces of "
                f"this machine are {', '.join(interfaces)}"
            )
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # for UDP this sends nothing: it only chooses the route
        except OSError:  # no such name, or IPv6 only: gloo decides
            return
        own = probe.getsockname()[0]
        if own.startswith("127."):
            with open("/proc/net/route") as routes:
                found = [line.split()[0] for line in routes if line.split()[1] == "00000000"]
        else:
            found = [name for name in interfaces if _address(probe, name) == own]
    if found:
        env["GLOO_SOCKET_IFNAME"] = found[0]


def _address(probe, interface):
    """The IPv4 address of a network interface, None if it has none."""
    request = struct.pack("256s", interface.encode())
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, request)[20:24])  # SIOCGIFADDR
    except OSError:
        return None
