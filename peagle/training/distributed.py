"""Distributed training: process groups, gradient sums, and a target sharded with FSDP2.

torchrun sets rank and world size. Every rank holds the whole drafter and computes the gradients of its own batches;
gradients are summed once per step, so all ranks take the same optimizer step and the drafters stay bitwise equal.
Numbers for the host (position counts, stop requests) use a gloo group on the CPU and never wait for a GPU.

A sharded target gathers each layer's matrices when the layer runs. Norms, embeddings and the LM head stay whole on
every rank: the layer before reads a norm ahead, and the loss reads the head.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from peagle.config import ALLREDUCE_ELEMENTS
from peagle.errors import UserError
from peagle.models.decoder import Decoder

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """The ranks of a run. With one rank every method is a no-op."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    cpu_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """True for the rank that writes files and prints."""
        return self.rank == 0

    def sum_in_place(self, flat_P: Tensor) -> None:
        if self.size > 1:
            for bucket in flat_P.split(ALLREDUCE_ELEMENTS):
                dist.all_reduce(bucket)

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Sums over ranks on the CPU; counts stay exact."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total, group=self.cpu_group)
        return total.tolist()

    def broadcast_from_main(self, value: T) -> T:
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.cpu_group)
        return values[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.cpu_group)

    def shutdown(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def init_distributed(device: torch.device) -> DistributedContext:
    """Joins the process group of torchrun; a process started without it is a world of one."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size > 1 and device.type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--nproc-per-node: torchrun started local rank {local_rank}, but this node has "
                f"{torch.cuda.device_count()} GPUs"
            )
        device = torch.device("cuda", local_rank)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current device
    if size == 1:
        return DistributedContext(device=device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    cpu_group = dist.new_group(backend="gloo") if device.type == "cuda" else dist.group.WORLD
    return DistributedContext(rank, size, device, cpu_group)


def shard_target(target: Decoder, world: DistributedContext) -> Decoder:
    """Shards the matrices of every layer over the ranks. The target must be on the CPU."""
    if world.size == 1:
        raise UserError("--shard-target: needs several processes; start them with torchrun")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    whole = {p for p in target.parameters() if p.dim() == 1 or p is target.embed_tokens.weight}
    whole |= set(target.lm_head.parameters())
    for layer in target.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    fully_shard(target, mesh=mesh, ignored_params=whole)  # prefetches the next layer while one runs
    for parameter in whole:
        parameter.data = parameter.data.to(world.device)
    for rope in target.ropes:
        rope.to(world.device)
    return target


def sharded_bytes(target: Decoder) -> int:
    """Bytes of the sharded parameters, over all ranks."""
    from torch.distributed.tensor import DTensor

    return sum(p.numel() * p.element_size() for p in target.parameters() if isinstance(p, DTensor))


@torch.no_grad()
def gather_target(target: Decoder, world: DistributedContext) -> Decoder | None:
    """Copies a sharded target to the main rank; all ranks must call it. The copy takes `sharded_bytes`, because it
    shares the parameters that every rank holds whole. Other ranks get None."""
    from torch.distributed.tensor import DTensor

    whole: dict[str, Tensor] = {}
    for name, parameter in target.named_parameters(remove_duplicate=False):
        tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        if world.is_main:
            whole[name] = tensor
    if not world.is_main:
        return None
    with torch.device("meta"):
        copy = Decoder(target.cfg)
    copy.load_state_dict(whole, assign=True)
    copy.tie_weights()
    copy.rope, copy.local_rope = target.rope, target.local_rope
    return copy.eval().requires_grad_(False)
