"""What to expect of a drafter before anything is bought: tokens a second by K and load, GPUs, cost.

Knows loads, money and memory; time comes from `roofline`, acceptance from `plan_curve`. All of it is paper:
docs/planning.md says how far it was off where it could be checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from peagle.config import PlanSettings, SpeculationMethod
from peagle.errors import UserError
from peagle.planning.curve import Curve
from peagle.planning.roofline import ENGINES, Engine, Machine, needed_bytes, prompt_seconds, round_seconds
from peagle.planning.shapes import MXFP4_BYTES, DrafterShape, Shape
from peagle.results.schema import PlanRow

GB = 1e9
NAMES: dict[str, str] = {"none": "no speculation", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}


@dataclass(frozen=True)
class Contender:
    """A drafter that could be deployed, and how much of its work holds."""

    shape: DrafterShape
    curve: Curve
    borrowed: bool = False  # the curve is another one's

    @property
    def method(self) -> SpeculationMethod:
        return self.shape.method


@dataclass(frozen=True)
class Plan:
    rows: list[PlanRow]
    machine: Machine
    recommendation: str
    notes: list[str] = field(default_factory=list)

    def best(self, concurrency: int, method: str | None = None) -> PlanRow | None:
        """The fastest row of a load, of one method or of all."""
        rows = [r for r in self.rows if r.concurrency == concurrency and method in (None, r.method)]
        return max(rows, key=lambda r: r.output_throughput, default=None)

    @property
    def loads(self) -> list[int]:
        return sorted({row.concurrency for row in self.rows})


def choose_engine(asked: str, target: Shape, tensor_parallel: int) -> Engine:
    """The embedded engine runs on one GPU, and was measured with bf16 weights and experts of four bits; of experts only
    for few rows, so vLLM is taken for them unless asked otherwise."""
    experts = any(target.moe)
    plain = target.weight_bytes >= 2 and (not experts or target.expert_bytes in (2.0, MXFP4_BYTES))
    if asked == "embedded" and (tensor_parallel > 1 or not plain):
        why = "several GPUs" if tensor_parallel > 1 else "weights quantized in this way"
        raise UserError(f"--engine embedded: nothing is known of its speed with {why}; use --engine vllm")
    able = tensor_parallel == 1 and plain and not experts
    return ENGINES["embedded" if asked == "embedded" or (asked == "auto" and able) else "vllm"]


def make_plan(machine: Machine, target: Shape, contenders: list[Contender], settings: PlanSettings) -> Plan:
    _check_split(machine, target)
    guesses = {c.curve.source for c in contenders if c.curve.guessed}
    notes = [f"acceptance is {source}: give --rates, --acceptance-length or --results" for source in sorted(guesses)]
    notes += [f"{NAMES[c.method]} is taken to accept as much: give --eagle3-rates" for c in contenders if c.borrowed]
    if machine.engine.name == "embedded" and any(target.moe):
        notes.append("with experts, rounds of more than 64 rows come out 30 to 75% too fast")
    loads, refused = _fitting(machine, target, contenders, settings)
    notes += refused
    rows = [row for c in loads for row in _rows(machine, target, contenders, settings, c)]
    if settings.per_user is not None:
        kept = [r for r in rows if r.output_throughput / r.concurrency >= settings.per_user]
        if not kept:
            most = max(rows, key=lambda r: r.output_throughput / r.concurrency)
            raise UserError(
                f"--per-user {settings.per_user:g}: out of reach here; the most is "
                f"{most.output_throughput / most.concurrency:.0f} ({_how(most)}, {most.concurrency} at once)"
            )
        rows = kept
    fastest = {c: max((r for r in rows if r.concurrency == c), key=_speed) for c in {r.concurrency for r in rows}}
    rows = [replace(row, chosen=row is fastest[row.concurrency]) for row in rows]
    plan = Plan(rows, machine, "", notes)
    if settings.load is not None or settings.per_user is not None:
        methods = ["none", *(c.method for c in contenders)]
        return replace(plan, recommendation=_for_a_load(plan, settings, methods))
    return replace(plan, recommendation=_by_load(plan))


def _rows(
    machine: Machine, target: Shape, contenders: list[Contender], settings: PlanSettings, concurrency: int
) -> Iterator[PlanRow]:
    yield _row(machine, target, None, settings, concurrency, 0)
    for contender in contenders:
        for k in settings.drafts:
            yield _row(machine, target, contender, settings, concurrency, k)


def _row(
    machine: Machine, target: Shape, contender: Contender | None, settings: PlanSettings, concurrency: int, k: int
) -> PlanRow:
    """Requests come and go: for each that ends a prompt is read, and all the others wait for it."""
    shape = contender.shape if contender is not None else None
    prompt, output = settings.prompt_tokens, settings.output_tokens
    one = round_seconds(machine, target, shape, k, concurrency, prompt + output / 2, output)
    reading = prompt_seconds(machine, target, shape, prompt, concurrency)
    rounds = (output - 1 if prompt else output) / (contender.curve.length(k) if contender is not None else 1.0)
    speed = concurrency * output / (rounds * one + concurrency * reading)
    parts, price = machine.tensor_parallel, machine.gpu.price
    copies = math.ceil(settings.load / speed) if settings.load is not None else 1
    return PlanRow(
        concurrency=concurrency,
        num_speculative_tokens=k,
        method=contender.method if contender is not None else "none",
        step_ms=one * 1e3,
        output_throughput=speed,
        num_gpus=copies * parts,
        cost_per_million_tokens=price * parts / 3600 / speed * 1e6 if price is not None else None,
        chosen=False,
    )


def _check_split(machine: Machine, target: Shape) -> None:
    if (parts := machine.tensor_parallel) > 1 and target.heads % parts:
        fits = [n for n in range(2, target.heads + 1) if target.heads % n == 0]
        known = ", ".join(map(str, fits))
        raise UserError(f"--tensor-parallel {parts}: {target.name} has {target.heads} heads; give one of {known}")


def _fitting(
    machine: Machine, target: Shape, contenders: list[Contender], settings: PlanSettings
) -> tuple[list[int], list[str]]:
    """The loads whose weights, keys and values fit into memory, and what is to be said of the others."""
    shapes = [c.shape for c in contenders]
    largest = max(shapes, key=lambda s: s.stored_bytes, default=None)
    tokens = settings.prompt_tokens + settings.output_tokens

    def left(parts: int) -> float:
        """Bytes for keys and values, over all GPUs that hold a copy."""
        room = parts * (machine.gpu.memory * settings.memory_fraction - settings.reserved)
        return room - needed_bytes(target, largest, tokens)[0]

    def each(parts: int) -> float:
        """Bytes a request caches, over all of them."""
        return needed_bytes(target, largest, tokens, parts)[1]

    def enough(requests: int) -> str:
        """What would hold so many."""
        sizes = [n for n in range(1, settings.most_gpus + 1) if target.heads % n == 0]
        found = next((n for n in sizes if left(n) >= requests * each(n)), None)
        return f"--tensor-parallel {found} fits" if found is not None else f"not even {settings.most_gpus} GPUs fit"

    parts = machine.tensor_parallel
    weights = needed_bytes(target, largest, tokens)[0]
    room, one = left(parts), each(parts)
    if room < one:
        usable = parts * (machine.gpu.memory * settings.memory_fraction - settings.reserved)
        raise UserError(
            f"{target.name} on {parts} {machine.gpu.name}: weights take {weights / GB:,.1f} GB, a request of "
            f"{tokens:,} tokens {one / GB:,.2f} GB, and {usable / GB:,.1f} GB are usable; {enough(1)}"
        )
    most = int(room / one)
    fitting = [c for c in settings.concurrency if c <= most]
    notes = [
        f"--concurrency {c}: requests of {tokens:,} tokens need {c * one / GB:,.1f} GB of cache, {room / GB:,.1f} GB "
        f"are free: at most {most} fit; {enough(c)}"
        for c in sorted(set(settings.concurrency))
        if c > most
    ]
    if not fitting:
        raise UserError(notes[0])
    if settings.concurrency == settings.searched:
        notes = []  # these loads were ours to choose, so those that do not fit are no news
    return sorted(set(fitting)), notes


def _speed(row: PlanRow) -> float:
    return row.output_throughput


def _how(row: PlanRow) -> str:
    return (
        f"{NAMES[row.method]} with K={row.num_speculative_tokens}" if row.num_speculative_tokens else NAMES[row.method]
    )


def _dollars(row: PlanRow) -> str:
    assert row.cost_per_million_tokens is not None
    return f"${row.cost_per_million_tokens:.3g}"


def _by_load(plan: Plan) -> str:
    """One sentence: what to run at which load, and what it brings."""
    parts = []
    for c in plan.loads:
        best, plain, other = plan.best(c), plan.best(c, "none"), plan.best(c, "eagle3")
        assert best is not None and plain is not None
        gain = (
            f"{_speed(best) / _speed(plain):.2f}x no speculation"
            if best.num_speculative_tokens
            else "which no drafter beats"
        )
        if other is not None and best.method == "p-eagle":
            gain += f", {_speed(best) / _speed(other):.2f}x EAGLE-3 with K={other.num_speculative_tokens}"
        if best.cost_per_million_tokens is not None and best.num_speculative_tokens:
            gain += f", {_dollars(best)} instead of {_dollars(plain)} per million tokens"
        parts.append(f"{_how(best)} at {c} request{'s' * (c > 1)} at once ({gain})")
    return f"Use {'; '.join(parts)}."


def _for_a_load(plan: Plan, settings: PlanSettings, methods: Sequence[str]) -> str:
    """One sentence: the cheapest way to serve it, and what the other ways take."""
    cheapest = {
        method: max((r for r in plan.rows if r.method == method), key=_speed, default=None) for method in methods
    }
    found = [row for row in cheapest.values() if row is not None]
    best = max(found, key=_speed)
    name = plan.machine.gpu.name
    wanted = f" for {settings.load:,.0f} tokens/s" if settings.load is not None else ""
    each = _speed(best) / best.concurrency
    sentence = f"Use {best.num_gpus} {name}{wanted}, {_how(best)}, {best.concurrency} requests at once on each copy"
    sentence += f" ({each:,.0f} tokens/s each"
    sentence += f", {_dollars(best)} per million)" if best.cost_per_million_tokens is not None else ")"
    others = []
    for method, row in cheapest.items():
        if method == best.method:
            continue
        if row is None:
            others.append(f"{NAMES[method]} does not reach {settings.per_user:g} tokens/s each")
        else:
            cost = f", {_dollars(row)} per million" if row.cost_per_million_tokens is not None else ""
            others.append(f"{_how(row)} takes {row.num_gpus} ({row.concurrency} at once{cost})")
    return f"{sentence}; {'; '.join(others)}."
