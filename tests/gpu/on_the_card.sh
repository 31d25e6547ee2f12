#!/usr/bin/env bash
# What a machine with one GPU is asked to show, in at most 6 minutes; parts that are not over by
# their limit are cut off:
#
#     bash tests/gpu/on_the_card.sh 2>&1 | tee on-the-card.txt
#
# Without a GPU the tests are skipped. CARD_MODEL="--model tiny" and such options make bench small.
cd "$(dirname "$0")/../.." || exit
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
if [[ $(python3 -c 'import torch; print(torch.__version__)') = 2.11.* ]]; then
  PYTHONPATH=$PWD/tests/gpu/torch211:$PWD
fi
# Workers of pytest-xdist show what tests print by -rP alone.
workers=$(python3 -c 'import xdist' 2>/dev/null && echo "-n 7")
model=${CARD_MODEL:---model llama3-1b --seq-len 2048 --batch-size 8 --dtype bfloat16 --compile}

part() {
  local limit=$1 name=$2 began=$SECONDS
  shift 2
  echo "=== $name, at most $limit s"
  timeout "$limit" "$@"
  echo "=== status $?, $((SECONDS - began)) s"
}

tests="python3 -m pytest -q -rP --no-header tests/gpu/test_cuda.py"
part 110 "each script over NCCL, on ranks that share the card, beside one process on the CPU" \
  $tests $workers -k "not llama and not host_memory and not records"
part 60 "predicted and held bytes" $tests -k "llama and (single or fsdp) and not compile"
part 50 "replicas in host memory, three times" $tests -k host_memory
for script in single fsdp; do
  part 70 "speed of $script.py" python3 -m torch.distributed.run --standalone \
    --nproc-per-node=1 tools/bench.py $script.py $model --steps 25
done
