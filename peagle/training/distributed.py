"""Several processes that train one drafter: who they are, and what they tell each other.

Knows nothing about losses or data. torchrun says who is who. Every rank holds the whole drafter and computes the
gradients of its own batches; they are summed once a step, after all chunks, and since every rank then takes the same
step the drafters stay equal bit by bit. What the host needs to know (row counts, whether someone asked to stop) goes
over a gloo group on the CPU, so that no GPU is waited for.

A target that does not fit is spread over the ranks by FSDP2: each layer's matrices are gathered when it runs. Norms,
embeddings and the head stay whole: the layer before reads a norm ahead, and the loss reads the head. Where one rank
must run the target alone, `gathered` makes it a whole copy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from peagle.config import GRAD_BUCKET
from peagle.errors import UserError
from peagle.models.decoder import Decoder

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """The processes of a run; one alone has nothing to say to anybody."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    hosts: dist.ProcessGroup | None = None  # the CPU side

    @property
    def first(self) -> bool:
        """Writes files and talks to the user."""
        return self.rank == 0

    def sum_in_place(self, flat_P: Tensor) -> None:
        if self.size > 1:
            for bucket in flat_P.split(GRAD_BUCKET):
                dist.all_reduce(bucket)

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """On the hosts; counts stay exact."""
        if self.size == 1:
            return list(numbers)
        told = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(told, group=self.hosts)
        return told.tolist()

    def from_first(self, value: T) -> T:
        """What the first rank has; the others' own values are dropped."""
        if self.size == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, group=self.hosts)
        return told[0]

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.hosts)

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def join(device: torch.device) -> DistributedContext:
    """The world torchrun made, or this process alone."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size > 1 and device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        if local >= torch.cuda.device_count():
            raise UserError(f"torchrun started rank {local} here, but there are {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", local)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current one
    if size == 1:
        return DistributedContext(device=device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    hosts = dist.new_group(backend="gloo") if device.type == "cuda" else dist.group.WORLD
    return DistributedContext(rank, size, device, hosts)


def shard(target: Decoder, world: DistributedContext) -> Decoder:
    """Spreads the matrices of every layer over the ranks; call on a target that lies on the CPU."""
    if world.size == 1:
        raise UserError("--shard-target: there is one process; start several with torchrun")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    whole = {p for p in target.parameters() if p.dim() == 1 or p is target.embed_tokens.weight}
    whole |= set(target.lm_head.parameters())
    for layer in target.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    fully_shard(target, mesh=mesh, ignored_params=whole)  # the next layer is asked for while one runs
    for parameter in whole:
        parameter.data = parameter.data.to(world.device)
    for rope in target.ropes:
        rope.to(world.device)
    return target


def spread_bytes(target: Decoder) -> int:
    """Of all ranks' shares together."""
    from torch.distributed.tensor import DTensor

    return sum(p.numel() * p.element_size() for p in target.parameters() if isinstance(p, DTensor))


@torch.no_grad()
def gathered(target: Decoder, world: DistributedContext) -> Decoder | None:
    """A whole copy of a spread target for the first rank, which all ranks must help to make. What each of them has
    whole is shared with it, so it takes `spread_bytes`."""
    from torch.distributed.tensor import DTensor

    whole: dict[str, Tensor] = {}
    for name, parameter in target.named_parameters(remove_duplicate=False):
        tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        if world.first:
            whole[name] = tensor
    if not world.first:
        return None
    with torch.device("meta"):
        copy = Decoder(target.cfg)
    copy.load_state_dict(whole, assign=True)
    copy.tie_weights()
    copy.rope, copy.local_rope = target.rope, target.local_rope
    return copy.eval().requires_grad_(False)
