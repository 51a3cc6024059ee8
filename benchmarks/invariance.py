"""Whether a row's bits depend on who is computed with it, kernel by kernel; and what a round takes.

    python benchmarks/invariance.py

A target of SmolLM2-135M's shape with random weights. Each of its layers gets the same inputs for 64 rows (8 requests of
8) and for fewer, and what its kernels make of the rows both have is compared bit by bit: "equal", or how many layers
differ and the first of them. Where several kernels differ the uppermost is the cause. Then whole passes, where the
count is of rows. The last part times rounds of that shape and of 8 billion parameters; what the budget of seconds does
not reach is left out. One JSON line at the end.

Shapes: T rows, B requests, Q rows of a request, D width.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from round import build, fill, timed

from peagle.engine.cuda_graphs import RoundGraphs
from peagle.engine.model_runner import Cache, PagedAttend, Runner
from peagle.kernels.attention.paged import Pages
from peagle.kernels.attention.rotary import Rotation
from peagle.kernels.norm.rms_norm import Stream
from peagle.kernels.sampling.sample import choose
from peagle.models.decoder import Decoder
from peagle.models.layers import project, project_onto

ROWS = (1, 8, 16, 17, 64)
BATCHES = (1, 4, 8)
STARTS = (5, 63, 64, 130, 500, 700, 1000, 1500)  # of the 8 requests: around the ends of tiles, and in their middle
Q = 8
LONGEST = 2048
LINES = (
    "qkv, first layer",
    "o",
    "sums of squares after o",
    "gate and up",
    "down",
    "sums of squares after down",
    "qkv",
    "attention",
    "last norm",
    "head",
    "choice",
)


class Table:
    """By kernel and case: the layers in which some row differs."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, list[int]]] = {}

    def note(self, line: str, case: str, layer: int, have: Tensor, want: Tensor) -> None:
        differing = self.found.setdefault(line, {}).setdefault(case, [])
        if not torch.equal(have, want):
            differing.append(layer)

    def show(self) -> None:
        for line in sorted(self.found, key=lambda name: LINES.index(name) if name in LINES else len(LINES)):
            cases = self.found[line]
            if not any(cases.values()):
                print(f"  {line:30} equal: {', '.join(cases)}")
                continue
            said = [f"{c}: {f'{len(d)} layers, first {d[0]}' if d else 'equal'}" for c, d in cases.items()]
            print(f"  {line:30} DIFFERS  {'; '.join(said)}")


def summed(stream: Stream) -> Tensor:
    """What 1 / rms is made of."""
    assert stream.squares is not None
    return stream.squares.double().sum(0).float()


class Setting:
    """8 requests with cached keys, and everything the kernels read, for 64 rows."""

    def __init__(self, target: Decoder) -> None:
        cfg, device = target.cfg, target.embed_tokens.weight.device
        self.target, self.device = target, device
        per = LONGEST // 16
        own = cfg.layer
        blocks = 1 + len(STARTS) * per
        self.cache = Cache.make(cfg.num_layers, blocks, own.num_kv_heads, own.head_dim, target.embed_tokens.weight)
        fill(self.cache)
        order = torch.randperm(len(STARTS) * per, device=device)
        self.tables = 1 + order.view(len(STARTS), per).int()
        self.starts = torch.tensor(STARTS, dtype=torch.int32, device=device)
        self.tokens = torch.randint(cfg.vocab_size, (len(STARTS), Q), device=device)
        self.positions = self.starts[:, None] + torch.arange(Q, device=device)

    def pages(self, batch: int, first: int, rows: int) -> Pages:
        """Rows `first` to `first + rows` of the first requests; earlier ones are in the cache already."""
        live = torch.full((batch,), rows, dtype=torch.int32, device=self.device)
        return Pages(self.tables[:batch], self.starts[:batch] + first, live, rows)

    def at(self, batch: int, first: int, rows: int) -> Tensor:
        """Where these are among the 64."""
        each = torch.arange(len(STARTS) * Q, device=self.device).view(-1, Q)
        return each[:batch, first : first + rows].flatten()


def layer_chain(model: Decoder, i: int, x: Tensor, attended: Tensor) -> dict[str, Tensor]:
    """What layer i and the next one's first product make of some rows of x, the heads having seen `attended`."""
    layers: list[Any] = list(model.layers)
    layer, following = layers[i], layers[(i + 1) % len(layers)]
    attention, mlp, mlp_norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    after = project_onto(x, attention.o_proj, attended, mlp_norm)
    hidden = project(mlp.gate_up_proj, after, norm=mlp_norm, glu=True)
    down = project_onto(after.x, mlp.down_proj, hidden, following.input_layernorm)
    result = {"o": after.x, "sums of squares after o": summed(after), "gate and up": hidden, "down": down.x}
    result["sums of squares after down"] = summed(down)
    result["qkv"] = project(following.self_attn.qkv_proj, down, norm=following.input_layernorm)
    if i == 0:
        result["qkv, first layer"] = project(attention.qkv_proj, Stream(x), norm=layer.input_layernorm)
    if i == len(layers) - 1:
        result["last norm"] = model.norm(down.x)
        result["head"] = model.logits(result["last norm"])
        off, seeds = torch.zeros(len(x), device=x.device), torch.zeros(len(x), dtype=torch.long, device=x.device)
        result["choice"] = choose(result["head"], off, seeds, off + 1, off, seeds, seeds)
    return result


def check_products(s: Setting, table: Table) -> None:
    x = s.target.embed_tokens(s.tokens.flatten())
    for i in range(s.target.cfg.num_layers):
        attended = torch.randn_like(x)
        want = layer_chain(s.target, i, x, attended)
        for rows in ROWS:
            for line, have in layer_chain(s.target, i, x[:rows], attended[:rows]).items():
                table.note(line, f"{rows} rows", i, have, want[line][:rows])
        x = want["down"]


def attend_some(s: Setting, layer: int, qkv: Tensor, rotation: Rotation, batch: int, first: int, rows: int) -> Tensor:
    # Pages come first: they must be there before a plain kernel runs, as the attention may start early.
    attend, at = PagedAttend(s.cache, s.pages(batch, first, rows)), s.at(batch, first, rows)
    own = s.target.cfg.layer
    q, k, v = qkv[at].split([own.num_heads, own.num_kv_heads, own.num_kv_heads], 1)
    return attend(layer, q, k, v, None, rotation=Rotation(rotation.cos[at], rotation.sin[at]))


def check_attention(s: Setting, table: Table) -> None:
    own = s.target.cfg.layer
    rotation = Rotation(*s.target.rope(s.positions.flatten().long(), torch.bfloat16))
    shape = (len(STARTS) * Q, own.num_heads + 2 * own.num_kv_heads, own.head_dim)
    for layer in range(0, s.target.cfg.num_layers, 5):
        qkv = torch.randn(shape, dtype=torch.bfloat16, device=s.device)
        want = attend_some(s, layer, qkv, rotation, len(STARTS), 0, Q)
        for batch in BATCHES:
            for rows in (1, Q):
                for first in (0, 3, Q - 1) if rows == 1 else (0,):
                    have = attend_some(s, layer, qkv, rotation, batch, first, rows)
                    table.note("attention", f"{batch} x {rows} rows", layer, have, want[s.at(batch, first, rows)])


def check_passes(s: Setting, table: Table) -> None:
    """Verifying 8 rows of 8 requests against decoding the same tokens one by one, 8, 4 and 1 at a time."""

    def run(batch: int, first: int, rows: int) -> Tensor:
        attend, at = PagedAttend(s.cache, s.pages(batch, first, rows)), s.at(batch, first, rows)
        hidden, _ = s.target(s.tokens.flatten()[at], s.positions.flatten()[at].long(), attend)
        return s.target.logits(hidden)

    want = run(len(STARTS), 0, Q)
    for batch in BATCHES:
        for first in range(Q):
            table.note("whole pass", f"{batch} x 1 row", first, run(batch, first, 1), want[s.at(batch, first, 1)])
        table.note("whole pass", f"{batch} x {Q} rows", 0, run(batch, 0, Q), want[s.at(batch, 0, Q)])


def time_rounds(shape: str, device: torch.device, context: int = 512, drafts: int = 7) -> dict[str, float]:
    """Milliseconds of a round of 1 and of 8 requests."""
    target, drafter = build(shape, 4, True, device)
    longest, most, sizes = context + 64, 8, [1, 8]
    per = -(-longest // 16)
    runner = Runner(target, drafter, 1 + most * per, most, longest, drafts, [0.0] * drafts)
    fill(runner.cache)
    order = torch.randperm(most * per, device=device)
    runner.state.block_tables_SM[:most] = 1 + order.view(most, per).int()
    graphs = RoundGraphs(runner, sizes, [drafts])
    graphs.capture()
    found = {}
    for batch in sizes:
        recorded = graphs.rounds[batch, drafts]
        recorded.slots_B.copy_(torch.arange(batch, device=device))
        times = []
        for _ in range(5):
            runner.state.start_S[:most] = context
            times.append(timed(recorded))
        found[f"{shape} c={batch}"] = min(times)
        print(f"  {shape:8} {batch} at once: {min(times):.3f} ms a round, context {context}, K={drafts}", flush=True)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--budget", type=float, default=60, help="seconds after which no further part begins")
    parser.add_argument("--shapes", nargs="*", default=["smollm2", "8b"], help="as of round.py: whose rounds are timed")
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda")
    torch.manual_seed(0)
    target = build("smollm2", 0, True, device)[0]
    target.layers = target.layers[: args.layers]
    target.cfg = replace(target.cfg, num_layers=args.layers, windows=(None,) * args.layers)
    setting, table = Setting(target), Table()
    parts: list[tuple[str, Callable[[Setting, Table], None]]] = [
        ("products", check_products),
        ("attention", check_attention),
        ("passes", check_passes),
    ]
    for name, check in parts:
        check(setting, table)
        print(f"{name} checked after {time.monotonic() - began:.0f} s", flush=True)
    table.show()
    del target, setting
    times: dict[str, float] = {}
    for shape in args.shapes:
        # A shape takes about 20 s where nothing is compiled yet.
        if time.monotonic() - began < args.budget - 10:
            times |= time_rounds(shape, device)
    equal = {line: not any(cases.values()) for line, cases in table.found.items()}
    line = {"bench": "invariance", "layers": args.layers, "equal": equal, "differing": table.found, "ms": times}
    line |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "seconds": time.monotonic() - began}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
