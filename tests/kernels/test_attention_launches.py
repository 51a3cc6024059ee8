"""The search for launches of paged attention: what it tries, how it scores, and, in Triton's interpreter, from end to
end in its toy size."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreting import check_in_a_child, mend_interpreter

from benchmarks.attention_rules import (
    BIG,
    FULL,
    SMALL,
    SUNK,
    WINDOWED,
    Row,
    label,
    launches,
    points_of,
    score,
    short,
    steadiest,
    toy_points,
)
from peagle.kernels.attention.paged import paged_attention_torch
from peagle.kernels.attention.paged_launch import RULE, Launch, Rule, choose_launch
from peagle.kernels.gemm.tile_configs import FEW

CPU, PROCESSORS = torch.device("cpu"), 132  # where there is no GPU, launches are as on an H200
POINTS = points_of((BIG, SMALL, SUNK, WINDOWED))


def decisive(launch: Launch) -> tuple[int, ...]:
    """What bits depend on. Queries do not: each has its own column of every product."""
    return launch.tile, launch.splits, launch.warps


def test_the_most_important_points_come_first() -> None:
    first = [(p.shape, p.requests) for p in POINTS[:6]]
    assert first == [(BIG, 8), (BIG, 1), (SMALL, 8), (SMALL, 1), (SMALL, 16), (SMALL, 64)]
    assert all((p.context, p.rows) == (512, 8) for p in POINTS[:6])
    # 7 numbers of requests at 4 contexts, 16384 for one request, 4 rows for 64
    assert len(POINTS) == len(set(POINTS)) == 4 * (7 * 4 + 1 + 4)
    for p in POINTS:
        assert all(abs(n - p.context) * 8 <= p.context for n in p.contexts()) and len(p.contexts()) == p.requests
        assert p.requests < 8 or len(set(p.contexts())) > 1


def test_what_is_tried_differs_in_speed_alone() -> None:
    """But for more rows of a large model than FEW: there a rule that wants more programs has as many shares."""
    for p in POINTS:
        held = p.shape == SMALL or p.requests * p.rows <= FEW
        usual = p.launch(RULE, torch.bfloat16, CPU)
        tried = launches(p, FULL, torch.bfloat16, CPU)
        assert tried[0] == usual and len(tried) == len(set(tried))
        assert all(1 <= x.programs <= x.splits for x in tried)
        fewer = (16, 32) if p.shape == SMALL else ()  # queries a program, where each has one share
        assert all(x.queries == usual.queries or x.queries in fewer for x in tried)
        classes = {decisive(x) for x in tried}
        assert decisive(usual) in classes and (not held or len(classes) == (2 if p.requests >= 32 else 1))
        for rule in FULL.rules():
            launch = p.launch(rule, torch.bfloat16, CPU)
            assert launch in tried
            if rule.reach == RULE.reach and held:
                assert decisive(launch) == decisive(usual)
            if rule.stages and p.pairs <= rule.reach * PROCESSORS:
                assert (launch.stages, launch.registers) == (rule.stages, rule.registers)
                assert launch.ahead == (256 // launch.tile if rule.ahead else 0)
                crowded = p.shape != BIG and PROCESSORS // p.pairs < 4
                fill = rule.fill * (2 if crowded else 1)
                wanted = max(1, min(fill * PROCESSORS // p.pairs, launch.splits))
                if p.shape == SMALL:  # one for each piece, 64 in all, where there is room for three on a processor
                    size = 16 if p.pairs * -(-p.rows * 3 // 16) <= PROCESSORS else 32
                    others = p.pairs * -(-p.rows * 3 // size)
                    wanted = 32 if 32 * others <= 3 * PROCESSORS else max(1, rule.fill * PROCESSORS // others)
                assert launch.programs == wanted
                assert held or launch.splits == launch.programs
    by_hand = [POINTS[0].launch(Rule(fill=fill), torch.bfloat16, CPU).programs for fill in (1, 2, 3, 4)]
    assert by_hand == [2, 4, 6, 8]  # 64 pairs on 132 processors
    assert {x.programs for x in launches(POINTS[0], FULL, torch.bfloat16, CPU)} == {2, 4, 6, 8}
    assert {x.programs for x in launches(POINTS[2], FULL, torch.bfloat16, CPU)} == {2, 3, 5, 8, 11, 32}


def made_up(shape: str, context: int, in_use: float, launched: dict[Launch, float], ruled: dict[Rule, float]) -> Row:
    rows = [{**vars(launch), "us": us, "same_bits": True} for launch, us in launched.items()]
    row = {"shape": shape, "requests": 8, "context": context, "rows": 8, "in_use_us": in_use, "launches": rows}
    return row | {"rules": {label(rule): us for rule, us in ruled.items()}}


def test_rules_and_launches_are_ranked_by_their_means() -> None:
    usual = Launch(128, 32, 16, 8, 2, 0, 2)
    once, steady, rare = replace(usual, programs=5), replace(usual, stages=1), replace(usual, programs=16)
    more, deep = Rule(fill=2, stages=2, ahead=False), Rule(fill=1, stages=3, ahead=False)
    broken = Rule(fill=4, stages=1, ahead=False)
    points = [
        made_up("a", 512, 10.0, {usual: 10.0, once: 5.0, steady: 9.0, rare: 1.0}, {RULE: 10.0, more: 5.0, deep: 9.0}),
        made_up("a", 4096, 40.0, {usual: 40.0, once: 72.0, steady: 30.0}, {RULE: 40.0, more: 72.0, deep: 30.0}),
        made_up("b", 512, 8.0, {usual: 8.0}, {RULE: 8.0, more: 8.0, deep: 8.0, broken: 0.1}),
    ]
    ranked = score(points, [RULE, more, deep, broken])
    assert [Rule(**row["rule"]) for row in ranked] == [deep, more, RULE, broken]
    assert [row["missing"] for row in ranked] == [0, 0, 0, 2]
    by_rule = {row["label"]: row for row in ranked}
    assert by_rule["in use"]["mean"] == by_rule["in use"]["worst"] == 1
    assert by_rule[label(more)]["mean"] == pytest.approx((0.5 * 1.8) ** (1 / 3))
    assert by_rule[label(more)]["worst"] == pytest.approx(1.8)
    assert by_rule[label(more)]["worst_at"] == "a 8 x 8 at 4096"
    assert by_rule[label(deep)]["shapes"] == pytest.approx({"a": (0.9 * 0.75) ** 0.5, "b": 1.0})
    batches = steadiest(points)
    assert [(row["shape"], short(row)) for row in batches] == [("a", short(vars(steady))), ("b", short(vars(usual)))]
    assert batches[0]["contexts"] == [512, 4096] and batches[0]["worst"] == pytest.approx(0.9)


def test_the_search_in_the_interpreter() -> None:
    check_in_a_child(__file__)


def check_in_the_interpreter() -> None:
    mend_interpreter()
    from benchmarks import attention_launches as bench
    from peagle.kernels.attention import paged_triton as kernels

    class Skewed(bench.Chain):
        """Off by one step where a program has two tiles."""

        def attend(self, pages, launch):  # type: ignore[no-untyped-def]
            out = super().attend(pages, launch)
            if launch.programs == 2:
                out[0, 0, 0] = out[0, 0, 0].nextafter(torch.tensor(9.0))
            return out

    for point in toy_points():
        usual = point.launch(RULE, torch.float32, CPU)
        chain = Skewed(point, torch.float32, CPU, 2)
        assert len(chain.pages) == 2
        used = [set(x.block_tables_BM.unique().tolist()) - {0} for x in chain.pages]
        assert not used[0] & used[1], "copies share blocks"
        pages, shape = chain.pages[1], point.shape
        before = chain.cache_k.clone(), chain.cache_v.clone()
        have = chain.attend(pages, usual)
        q, k, v = chain.qkv.unflatten(1, (-1, shape.width)).split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        want = paged_attention_torch(*chain.rotation.turn(q, k), v, *before, pages, shape.window, chain.sinks)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close((chain.cache_k, chain.cache_v), before)

    chain.pages = chain.pages[:1]
    failed: list[str] = []
    tried = [usual, replace(usual, programs=2), replace(usual, tile=24), replace(usual, programs=1)]
    rows = bench.measured(chain, tried, failed)
    assert [(row["programs"], row["same_bits"]) for row in rows] == [(usual.programs, True), (2, False), (1, True)]
    assert len(failed) == 1 and "tile=24" in failed[0]
    assert rows[0]["us"] <= rows[0]["first_us"] and all(row["us"] > 0 for row in rows)

    long = next(p for p in toy_points() if p.context == 90 and p.shape.window is None)
    chain = bench.Chain(long, torch.float32, CPU, 1)
    few, many = (long.launch(Rule(reach=reach), torch.float32, CPU) for reach in (1, 0))
    outs = [chain.attend(chain.pages[0], launch) for launch in (few, many)]
    assert not torch.equal(*outs)
    with bench.ruled(Rule(reach=0)):
        assert torch.equal(chain.attend(chain.pages[0], None), outs[1])
    assert torch.equal(chain.attend(chain.pages[0], None), outs[0])
    assert kernels.choose_launch is choose_launch

    with tempfile.TemporaryDirectory() as folder:
        found, rounds = Path(folder, "launches.json"), Path(folder, "rounds.json")
        kept = bench.main(["--toy", "--out", str(found)])
        results = json.loads(found.read_text())
        assert len(results["points"]) == len(toy_points()) and not results["failed"]
        for point, row, own in zip(toy_points(), results["points"], kept["points"], strict=True):
            measured = [bench.launch_of(x) for x in row["launches"]]
            assert measured == launches(point, bench.TOY, torch.float32, CPU)
            assert all(x["same_bits"] for x in row["launches"])
            assert row["in_use_us"] == row["launches"][0]["us"] == own["rules"]["in use"]
            took = {bench.launch_of(x): x["us"] for x in row["launches"]}
            for rule in bench.TOY.rules():
                assert own["rules"][label(rule)] == took[point.launch(rule, torch.float32, CPU)]
        assert {row["label"] for row in results["rules"]} == {label(rule) for rule in bench.TOY.rules()}
        bench.main(["--toy", "--rounds", "--of", str(found), "--out", str(rounds)])
        timed = json.loads(rounds.read_text())["rounds"]
        assert [row["requests"] for row in timed] == [1, 1, 3, 3]  # the rule in use and one that differs at 3 requests
        for row in timed:
            assert row["ms"] > 0 and (row["label"] != "in use" or row["ratio"] == 1)
        bench.main(["--toy", "--budget", "0", "--out", str(found)])
        assert json.loads(found.read_text())["points"] == []
    print("kernels checked")


if __name__ == "__main__":
    check_in_the_interpreter()
