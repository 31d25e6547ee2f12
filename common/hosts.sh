#!/usr/bin/env bash
# Part of run.sh: start it on several machines over ssh.
# shellcheck disable=SC2154,SC2153  # here, python, script and HOSTS are run.sh's

# Print the commands for host number $1. A bash there reads them from a pipe from this process, which
# then sends a line every second. "stop" asks the run to save and end, "now" ends it at once. If no
# line comes, this process or the network is dead: the run saves and ends.
remote_commands() {
  local name settings=("NNODES=${#hosts[@]}" "NODE_RANK=$1" "MASTER_ADDR=${MASTER_ADDR:-${hosts[0]#*@}}")
  [ "$python" = "$here/.venv/bin/python" ] || settings+=("PYTHON=$(command -v "$python")")
  for name in NPROC MASTER_PORT MAX_RESTARTS {DP,TP,CP,PP}_SIZE "${!NCCL_@}" "${!GLOO_@}" "${!TORCH_@}" \
    "${!PYTORCH_@}" "${!FI_@}" "${!UCX_@}" "${!OMP_@}" "${!CUDA_@}"; do
    [[ ! -v $name ]] || settings+=("$name=${!name}")
  done
  shift
  cat <<REMOTE
{
  set -m  # the run is a process group of its own
  cd $(printf %q "$PWD") || exit
  env -u HOSTS $(printf '%q ' "${settings[@]}") bash $(printf '%q ' "$here/run.sh" "$script" "$@") </dev/null &
  run=\$!
  {
    while read -r -t 60 word && [ "\$word" != now ]; do [ "\$word" != stop ] || kill -- -\$run; done
    kill -- -\$run
    [ "\$word" != now ] || { sleep 1.5; kill -- -\$run; }
  } <&0 >/dev/null 2>&1 &
  watch=\$!
  status=0; wait \$run 2>/dev/null || status=\$?
  kill -- -\$watch 2>/dev/null
  exit \$status
}
REMOTE
}

tell_hosts() {
  local pipe
  for pipe in "${pipes[@]}"; do { echo "$1" >&"$pipe"; } 2>/dev/null || true; done
}

# At the first signal let all hosts save; at a second signal end at once, with status $1.
ask_hosts() {
  [ -z "$asked" ] || exit "$1"
  asked=$1
  tell_hosts stop
}

stop_hosts() {
  local pipe tries
  tell_hosts now
  for pipe in "${pipes[@]}"; do exec {pipe}>&-; done  # the hosts notice at once
  for ((tries = 0; tries < 80; tries++)); do
    kill -0 "${sessions[@]}" 2>/dev/null || return 0
    sleep 0.5
  done
  kill "${sessions[@]}" 2>/dev/null || true
}

# Over ssh: start this file on each of HOSTS, and stop all when one fails.
run_on_hosts() {
  local host pipe status fifos failed=()
  sessions=() pipes=() asked=  # for each host: its ssh, and the pipe to it
  read -ra hosts <<<"${HOSTS//$'\n'/ }"
  fifos=$(mktemp -d)
  trap 'stop_hosts' EXIT
  trap 'ask_hosts 129' HUP
  trap 'ask_hosts 130' INT
  trap 'ask_hosts 138' USR1
  trap 'ask_hosts 143' TERM
  trap '' PIPE
  for host in "${!hosts[@]}"; do
    mkfifo "$fifos/$host"
    (
      for pipe in "${pipes[@]}"; do exec {pipe}>&-; done  # only run.sh itself may hold these pipes
      trap '' INT HUP USR1  # a terminal sends Ctrl-C to ssh too
      # shellcheck disable=SC2086  # SSH may be several words
      exec ${SSH:-ssh} -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 "${hosts[host]}" bash -s
    ) <"$fifos/$host" &
    sessions[host]=$!
    exec {pipe}>"$fifos/$host"
    pipes[host]=$pipe
    { remote_commands "$host" "$@" >&"$pipe"; } 2>/dev/null || true  # the host may be gone already
  done
  rm -r "$fifos"
  while [ ${#sessions[@]} -gt 0 ]; do
    for host in "${!sessions[@]}"; do
      if kill -0 "${sessions[host]}" 2>/dev/null; then
        { echo >&"${pipes[host]}"; } 2>/dev/null || true
        continue
      fi
      status=0
      wait "${sessions[host]}" || status=$?
      unset "sessions[host]"
      [ "$status" -eq 0 ] || failed+=("${hosts[host]} ended with status $status")
      [ "$status" -ne 255 ] || failed[-1]="${hosts[host]} cannot be reached by ssh, or was lost"
    done
    if [ ${#failed[@]} -gt 0 ]; then
      stop_hosts
      trap - EXIT
      [ -z "$asked" ] || exit "$asked"
      fail "$(printf '%s; ' "${failed[@]}")all are stopped"
    fi
    sleep 1
  done
  trap - EXIT
}
