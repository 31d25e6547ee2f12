#!/usr/bin/env bash
# Start a script, a tool or the tests:
#
#   bash run.sh ddp.py --steps 50     one process per GPU; on a machine without GPUs, 2 processes
#   NPROC=4 bash run.sh ddp.py        4 processes on each machine
#   bash run.sh check SCRIPT          does your changed script train as one process does?
#   bash run.sh test                  a sample of every kind of test; arguments go to pytest
#   bash run.sh test --all            every test
#   bash run.sh test --torch 2.11.0   with another torch, in a virtual environment of its own
#   bash run.sh plan --help           a tool: bench, check, dry_run, export, import_hf, parity, plan
#                                     or prepare
#   bash run.sh --help                this text
#
# On several machines, in one of two ways; each machine needs this folder and the working folder
# at the same path, and --out on a file system that all share:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash run.sh fsdp.py     on each machine, with its own
#                                     NODE_RANK; MASTER_ADDR is the address of machine 0
#   sbatch --nodes=2 --exclusive run.sh fsdp.py                    as a Slurm job, from this folder
#
# SIGTERM, SIGUSR1 and Ctrl-C let the run finish a step and save; then it ends with status 0. A
# second one ends it at once. MAX_RESTARTS=3 starts all processes again, up to 3 times, when one has
# died: they resume from the newest checkpoint. All variables and ports: docs/launching.md.
#
# run.sh uses the active Python, or the one that PYTHON names, if requirements.txt is installed in
# it. Otherwise it makes a virtual environment beside this file, .venv, or for PYTHON one whose name
# has its version, and installs requirements.txt there, once, with the torch that was measured.
set -euo pipefail
# With these Python would not find common/ beside a script, and cd would go elsewhere.
unset PYTHONSAFEPATH CDPATH
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
# sbatch runs a copy of this file, elsewhere.
[ -f "$here/requirements.txt" ] || here=${SLURM_SUBMIT_DIR:-$here}

fail() { echo "run.sh: error: $*" >&2; exit 1; }

[ . -ef "$PWD" ] || fail "the working folder was removed: cd to one that is there"

# Refuse a variable that is set, and is no whole number of at least so much. NNODES=1:2: 1 or 2.
check_number() {
  local value=${!1:-}
  [[ $1 != NNODES || ! $value =~ ^[1-9][0-9]*:(.*)$ ]] || value=${BASH_REMATCH[1]}
  [[ -z $value || $value = "$2" || $value =~ ^[1-9][0-9]{0,8}$ ]] ||
    fail "$1 is '${!1}': it must be a whole number, at least $2"
}

[ -f "$here/requirements.txt" ] ||
  fail "$here is not the folder of run.sh: start sbatch in that folder"

# Does this Python have what requirements.txt names? Only the tests need pytest.
has_requirements() {
  [ "$("$1" -P - "$here/requirements.txt" "$command" 2>/dev/null <<'PYTHON'
import re, sys
from importlib.metadata import version
number = lambda version: [int(part) for part in re.findall("[0-9]+", version)[:2]]
for line in open(sys.argv[1]):
    name, least, below = re.split("[<>=,]+", line.strip())
    if name != "pytest" or sys.argv[2] == "test":
        if not number(least) <= number(version(name)) < number(below):
            sys.exit(1)
print("yes")
PYTHON
  )" = yes ]
}

# Sets python. A version of torch has an environment of its own, and so has the Python that PYTHON
# names.
find_python() {
  local torch=${1:-} version environment=$here/.venv
  python=${PYTHON:-python3}
  if [[ -v PYTHON ]]; then
    version=$("$PYTHON" -c 'import sys; print("yes", "%d.%d.%d" % sys.version_info[:3])' \
      2>/dev/null) || true
    [[ $version = yes\ * ]] || fail "PYTHON is '$PYTHON': that is no Python"
    environment+=-python-${version#yes }
  fi
  environment+=${torch:+-torch-$torch}
  [ -n "$torch" ] || ! has_requirements "$python" || return 0
  python=$environment/bin/python
  ! has_requirements "$python" || return 0
  "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed; name one by PYTHON=..."
  echo "run.sh: installing requirements.txt into $environment" >&2
  "${PYTHON:-python3}" -P -m venv "$environment"
  "$python" -P -m pip install --disable-pip-version-check \
    "torch==${torch:-2.13.0}" -r "$here/requirements.txt"
  echo "run.sh: to use it yourself, for torchrun: source $(printf %q "$environment")/bin/activate" >&2
}

# Print a command, which may begin with variables, so that it can be typed again, and run it.
show_and_run() {
  printf '+%s\n' "$(printf ' %q' "$@")" >&2
  exec env "$@"
}

# PYTHONPATH, such that this folder comes first.
path_of_tools() {
  [[ $here != *:* ]] ||
    fail "the path of this folder, $here, has a colon, which PYTHONPATH cannot hold: move it"
  echo "PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}"
}

# The script imports the common/ beside it; or this folder's, as those in examples/ do.
find_common() {
  local beside name
  beside=$(dirname "$script")
  if [[ ! -e $beside/common && ! -e $beside/common.py ]]; then
    path_of_tools
    return
  fi
  for name in $(sed -nE 's/^ *(from|import) common\.(\w+).*/\2/p' "$script"); do
    [[ -e $beside/common/$name.py || ! -e $here/common/$name.py ]] ||
      fail "$script imports common.$name of this project, and what is beside it by the name of" \
        "common is another one: copy common/ under another name (docs/copying.md has the command)"
  done
}

# Start the processes of this machine by torchrun, which watches them.
run_here() {
  local processes threads address family interface endpoint nodes=() variables=()
  # torchrun takes its options from these too, and would wait for machines that nobody starts.
  [[ -z ${!PET_*} || -v NNODES ]] ||
    fail "${!PET_*}: these are variables of torchrun, which run.sh does not read: start by" \
      "torchrun in place of run.sh, or set NNODES, NODE_RANK and MASTER_ADDR"
  unset "${!PET_@}"
  processes=${NPROC:-$("$python" -P -c 'import torch; print(torch.cuda.device_count() or 2)')}
  # Otherwise torchrun gives each process one thread.
  threads=$(($(nproc) / processes))
  variables+=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}")
  # Otherwise torch warns, with a stack, when a process that another waits for has ended.
  variables+=("TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}")
  # Less fragmentation of GPU memory.
  [[ -v PYTORCH_ALLOC_CONF || -v PYTORCH_CUDA_ALLOC_CONF ]] ||
    variables+=("PYTORCH_ALLOC_CONF=expandable_segments:True")
  [ -z "$path" ] || variables+=("$path")
  if [ "${NNODES:-1}" != 1 ]; then
    [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] ||
      fail "NNODES is $NNODES: set NODE_RANK, the number of this machine from 0, and MASTER_ADDR," \
        "the address of machine 0"
    [ "$NODE_RANK" -lt "${NNODES#*:}" ] ||
      fail "NODE_RANK is $NODE_RANK and NNODES is $NNODES: machines are numbered from 0"
    MASTER_ADDR=${MASTER_ADDR#[} MASTER_ADDR=${MASTER_ADDR%]}
    address=$("$python" -P -c 'import socket, sys
found = [(family, address[0]) for family, *_, address in socket.getaddrinfo(sys.argv[1], 0)]
print(min(found)[1])  # of IPv4, if there is one' "$MASTER_ADDR" 2>/dev/null) ||
      fail "MASTER_ADDR is $MASTER_ADDR: this machine cannot resolve that name"
    # gloo would take the address of this machine's own name, which is 127.0.1.1 on many systems: no
    # other machine can reach that. Take the interface of the most specific route to machine 0.
    family=() endpoint=$MASTER_ADDR
    [[ $address != *:* ]] || family=(-6)
    [[ $endpoint != *:* ]] || endpoint="[$endpoint]"
    interface=$({ ip "${family[@]}" route show match "$address" |
      sed -n 's/.* dev \([^ ]*\).*/\1/p' | tail -1; } 2>/dev/null || true)
    [[ -z $interface || $address = 127.* || $address = ::1 || -v GLOO_SOCKET_IFNAME ]] ||
      variables+=("GLOO_SOCKET_IFNAME=$interface")
    # c10d: when one machine restarts its processes, all machines do. It numbers the machines in the
    # alphabetical order of --local-addr, and all processes connect to the first one's. So machine 0
    # gives its address, and the others a name that sorts behind it, such as ~00001.
    nodes=(
      "--nnodes=$NNODES" --rdzv-backend=c10d "--rdzv-endpoint=$endpoint:${MASTER_PORT:-29500}"
      "--rdzv-conf=is_host=$((NODE_RANK == 0)),join_timeout=300,read_timeout=300"
      "--local-addr=$([ "$NODE_RANK" = 0 ] && echo "$MASTER_ADDR" || printf '~%05d' "$NODE_RANK")"
    )
    # Each start gets its own store: that of the rendezvous has the addresses of dead processes.
    variables+=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
  fi
  show_and_run "${variables[@]}" "$python" -P "$here/tools/support/torchrun.py" "${nodes[@]}" \
    "--nproc-per-node=$processes" "--max-restarts=${MAX_RESTARTS:-0}" "$script" "$@"
}

# In a Slurm job, outside of its steps: start this file again, once on each machine of the job.
run_as_slurm_step() {
  command -v srun >/dev/null ||
    fail "this is Slurm job $SLURM_JOB_ID without srun: unset SLURM_JOB_ID to run here alone"
  show_and_run srun --ntasks-per-node=1 "--ntasks=$SLURM_NNODES" --cpu-bind=none \
    --kill-on-bad-exit=1 bash "$here/run.sh" "$script" "$@"
}

# In a step of a Slurm job: set NODE_RANK and the like from Slurm's variables.
read_slurm_step() {
  [ "$SLURM_STEP_NUM_TASKS" -eq "$SLURM_STEP_NUM_NODES" ] ||
    fail "srun starts this $SLURM_STEP_NUM_TASKS times on $SLURM_STEP_NUM_NODES machines:" \
      "start it once on each, with --ntasks-per-node=1"
  NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID
  local names
  command -v scontrol >/dev/null ||
    fail "SLURM_STEP_NODELIST is $SLURM_STEP_NODELIST, but this machine has no scontrol to read it:" \
      "set NNODES, NODE_RANK and MASTER_ADDR"
  names=$(scontrol show hostnames "$SLURM_STEP_NODELIST")  # one per line
  MASTER_ADDR=${MASTER_ADDR:-${names%%$'\n'*}}
  # Jobs that share a machine do not share a port.
  MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
}

if [[ " -h --help " = *" ${1:-} "* ]]; then  # the comment above
  sed -n '2,/^set /s/^# \{0,1\}//p' "$here/run.sh"
  exit
fi
for name in NPROC NNODES MASTER_PORT; do check_number "$name" 1; done
for name in NODE_RANK MAX_RESTARTS; do check_number "$name" 0; done
command=${1:-}
[ -n "$command" ] || fail "say what to run: bash run.sh ddp.py --steps 50, or bash run.sh test"
shift
if [ "$command" = test ]; then
  torch=
  if [ "${1:-}" = --torch ]; then
    torch=${2:-}
    [[ $torch =~ ^2\.1[1-5]\.[0-9]+$ ]] ||
      fail "--torch '$torch': give a version from 2.11.0 to 2.15, in full"
    shift 2
  fi
  find_python "$torch"
  cd "$here"
  # pytest says how many.
  [ $# != 0 ] ||
    echo "run.sh: a sample of the tests, some 3 minutes on two idle cores; --all: all, some 30"
  exec "$python" -m pytest "$@"
fi
tool=
case $command in
  bench | check | dry_run | plan | prepare) tool=tools.$command ;;
  export | import_hf) tool=tools.huggingface.$command ;;
  parity) tool=parity ;;
esac
if [ -n "$tool" ]; then
  path=$(path_of_tools)
  find_python
  # -P: a json.py in the working folder is not Python's.
  exec env "$path" "$python" -P -m "$tool" "$@"
fi
script=$command
[ -f "$script" ] || script=$here/$command
[ -f "$script" ] || fail "$command: no such script; there are $(cd "$here" && echo *.py)"
[[ $script = *.py ]] || fail "$command is no Python script; there are $(cd "$here" && echo *.py)"
path=$(find_common)
find_python

if grep -q '\bstart_process(' "$script"; then  # single.py, and copies of it
  [[ ${NPROC:-1} = 1 && ${NNODES:-1} = 1 ]] ||
    fail "single.py is one process: unset NPROC and NNODES, or take a script that shares the work," \
      "such as ddp.py"
  exec env ${path:+"$path"} "$python" "$script" "$@"
elif [[ -v NNODES || -z ${SLURM_JOB_ID:-} ]]; then
  [[ -v NNODES || ! -v NODE_RANK ]] ||
    fail "NODE_RANK is $NODE_RANK but NNODES is not set: how many machines are there?"
  run_here "$@"
elif [[ ! ${SLURM_STEP_ID:-} =~ ^[0-9]{1,9}$ ]]; then
  # In the shell of sbatch or salloc SLURM_STEP_ID is not set, or above 4294967000.
  run_as_slurm_step "$@"
else
  read_slurm_step
  run_here "$@"
fi
