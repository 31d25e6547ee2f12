#!/usr/bin/env bash
# Start a script, a tool or the tests:
#
#   bash run.sh ddp.py --steps 50     one process per GPU; on a machine without GPUs, 2 processes
#   NPROC=4 bash run.sh ddp.py        4 processes on each machine
#   bash run.sh share fsdp.py         2 processes on each GPU, or NPROC on all: NCCL on few GPUs
#   bash run.sh check SCRIPT          does your changed script train as one process does?
#   bash run.sh flatten fsdp.py > my_fsdp.py     one file: a script and what it uses of common/
#   bash run.sh plan --help           a tool: bench, check, dry_run, export, flatten, import_hf,
#                                     parity, plan or prepare
#   bash run.sh test                  a sample of the tests, 5 minutes on two idle cores; with --all
#                                     all tests; arguments go to pytest: with pytest-xdist
#                                     -n 3 lets --all take 20 minutes there
#   bash run.sh test --torch 2.14.1   with another torch, in a virtual environment of its own
#   bash run.sh --help                this text
#
# On several machines, in one of two ways; each machine needs this folder and the working folder
# at the same path, and --out on a file system that all share:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash run.sh fsdp.py     on each machine, with its own
#                                     NODE_RANK; MASTER_ADDR is the address of machine 0
#   sbatch --nodes=2 --exclusive run.sh fsdp.py                    as a Slurm job, from this folder
#
# SIGTERM, SIGUSR1 and Ctrl-C let the run finish a step and, with --out, save; a second one ends it
# at once. MAX_RESTARTS=3 starts all processes again, up to 3 times, when one has died: with --out
# they resume from the newest checkpoint. All variables and ports: docs/launching.md.
#
# run.sh uses the active Python, or the one that PYTHON names, if requirements.txt is met in it.
# Otherwise it installs that once, in a virtual environment beside this file, .venv.
set -euo pipefail

fail() { echo "run.sh: error: $*" >&2; exit 1; }

# Has this Python what requirements.txt names? Only the tests need pytest. Sets lacks: what not.
has_requirements() {
  lacks=$("$1" -P - "$here/requirements.txt" "$command" 2>&1 <<'PYTHON'
import re, sys
from importlib.metadata import version
number = lambda text: [int(part) for part in re.findall("[0-9]+", text)[:2]]
for line in open(sys.argv[1]):
    name, least, below = re.split("[<>=,]+", line.strip())
    if name != "pytest" or sys.argv[2] == "test":
        has = version(name)
        assert number(least) <= number(has) < number(below), f"{name} {has} is not {line.strip()}"
PYTHON
  )
}

# Sets python. A version of torch has its own environment, and so has the Python of PYTHON.
find_python() {
  local torch=${1:-} environment=$here/.venv version
  python=${PYTHON:-python3}
  if [[ -v PYTHON ]]; then
    version=$("$PYTHON" -I -c 'import platform; print(platform.python_version())') ||
      fail "PYTHON is '$PYTHON': that is no Python"
    environment+=-python-$version
  fi
  environment+=${torch:+-torch-$torch}
  [ -n "$torch" ] || ! has_requirements "$python" || return 0
  local why=${lacks:-}
  python=$environment/bin/python
  ! has_requirements "$python" || return 0
  "${PYTHON:-python3}" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed; name one by PYTHON=..."
  echo "run.sh: installing requirements.txt into $environment; ${why##*Error: }" >&2
  "${PYTHON:-python3}" -P -m venv "$environment"
  "$python" -P -m pip install --disable-pip-version-check \
    "torch==${torch:-2.13.0}" -r "$here/requirements.txt" >&2
  echo "run.sh: to use it yourself: source $(printf %q "$environment")/bin/activate" >&2
  echo "run.sh: starting; the first start of a new torch takes up to a minute" >&2
}

# -P: a json.py in the working folder is not Python's.
run_tool() {
  find_python
  PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m "$@"
}

# Print a command, which may begin with variables, so that it can be typed again, and run it.
show_and_run() {
  printf '+%s\n' "$(printf ' %q' "$@")" >&2
  exec env "$@"
}

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# sbatch runs a copy of this file, elsewhere.
[ -f "$here/requirements.txt" ] || here=${SLURM_SUBMIT_DIR:-$here}
[ -f "$here/requirements.txt" ] || fail "$here is not the folder of run.sh: start sbatch there"
[[ " -h --help " != *" ${1:---help} "* ]] ||  # the comment above
  exec sed -n '2,/^set /s/^# \{0,1\}//p' "$here/run.sh"
for name in NPROC NNODES MASTER_PORT NODE_RANK MAX_RESTARTS; do
  least=$([[ $name = NODE_RANK || $name = MAX_RESTARTS ]] && echo 0 || echo 1)
  [[ ${!name:-1} =~ ^($least|[1-9][0-9]*)(:[1-9][0-9]*)?$ ]] ||
    fail "$name is '${!name}': it must be a whole number, at least $least"
done
command=$1 share=
shift
case $command in
  test)
    torch=
    if [ "${1:-}" = --torch ]; then
      torch=${2:-}
      [[ $torch =~ ^2\.1[345]\.[0-9]+$ ]] ||
        fail "--torch '$torch': give a version from 2.13.0 to 2.15, in full; older ones will not do"
      shift 2
    fi
    find_python "$torch"
    cd "$here"
    exec "$python" -m pytest "$@" ;;
  check | dry_run | flatten | plan | prepare) run_tool "tools.$command" "$@" ;;
  export | import_hf) run_tool "tools.huggingface.$command" "$@" ;;
  parity) run_tool parity "$@" ;;
  bench) command=$here/tools/bench.py ;;
  share)
    share=$here/tools/share_gpu.py command=${1:-}
    [[ $# != 0 && ${NNODES:-1} = 1 ]] || fail "share: name a script, and unset NNODES"
    shift ;;
esac
script=$command
[ -f "$script" ] || script=$here/$command
[[ -f $script && $script = *.py ]] ||
  fail "$command is no Python script here; there are $(cd "$here" && echo *.py)"
find_python
# A script imports the common/ beside it; if there is none, as in examples/, this folder's.
variables=("PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$here")
if [[ ${script##*/} = single.py && ${NPROC:-1} = 1 && ${NNODES:-1} = 1 && ! $share ]]; then
  exec env "${variables[@]}" "$python" "$script" "$@"
fi

if [[ -n ${SLURM_JOB_ID:-} && ! -v NNODES && ! $share ]]; then
  # In the shell of sbatch or salloc SLURM_STEP_ID is not set, or above 4294967000. Start this file
  # again, once on each machine of the job.
  [[ ${SLURM_STEP_ID:-} =~ ^[0-9]{1,9}$ ]] ||
    show_and_run srun --ntasks-per-node=1 "--ntasks=$SLURM_NNODES" --cpu-bind=none \
      --kill-on-bad-exit=1 bash "$here/run.sh" "$script" "$@"
  [ "$SLURM_STEP_NUM_TASKS" -eq "$SLURM_STEP_NUM_NODES" ] ||
    fail "srun starts this $SLURM_STEP_NUM_TASKS times on $SLURM_STEP_NUM_NODES machines:" \
      "start it once on each, with --ntasks-per-node=1"
  NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID
  names=$(scontrol show hostnames "$SLURM_STEP_NODELIST")  # one per line
  MASTER_ADDR=${MASTER_ADDR:-${names%%$'\n'*}}
  # Jobs that share a machine do not share a port.
  MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
fi

# torchrun starts the processes of this machine, and watches them.
[[ -z ${!PET_*} ]] ||
  fail "${!PET_*}: torchrun takes its options from these too: start it in place of run.sh"
processes=${NPROC:-}
if [[ ! $processes || $share ]]; then
  gpus=$("$python" -P -c 'import torch; print(torch.cuda.device_count())')
  [[ ! $share || $gpus != 0 ]] || fail "share: torch finds no GPU here"
  processes=${processes:-$((gpus ? ${share:+2 *} gpus : 2))}
fi
threads=$(($(nproc) / processes))  # otherwise torchrun gives each process one
variables+=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads ? threads : 1))}")
# Otherwise torch warns, with a stack, when a process that another waits for has ended.
variables+=("TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}")
# Less fragmentation of GPU memory.
[[ -v PYTORCH_ALLOC_CONF || -v PYTORCH_CUDA_ALLOC_CONF ]] ||
  variables+=("PYTORCH_ALLOC_CONF=expandable_segments:True")
nodes=(--standalone --local-addr=127.0.0.1)
if [ "${NNODES:-1}" != 1 ]; then
  [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] ||
    fail "NNODES is $NNODES: set NODE_RANK, the number of this machine from 0, and MASTER_ADDR," \
      "the address of machine 0"
  [ "$NODE_RANK" -lt "${NNODES#*:}" ] ||
    fail "NODE_RANK is $NODE_RANK and NNODES is $NNODES: machines are numbered from 0"
  address=$(getent ahostsv4 "$MASTER_ADDR" || getent ahosts "$MASTER_ADDR") ||
    fail "MASTER_ADDR is $MASTER_ADDR: this machine cannot resolve that name"
  # gloo would take the address of this machine's own name, which is 127.0.1.1 on many systems: no
  # other machine can reach that. Take the interface of the most specific route to machine 0.
  address=${address%% *}
  interface=$({ ip route show match "$address" || ip -6 route show match "$address"; } 2>/dev/null |
    sed -n 's/.* dev \([^ ]*\).*/\1/p' | tail -1) || true
  [[ -z $interface || -v GLOO_SOCKET_IFNAME ]] || variables+=("GLOO_SOCKET_IFNAME=$interface")
  # Each start gets its own store: that of the rendezvous has the addresses of dead processes.
  variables+=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
  # c10d: when one machine restarts its processes, all machines do. It numbers the machines in the
  # alphabetical order of --local-addr, and all processes connect to the first one's. So machine 0
  # gives its address, and the others a name that sorts behind it, such as ~00001.
  own=$([ "$NODE_RANK" = 0 ] && echo "$MASTER_ADDR" || printf '~%05d' "$NODE_RANK")
  [[ $MASTER_ADDR != *:* ]] || MASTER_ADDR="[$MASTER_ADDR]"
  nodes=("--nnodes=$NNODES" --rdzv-backend=c10d "--rdzv-endpoint=$MASTER_ADDR:${MASTER_PORT:-29500}"
    "--rdzv-conf=is_host=$((NODE_RANK == 0)),join_timeout=300,read_timeout=300" "--local-addr=$own")
elif [[ -v NODE_RANK && ! -v NNODES ]]; then
  fail "NODE_RANK is $NODE_RANK but NNODES is not set: how many machines are there?"
fi
# torchrun passes these on. SIGHUP not under nohup: torchrun would no longer ignore it.
signals=SIGTERM,SIGINT,SIGQUIT,SIGUSR1$([[ $(trap -p SIGHUP) ]] || echo ,SIGHUP)
show_and_run "${variables[@]}" "$python" -P -m torch.distributed.run "${nodes[@]}" \
  "--nproc-per-node=$processes" "--max-restarts=${MAX_RESTARTS:-0}" \
  "--signals-to-handle=$signals" --shutdown-timeout=600 ${share:+"$share"} "$script" "$@"
