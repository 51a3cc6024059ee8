#!/usr/bin/env bash
# One node's part of a training run over several nodes; the same line on every node, in any order.
#
#   NODES=4 HEAD=node0:29500 deploy/torchrun.sh --recipe recipes/gpt-oss-120b-p-eagle.toml --out /shared/drafter
#
# What follows the script goes to `peagle train`; --out, the data and --vllm-states lie on a disk that all nodes share.
# The run saves every few minutes. If a node is lost, all stop; the same lines go on from the last save.
#
#   NODES  how many there are                        1
#   HEAD   one of them, and a free port on it        localhost:29500
#   GPUS   processes on this node, one for each GPU  as many as nvidia-smi lists
#   RUN    a name, different for runs that share a HEAD
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
