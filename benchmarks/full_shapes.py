"""GPT-OSS-20B and Qwen3-Coder-30B-A3B in their full shapes, with heads of the published shapes: peagle beside vLLM.

    python benchmarks/full_shapes.py --vllm-path DEST --out benchmarks/results/h200-full-shapes.json
    python benchmarks/full_shapes.py --vllm-path DEST --out benchmarks/results/h200-full-shapes.json --resume

Weights are random, spread so that a round's rows choose experts as different tokens would (`spread_weights.py`), and
acceptance is synthetic on both sides, at the lengths that are published. Draft i is kept with the unconditional rate

    exp(-(i / reach) ** bend)        GPT-OSS-20B on MT-Bench: reach 3.06, bend 1.10
                                     Qwen3-Coder-30B-A3B on HumanEval: reach 7.82, bend 1.42

fitted to the published lengths of all K; where K's own is published, reach is moved until the rates give it exactly.
No length of EAGLE-3 is published beside these, so it has P-EAGLE's at its K. Published figures are of real text with
an FP8 cache; here the cache is bf16, and experts are chosen by lot where text has favourites, which costs both sides
alike. GPT-OSS's experts are MXFP4 on both sides.

How workers start and are measured is `serving.py`'s. Qwen's 61 GB fit twice into an H200, so its engines come in pairs,
a pair of vLLM's before the same pair of peagle's; one call need not be enough, `--resume` goes on. `--tiny` runs it
all on the CPU in a toy size, to try the script itself; vLLM accepts no drafts there. Prints a table, then one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is imported from elsewhere

from full_shapes_models import MODELS, config_of
from serving import (
    GB,
    ROOT,
    SIDES,
    Engine,
    Generate,
    Json,
    Run,
    Session,
    add_common_arguments,
    check_names,
    measure_speed,
    run_session,
    worker,
    write_config,
    write_hollow,
)
from spread_weights import spread_peagle

CONCURRENCY = {"c1": 1, "c8": 8, "c64": 64}
PROMPT = OUTPUT = 256
REPEATS = {"c1": 3, "c8": 2, "c64": 2}
WINDOW = 8  # tokens among which a text should not repeat itself
HEAD_LAYERS = {"p-eagle": 4, "eagle3": 1}
HEAD_POSITIONS = {"theta": 500000.0, "kind": "llama3", "factor": 8.0, "original_max_positions": 8192}


@dataclass(frozen=True)
class Drafting:
    """One column of the comparison."""

    label: str
    head: str | None = None
    k: int = 0
    capture: int | None = None  # of vLLM, where 64 requests draft on more rows than its largest graph has


# In the order in which they are measured, as time may not be enough for all
DRAFTING = {
    "p7": Drafting("P-EAGLE K=7", "p-eagle", 7, 1024),
    "none": Drafting("no drafter"),
    "e3": Drafting("EAGLE-3 K=3", "eagle3", 3),
    "p3": Drafting("P-EAGLE K=3", "p-eagle", 3),
    "p5": Drafting("P-EAGLE K=5", "p-eagle", 5, 1024),
    "p10": Drafting("P-EAGLE K=10", "p-eagle", 10, 1536),
}


# P-EAGLE's best K over EAGLE-3's on a B200, and over no drafter: as published, over all its targets and datasets
PUBLISHED_RATIOS = {("EAGLE-3", "c1"): "1.55-1.69x (B200)", ("EAGLE-3", "c64"): "1.05-1.25x (B200)"}
PUBLISHED_RATIOS |= {("no drafter", "c1"): "2.1-4.2x"}


def write_models(names: list[str], tiny: bool, scratch: Path) -> dict[str, str]:
    """Name -> folder of every target, a config alone, and of its two heads, whole headers over holes."""
    import torch

    from peagle.checkpoints.drafter import config_values, drafter_layout, plain_name
    from peagle.checkpoints.target import read_target_config
    from peagle.config import DrafterConfig, LayerConfig, RopeConfig

    folders: dict[str, str] = {}
    for name in names:
        model, folder = MODELS[name], scratch / name
        values = config_of(model, tiny)
        write_config(folder, values)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": values["eos_token_id"]}))
        folders[name] = str(folder)
        target = read_target_config(folder)
        shape = target.layer
        mlp = 160 if tiny else model.head_mlp
        for head, layers in HEAD_LAYERS.items():
            cfg = DrafterConfig(
                vocab_size=target.vocab_size,
                draft_vocab_size=target.vocab_size,
                num_layers=layers,
                layer=LayerConfig(shape.hidden_size, mlp, shape.num_heads, shape.num_kv_heads, shape.head_dim, 1e-5),
                rope=RopeConfig(**HEAD_POSITIONS),  # type: ignore[arg-type]
                max_positions=target.max_positions,
                target_hidden_size=shape.hidden_size,
                aux_layer_ids=target.default_aux_layer_ids,
                mask_token_id=(target.vocab_size - 3 if tiny else model.mask_id) if head == "p-eagle" else None,
                own_embeddings=True,
                own_head=True,
            )
            shapes = {plain_name(n): slot.shape for n, slot in drafter_layout(cfg).items()}
            write_hollow(scratch / f"{name}-{head}", config_values(cfg, torch.bfloat16), shapes)
            folders[f"{name}-{head}"] = str(scratch / f"{name}-{head}")
    return folders


def weight_gb(name: str, side: str, head: str | None, folders: dict[str, str]) -> float:
    """What the weights take on the GPU: vLLM's as its config packs them, peagle's as its module has them."""
    import torch

    from peagle.checkpoints.drafter import read_drafter_config
    from peagle.checkpoints.target import read_target_config
    from peagle.engine.loader import unpacking_bytes
    from peagle.models.decoder import Decoder
    from peagle.models.drafter import Drafter
    from peagle.planning.shapes import target_shape

    def held(module: Any) -> float:
        return sum(p.numel() * (2 if p.is_floating_point() else p.element_size()) for p in module.parameters()) / GB

    with torch.device("meta"):
        if side == "vllm":
            target = target_shape(folders[name]).stored_bytes / GB
        else:
            cfg = read_target_config(Path(folders[name]), packed=True)
            target = held(Decoder(cfg)) + unpacking_bytes(cfg) / GB
        drafter = held(Drafter(read_drafter_config(Path(folders[f"{name}-{head}"])))) if head else 0.0
    return target + drafter


def wanted_engines(
    models: list[str], drafting: list[str], rows: list[str], sides: list[str], tiny: bool
) -> list[Engine]:
    """Every engine with its measurements, in the order in which they are worth having."""
    found: list[Engine] = []
    for name in models:
        model = MODELS[name]
        vocab = config_of(model, tiny)["vocab_size"]
        together = 2 if model.config.get("quantization_config") is None else len(DRAFTING)
        chosen = [one for one in model.drafting if one in drafting]
        for first in range(0, len(chosen), together):
            for side in sides:
                for key in chosen[first : first + together]:
                    one = DRAFTING[key]
                    engine = Engine(side, f"{name}-{key}", one.label, name, k=one.k, capture=one.capture)
                    found.append(
                        replace(
                            engine,
                            drafter=f"{name}-{one.head}" if one.head else None,
                            parallel=one.head == "p-eagle",
                            rates=model.rates(one.k),
                            synthetic=not (tiny and side == "vllm"),  # which cannot do it on the CPU
                            kv_bytes=int(model.cache_gb * GB),
                            max_num_seqs=4 if tiny else 64,
                            measures=[speed(row, one.head is not None, vocab, tiny) for row in rows],
                        )
                    )
    return found


def speed(row: str, drafted: bool, vocab: int, tiny: bool) -> Json:
    c = CONCURRENCY[row] if not tiny else {"c1": 1, "c8": 2, "c64": 4}[row]
    count = c if c > 1 or tiny or not drafted else 4  # without a drafter there is no luck to be averaged
    one = {"name": row, "kind": "speed", "concurrency": c, "count": count, "random": 24 if tiny else PROMPT}
    return one | {"max_tokens": 16 if tiny else OUTPUT, "repeats": 1 if tiny else REPEATS[row], "vocab": vocab}


def measure_apart(generate: Generate, measure: Json, job: Json) -> Json:
    """Speed, and how far tokens that follow each other differ: experts are read for each different one."""
    texts: list[list[int]] = []

    def kept(*given: Any, **more: Any) -> Run:
        run = generate(*given, **more)
        texts.extend(run.tokens)
        return run

    return measure_speed(kept, measure, job) | {"distinct_share": distinct_share(texts)}


def distinct_share(texts: list[list[int]]) -> float | None:
    """Of different tokens among `WINDOW` that follow each other."""
    shares = [len(set(text[i : i + WINDOW])) / WINDOW for text in texts for i in range(len(text) - WINDOW + 1)]
    return sum(shares) / len(shares) if shares else None


class FullShapes(Session):
    script = Path(__file__).resolve()
    filled = 0.95  # two of Qwen's
    batched_tokens = 8192 + 512
    warm_triton = True
    vllm_settings = {"worker_extension_cls": "spread_weights.SpreadWorker"}
    vllm_calls = ("spread_weights",)

    def write_inputs(self, engines: list[Engine]) -> list[Engine]:
        self.folders = write_models(sorted({e.target for e in engines}), self.args.tiny, self.scratch)
        beside = {"vllm": 4.2, "peagle": 3.5}  # activations, graphs and what CUDA takes
        sized = []
        for e in engines:
            head = e.drafter.removeprefix(f"{e.target}-") if e.drafter else None
            weights = weight_gb(e.target, e.side, head, self.folders)
            sized.append(replace(e, gpu_gb=weights + e.kv_bytes / GB + beside[e.side]))
        return sized

    def next_wave(self, queue: list[Engine]) -> list[Engine]:
        """Of one side and target: others would wait for vLLM's start, or take the place of its second one."""
        first = queue[0]
        wave = super().next_wave(queue)
        return list(takewhile(lambda e: (e.side, e.target) == (first.side, first.target), wave))

    def rows(self) -> list[Json]:
        rows: list[Json] = []
        for name, model in MODELS.items():
            for c in CONCURRENCY:
                rows += [one for key in model.drafting if (one := self.row(name, key, c))]
                rows += self.ratios(name, c)
        return rows

    def label(self, name: str) -> str:
        return f"toy {MODELS[name].label}" if self.args.tiny else MODELS[name].label

    def row(self, name: str, key: str, c: str) -> Json | None:
        """One drafting at one concurrency, both sides."""
        model, one = MODELS[name], {side: self.found(f"{side}/{name}-{key}", c) for side in SIDES}
        row: Json = {"row": f"{self.label(name)}, {DRAFTING[key].label}, {c[0]}={c[1:]}", "unit": "tok_s"}
        for side, found in one.items():
            if found is not None:
                row |= {side: found["tok_s"], f"{side}_al": found.get("al"), f"{side}_even": even(found)}
                row[f"{side}_distinct_share"] = found.get("distinct_share")
        if (published := model.tok_s.get((key, c))) is not None and not self.args.tiny:
            row["published"] = published
        if DRAFTING[key].k:
            row["promised_al"] = 1 + sum(model.rates(DRAFTING[key].k))
        vllm, peagle = one["vllm"], one["peagle"]
        if vllm and peagle:
            row |= {"ratio": peagle["tok_s"] / vllm["tok_s"], "ratio_at_equal_acceptance": even(peagle) / even(vllm)}
            if c == "c1" and not self.args.tiny:
                row |= {"goal": "1x", "met": row["ratio_at_equal_acceptance"] >= 1}
        return row if vllm or peagle else None

    def ratios(self, name: str, c: str) -> list[Json]:
        """P-EAGLE at its best K over EAGLE-3 and over no drafter, at the acceptance that the rates promise."""
        rows = []
        for other, label in (("e3", "EAGLE-3"), ("none", "no drafter")):
            row: Json = {"row": f"{self.label(name)}, P-EAGLE's best K over {label}, {c[0]}={c[1:]}", "unit": "x"}
            for side in SIDES:
                drafted = [key for key in MODELS[name].drafting if DRAFTING[key].head == "p-eagle"]
                speeds = {key: even(m) for key in drafted if (m := self.found(f"{side}/{name}-{key}", c))}
                base = self.found(f"{side}/{name}-{other}", c)
                if speeds and base:
                    best = max(speeds, key=lambda key: speeds[key])
                    row |= {side: speeds[best] / even(base), f"{side}_best": DRAFTING[best].label}
            if any(side in row for side in SIDES):
                rows.append(row | ({} if self.args.tiny else {"published": PUBLISHED_RATIOS.get((label, c))}))
        return rows

    def table(self, rows: list[Json]) -> str:
        lines = [("", "vLLM", "peagle", "ratio", "even", "published", "goal", "met")]
        for row in rows:
            ratio, same = row.get("ratio"), row.get("ratio_at_equal_acceptance")
            met = {True: "yes", False: "NO", None: ""}[row.get("met")]
            shown = row.get("published")
            published = "" if shown is None else shown if isinstance(shown, str) else f"{shown:,.0f}"
            figures = [f"{value:.2f}x" if value is not None else "" for value in (ratio, same)]
            lines.append(
                (row["row"], cell(row, "vllm"), cell(row, "peagle"), *figures, published, row.get("goal", ""), met)
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        alike = [row["row"] for row in rows if any((row.get(f"{s}_distinct_share") or 1) < 0.8 for s in SIDES)]
        if alike:
            text.append(f"tokens repeat, so fewer experts were read than text would need: {'; '.join(alike)}")
        return "\n".join(["output tokens/s; even: at the acceptance the rates promise", *text])


def even(found: Json) -> float:
    return float(found.get("even_tok_s") or found["tok_s"])


def cell(row: Json, side: str) -> str:
    value = row.get(side)
    if value is None:
        return "-"
    if row["unit"] == "x":
        return f"{value:.2f}x ({row[f'{side}_best'].removeprefix('P-EAGLE ')})"
    al = row.get(f"{side}_al") or 1
    return f"{value:,.0f}" + (f" (AL {al:.2f})" if al > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    for flag, known in (("--rows", CONCURRENCY), ("--targets", MODELS), ("--drafting", DRAFTING)):
        parser.add_argument(flag, default=",".join(known), help=f"of {','.join(known)}")
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, {"speed": measure_apart}, spread_peagle)
    rows, sides = check_names(parser, args.rows, CONCURRENCY), check_names(parser, args.sides, SIDES)
    models, drafting = check_names(parser, args.targets, MODELS), check_names(parser, args.drafting, DRAFTING)
    sys.path.insert(0, str(ROOT))
    run_session(FullShapes(args), wanted_engines(models, drafting, rows, sides, args.tiny))


if __name__ == "__main__":
    main()
