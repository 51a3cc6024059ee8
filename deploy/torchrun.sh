#!/usr/bin/env bash
# Starts one node of a multi-node training run; run the same line on every node, in any order.
#
#   NODES=4 HEAD=node0:29500 deploy/torchrun.sh --recipe recipes/gpt-oss-120b-p-eagle.toml --out /shared/drafter
#
# Arguments go to `peagle train`; --out, the data and --vllm-hidden-states must be on a disk that all nodes share.
# The run saves every few minutes. If a node fails, all stop; the same lines resume from the last save.
#
#   NODES  number of nodes                           1
#   HEAD   host and free port of one of them         localhost:29500
#   GPUS   processes on this node, one per GPU       all GPUs of nvidia-smi
#   RUN    name of the run, distinct per HEAD        peagle
set -euo pipefail

NODES=${NODES:-1}
HEAD=${HEAD:-localhost:29500}
RUN=${RUN:-peagle}
if [[ -z ${GPUS:-} ]]; then
  GPUS=$(nvidia-smi --list-gpus | wc -l)
fi

exec python -m torch.distributed.run \
  --nnodes "$NODES" --nproc-per-node "$GPUS" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "$RUN" \
  -m peagle train "$@"
