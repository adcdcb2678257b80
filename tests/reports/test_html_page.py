"""The page holds the result, needs nothing from elsewhere, and draws it in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_remat import Graph, Node
from lightning_remat.plans.plan import StepPlan
from lightning_remat.plans.step_memory import Surroundings
from lightning_remat.plans.step_planner import plan_step
from lightning_remat.reports.block_shares import block_shares, prices
from lightning_remat.reports.html_page import headline, page, page_data, write_page
from lightning_remat.reports.residency import contents_at, plain_step, view_step
from lightning_remat.reports.result import Candidate, Result

MIB = 2**20
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def chain(length: int = 8) -> Graph:
    nodes = tuple(
        Node(
            f"layer{i}.relu",
            kind="relu",
            inputs=(i - 1,) if i else (),
            saved=(i,),
            output_bytes=MIB,
            tape_bytes=MIB // 4 if i == 2 else 0,
            parameter_bytes=MIB // 8,
            forward_seconds=1.0,
            backward_seconds=2.0,
        )
        for i in range(length)
    )
    return Graph(nodes, input_bytes=MIB, static_bytes=MIB, outputs=(length - 1,))


@pytest.fixture
def step() -> StepPlan:
    around = Surroundings(resident_bytes=MIB // 2, optimizer_step_bytes=0)
    return plan_step(["net"], {"net": chain()}, 10 * MIB, "periodic", around)


@pytest.fixture
def result(step: StepPlan) -> Result:
    fits = Candidate(8, 12 * MIB, 10 * MIB, 0.25, 3.2, 4.0, True, measured_peak_bytes=10 * MIB)
    misses = Candidate(9, 13 * MIB, 11 * MIB, None, None, 4.0, False, "needs 11 MiB</script>")
    return Result(8, 10 * MIB, step, 10 * MIB, 12 * MIB, (misses, fits), 2, "8 is the largest size that fits")


def test_what_is_alive_adds_up_to_the_timeline(step: StepPlan) -> None:
    for shown in (step, plain_step(step)):
        view = view_step(shown)
        for position, (kind, _) in enumerate(view.plan.schedule):
            parts = contents_at(shown, view, position)
            assert sum(getattr(parts, name) for name in parts.__slots__) == view.timeline.memory_bytes[position]
            if kind == "F" and position < view.timeline.num_forward:
                assert parts.working_bytes == 0  # these operations have no workspaces
        assert all(stay.end <= len(view.plan.schedule) for stay in view.stays)


def test_the_plain_step_is_what_it_was_planned_from(step: StepPlan) -> None:
    assert plain_step(step).predicted_peak_bytes == step.plain_peak_bytes > step.predicted_peak_bytes


def test_shares_hold_every_byte_that_the_backward_reads(step: StepPlan) -> None:
    shares = block_shares(view_step(step).plan)
    assert sum(s.kept_bytes + s.recomputed_bytes for s in shares) == 8 * MIB + MIB // 4
    assert sum(s.recomputed_seconds for s in shares) == pytest.approx(step.recompute_seconds)
    assert "recomputed costs" in prices(shares)


def test_the_page_needs_nothing_from_elsewhere(result: Result) -> None:
    text = page(result, title="a <net>")
    assert "a &lt;net&gt;" in text
    assert not re.search(r"(src|href)=|url\(|@import|fetch\(", text)
    assert set(re.findall(r"https?://[^\"')\s]+", text)) == {"http://www.w3.org/2000/svg"}
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data) == json.loads(json.dumps(page_data(result, {})))
    assert json.loads(data)["candidates"][1]["reason"] == "needs 11 MiB</script>"


def test_the_headline_says_what_is_saved(result: Result) -> None:
    assert headline(result).startswith("A training step of 8 samples in 10.00 MiB instead of 12.00 MiB (−17%)")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_draws_it(result: Result, tmp_path: Path) -> None:
    file = write_page(result, tmp_path / "report.html", run={"peak_bytes": 9.0 * MIB, "samples_per_second": 3.0})
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    drawn = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, check=True, timeout=120).stdout
    body = drawn[drawn.index("<body>") : drawn.index('<script id="data"')]
    assert body.count("<svg") == 4  # memory, schedule, batch sizes, peaks
    assert body.count("<tr") == 1 + 8 + 1 + 2
    assert "the peak: " in body
    assert "needs 11 MiB&lt;/script&gt;" in body
    assert "samples a second in the run" in body
