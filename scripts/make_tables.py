"""Write the tables of README.md and docs/performance.md from benchmarks/results/.

    python scripts/make_tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A table whose results are missing stays empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/performance.md")
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
METHODS = {"none": "no speculation", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}
SAMPLING = {"greedy": "greedy", "penalty": "penalties", "sampled": "temperature 0.7", "json_schema": "JSON schema"}
SAMPLING |= {"logprobs": "logprobs"}
HTTP_MODELS = {
    "llama-8b": "Llama-3.1-8B, 256 prompt and 256 output tokens",
    "llama-8b-16k": "Llama-3.1-8B, 16,384 prompt and 512 output tokens",
    "gpt-oss-20b": "GPT-OSS-20B, 256 prompt and 256 output tokens",
    "qwen3-coder-30b-a3b": "Qwen3-Coder-30B-A3B, 256 prompt and 256 output tokens",
    "smollm2": "SmolLM2-135M with the included drafters, real prompts, answers of up to 256 tokens",
}
DATASETS = {"mt_bench": "MT-Bench", "humaneval": "HumanEval", "gsm8k": "GSM8K"}

Json = dict[str, Any]


def load_json(name: str) -> Json | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def load_header(loads: Sequence[int]) -> list[str]:
    return ["1 request" if load == 1 else f"{load} requests" for load in loads]


def label_of(configuration: str) -> str:
    """'peagle-p-eagle-k7' -> 'P-EAGLE K=7'"""
    name = configuration.partition("-")[2]
    method, _, k = name.partition("-k")
    return METHODS[method] + (f" K={k}" if k else "")


class Comparison:
    """Results of compare_vllm.py: output tokens/s by engine, method with K, and concurrency."""

    def __init__(self, results: Json) -> None:
        self.rates: dict[str, dict[str, dict[int, float]]] = {"vllm": {}, "peagle": {}}
        for configuration, measured in results["measurements"].items():
            rates = {int(c): one.get("output_tokens_per_second", 0.0) for c, one in measured.items()}
            self.rates[configuration.partition("-")[0]][label_of(configuration)] = rates
        self.loads = sorted(next(iter(self.rates["peagle"].values())))

    def best(self, engine: str, load: int) -> tuple[str, float]:
        found = {label: rates[load] for label, rates in self.rates[engine].items()}
        label = max(found, key=lambda one: found[one])
        return label, found[label]

    def ratio(self, load: int) -> float:
        return self.best("peagle", load)[1] / self.best("vllm", load)[1]

    def rows(self) -> list[list[str]]:
        """Every configuration, then the best of each engine."""
        labels = dict.fromkeys([*self.rates["vllm"], *self.rates["peagle"]])
        rows = []
        for label in labels:
            pairs = [[self.rates[e].get(label, {}).get(load) for e in ("vllm", "peagle")] for load in self.loads]
            cells = ["/".join(f"{rate:,.0f}" if rate else "-" for rate in pair) for pair in pairs]
            rows.append([label, *cells])
        return [*rows, ["best peagle over best vLLM", *(f"**{self.ratio(load):.2f}x**" for load in self.loads)]]


def vllm_table(name: str) -> str:
    results = load_json(name)
    if results is None:
        return ""
    found = Comparison(results)
    return markdown(["vLLM/peagle", *load_header(found.loads)], found.rows())


def readme_table() -> str:
    """Both servers with a target of the size people serve."""
    found = read_http_rows("llama-8b")
    loads = sorted({concurrency for concurrency, sampling, *_ in found if sampling == "greedy"})
    if not loads:
        return ""
    rows = []
    for label, which in (("", "steady"), ("first requests of a fresh server", "cold")):
        rates = {
            engine: [found[load, "greedy", which, engine]["output_tokens_per_second"] for load in loads]
            for engine in ("vllm", "peagle")
        }
        if which == "steady":
            rows += [["vLLM 0.26", *(f"{r:,.0f}" for r in rates["vllm"])]]
            rows += [["peagle", *(f"{r:,.0f}" for r in rates["peagle"])]]
        rows.append([label, *(f"**{p / v:.2f}x**" for v, p in zip(rates["vllm"], rates["peagle"], strict=True))])
    caption = (
        "Llama-3.1-8B's shape on one H200, bf16, output tokens/s through HTTP: `peagle serve` with P-EAGLE, K auto,\n"
        "`vllm serve` in its best configuration for each column (random weights, synthetic acceptance length 3.40 at\n"
        "K=7, 2.62 at K=3):\n\n"
    )
    return caption + markdown(["", *load_header(loads)], rows)


def decode_step_table() -> str:
    rows = []
    for name, label in (("8b", "Llama-3.1-8B"), ("smollm2", "SmolLM2-135M")):
        results = load_json(f"h200-decode-step-{name}.json")
        for row in results["rows"] if results else []:
            share = row["limit_ms"] / row["ms"]
            rows.append([label, str(row["batch"]), f"{row['ms']:.3f}", f"{row['limit_ms']:.3f}", f"{share:.0%}"])
    header = ["shape", "requests", "ms per step", "memory limit, ms", "share of the limit"]
    return markdown(header, rows) if rows else ""


def cpu_table() -> str:
    """Every drafter at its best K."""
    rows = []
    names = ("Xeon", "Neoverse N1")
    for machine, line in zip(names, (RESULTS / "cpu-generate.jsonl").read_text().splitlines(), strict=True):
        best: dict[str, tuple[str, Json]] = {}
        for configuration, found in json.loads(line)["results"].items():
            drafter = configuration.partition(",")[0]
            if drafter not in best or found["paired_ratio"] > best[drafter][1]["paired_ratio"]:
                best[drafter] = configuration, found
        for configuration, found in best.values():
            label = configuration.replace("smollm2-135m-p-eagle", "P-EAGLE").replace("smollm2-135m-eagle3", "EAGLE-3")
            label = {"transformers": "transformers `generate`", "peagle": "no drafter"}.get(label, label)
            rows.append([machine, label, f"{found['paired_ratio']:.2f}x", f"{found['acceptance_length']:.2f}"])
    return markdown(["machine", "configuration", "speed", "acceptance length"], rows)


def read_http_rows(model: str) -> dict[tuple[int, str, str, str], Json]:
    """vLLM in its best configuration and peagle, by concurrency, sampling, pass and engine; loads that both ran."""
    results = load_json(f"h200-http-{model}.json")
    found: dict[tuple[int, str, str, str], Json] = {}
    for row in results["rows"] if results else []:
        if "error" not in row and row["server"] != "in-process":
            key = row["concurrency"], row["sampling"], row["pass"], row["server"].partition("-")[0]
            if key not in found or row["output_tokens_per_second"] > found[key]["output_tokens_per_second"]:
                found[key] = row
    complete = {key[:2] for key in found if (*key[:3], "vllm") in found and (*key[:3], "peagle") in found}
    return {key: row for key, row in found.items() if key[:2] in complete}


def http_table(model: str) -> str:
    """By load and pass: output tokens/s and, when steady, latency."""
    found, rows = read_http_rows(model), []
    for load in sorted({key[:2] for key in found}, key=lambda load: (load[1] != "greedy", load)):
        cells = [f"{load_header([load[0]])[0]}, {SAMPLING[load[1]]}"]
        for which in ("cold", "steady"):
            pair = [found.get((*load, which, engine)) for engine in ("vllm", "peagle")]
            rates = [row["output_tokens_per_second"] if row else 0.0 for row in pair]
            ratio = f" **{rates[1] / rates[0]:.2f}x**" if all(rates) else ""
            cells.append("/".join(f"{rate:,.0f}" if rate else "-" for rate in rates) + ratio)
        for field, form in (("ttft_p99_ms", ",.0f"), ("itl_p99_ms", ",.0f"), ("tpot_p50_ms", ".2f")):
            cells.append("/".join(f"{row[field]:{form}}" if row else "-" for row in pair))
        rows.append(cells)
    header = ["vLLM/peagle", "cold", "steady", "TTFT p99", "ITL p99", "TPOT p50"]
    note = "\nWith a JSON schema, answers end by themselves and differ between the engines: compare rates and TPOT.\n"
    if all(sampling != "json_schema" for _, sampling, *_ in found):
        note = ""
    return f"{HTTP_MODELS[model]}:\n\n{markdown(header, rows)}{note}" if rows else ""


def http_start_table() -> str:
    """Seconds until each server was ready, where a second start was measured."""
    rows = []
    for model, label in HTTP_MODELS.items():
        seconds = (load_json(f"h200-http-{model}.json") or {"ready_s": {}})["ready_s"]
        if (second := seconds.get("peagle, second start")) is not None:
            vllm = [f"{s:.0f}" for s in sorted(s for name, s in seconds.items() if name.startswith("vllm"))]
            cells = (
                " to ".join(dict.fromkeys([*vllm[:1], *vllm[-1:]])) or "-",
                f"{seconds['peagle']:.0f}",
                f"{second:.0f}",
            )
            rows.append([label.partition(",")[0], *cells])
    caption = (
        "Seconds until a server is ready. First starts compile their kernels, the second of peagle finds them:\n\n"
    )
    return caption + markdown(["", "vLLM", "peagle", "peagle, second start"], rows) if rows else ""


def http_share_table() -> str:
    """The share of the in-process throughput that reaches HTTP clients."""
    rows = []
    for model, label in HTTP_MODELS.items():
        results = load_json(f"h200-http-{model}.json") or {"rows": []}
        found = {
            (row["server"], row["concurrency"], row["pass"]): row["output_tokens_per_second"]
            for row in results["rows"]
            if "error" not in row and row["sampling"] == "greedy"
        }
        for (server, concurrency, which), rate in found.items():
            if server == "in-process" and which == "steady" and (served := found.get(("peagle", concurrency, which))):
                cells = f"{rate:,.0f}", f"{served:,.0f}", f"**{served / rate:.0%}**"
                rows.append([label.partition(",")[0], *cells])
    caption = (
        "The engine without a server, and what clients of 64 requests received, steady, output tokens/s:\n\n"
    )
    return caption + markdown(["", "in-process", "HTTP", "share"], rows) if rows else ""


def options_table() -> str:
    results = load_json("h200-sampling-options.json")
    rows = []
    for row in results["rows"] if results else []:
        cells = [row["option"]]
        for load in ("8_of_8_ms", "1_of_64_ms"):
            none = results["rows"][0][load] if results else 0.0
            cells.append(f"{row[load]:.2f} **{row[load] / none:.2f}x**")
        rows.append(cells)
    header = ["option", "8 of 8 requests, ms", "1 of 64 requests, ms"]
    return markdown(header, rows) if rows else ""


def methods_table() -> str:
    """EAGLE-3 and P-EAGLE in peagle, each at its best K."""
    rows = []
    for name, label in (("h200-speed-256.json", "256"), ("h200-speed.json", "512")):
        results = load_json(name)
        if results is None:
            return ""
        best: dict[tuple[str, int], float] = {}
        for row in results["rows"]:
            if row["engine"] == "embedded" and row["num_speculative_tokens"] != "auto":
                key = row["method"], row["concurrency"]
                best[key] = max(best.get(key, 0.0), row["output_throughput"])
        loads = sorted({load for _, load in best})
        for method, shown in METHODS.items():
            rows.append([label, shown, *(f"{best[method, load]:,.0f}" for load in loads)])
        ratios = [best["p-eagle", load] / best["eagle3", load] for load in loads]
        rows.append([label, "P-EAGLE over EAGLE-3", *(f"**{ratio:.2f}x**" for ratio in ratios)])
    return markdown(["output tokens, at most", "", *load_header(loads)], rows)


def acceptance_table() -> str:
    results = load_json("h200-acceptance.json")
    if results is None:
        return ""
    found: dict[tuple[str, float, str, int], float] = {}
    for row in results["rows"]:
        if row["category"] is None and row["context_range"] is None and row["looping_responses"] == "excluded":
            key = row["method"], row["temperature"], row["dataset"], row["num_speculative_tokens"]
            found[key] = row["acceptance_length"]
    ks = sorted({k for *_, k in found})
    header = ["EAGLE-3/P-EAGLE", *(f"K={k}" for k in ks)]
    rows = []
    for temperature in sorted({temperature for _, temperature, _, _ in found}):
        for dataset, shown in DATASETS.items():
            cells = ["/".join(f"{found[m, temperature, dataset, k]:.2f}" for m in ("eagle3", "p-eagle")) for k in ks]
            rows.append([f"temperature {temperature:g}, {shown}", *cells])
    return markdown(header, rows)


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme_table,
    "llama-8b": lambda: vllm_table("h200-llama-8b.json"),
    **{f"http-{model}": partial(http_table, model) for model in HTTP_MODELS},
    "http-start": http_start_table,
    "http-share": http_share_table,
    "sampling-options": options_table,
    "decode-step": decode_step_table,
    "methods": methods_table,
    "acceptance": acceptance_table,
    "cpu": cpu_table,
}


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        text = path.read_text()
        path.write_text(BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text))


if __name__ == "__main__":
    main()
