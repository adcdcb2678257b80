"""`--strategy fsdp2`: a rank of a world that is not there, its blocks sharded as people shard them."""

from __future__ import annotations

import json

import pytest
import torch
from sharded_nets import Transformer, counted, one_of_many, shard
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.models import resnet18, vgg11

from lightning_remat import rematerialize
from lightning_remat.capture.forwards import forward_of
from lightning_remat.command_line.command import main
from lightning_remat.command_line.sharding import repeated_blocks
from lightning_remat.plans import region_options
from lightning_remat.regions import calls

NET = "sharded_nets:Transformer"


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["plan", NET, "--input", "256x8", "--planner", "periodic", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_rank_holds_its_part(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--strategy", "fsdp2", "--optimizer", "adam", "--memory", "90%", "--world-size"]
    two, many = asked(capsys, *wanted, "2"), asked(capsys, *wanted, "8")
    assert two["units"] == many["units"] == {"Block": 4}
    assert two["network"] == "Transformer"
    for told in (two, many):
        assert told["measured_peak_bytes"] <= told["budget_bytes"] < told["plain_peak_bytes"]
        assert told["predicted_peak_bytes"] == pytest.approx(told["measured_peak_bytes"], rel=0.02)
        assert sum(told["plain_peak_contents"].values()) == pytest.approx(told["plain_peak_bytes"], rel=0.05)
    # Parameters and two moments, and at the peak no gradients yet; what is gathered is as large on any rank.
    saved = two["plain_peak_bytes"] - many["plain_peak_bytes"]
    assert saved == pytest.approx(3 * two["parameter_bytes"] * (1 / 2 - 1 / 8), rel=0.01)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_what_is_sharded_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NET, "--input", "64x8", "--strategy", "fsdp2", "--world-size", "4"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "a rank of 4: fully_shard on each of 4 Block, then on the whole" in told
    assert "gathered parameters, gradients" in told


def test_blocks_are_what_people_shard() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        deep = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)))
        by_kind = [[type(b).__name__ for b in repeated_blocks(m)] for m in (net, deep, vgg11(), resnet18())]
        transformer = Transformer(stages=2)
        blocks = [block for stage in transformer.stages for block in stage]
    assert by_kind == [[], ["Sequential"] * 3, [], ["BasicBlock"] * 8]
    assert repeated_blocks(transformer) == blocks


@pytest.mark.slow
def test_units_of_equal_structure_are_captured_profiled_and_planned_once() -> None:
    region_options.options_of.cache_clear()
    with one_of_many(4) as mesh, FakeTensorMode(), counted(calls, "traced_graph") as traced:
        net = shard(Transformer(), mesh=mesh)
        with counted(calls, "profile_call") as profiled:
            made = rematerialize(net, torch.randn(256, 8), memory_budget="85%", planner="periodic")
        assert made.num_recomputed
        assert len({forward_of(block) for block in net.stages[0]}) == 1
    assert len(traced) == len(profiled) == 1
    assert region_options.options_of.cache_info().misses == 1


@pytest.mark.slow
def test_units_with_other_settings_are_not_taken_for_equal() -> None:
    with one_of_many(4) as mesh, FakeTensorMode():
        net = Transformer()
        net.stages[0][1].drop.p = 0.5
        shard(net, mesh=mesh)
        rematerialize(net, torch.randn(256, 8), memory_budget="85%", planner="periodic")
        first, other, *rest = map(forward_of, net.stages[0])
        assert first is not other
        assert rest == [first, first]


@pytest.mark.slow
def test_gathers_are_planned_with_a_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--strategy", "fsdp2", "--world-size", "8", "--memory", "90%"]
    left = asked(capsys, *wanted)
    planned = asked(capsys, *wanted, "--gather-bandwidth", "1GB/s")
    assert left["gather_bandwidth"] is None
    assert {point["second_gathers"] for point in left["curve"]} == {4}  # every block, as fully_shard has it
    assert planned["gather_bandwidth"] == 1e9
    gathers = [point["second_gathers"] for point in planned["curve"]]
    assert gathers[0] > gathers[-1] == 0  # the lowest peak first
    assert planned["plain_peak_bytes"] == pytest.approx(left["plain_peak_bytes"], rel=0.02)
    for told in (left, planned):  # of the plain step, whatever the plan does
        assert sum(told["plain_peak_contents"].values()) == pytest.approx(told["plain_peak_bytes"], rel=0.02)
    assert planned["measured_peak_bytes"] <= planned["budget_bytes"]


@pytest.mark.slow
def test_how_it_is_asked_for_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--strategy", "fsdp2", "--world-size", "8", "--gather-bandwidth", "4GB", "--memory", "80%"]
    assert main(["plan", NET, "--input", "256x8", "--planner", "periodic", *wanted]) == 0
    told = capsys.readouterr().out
    assert "gathered twice" in told
    assert 'Rematerialization(memory_budget="80%", batch_size="keep", gather_bandwidth=4e+09)' in told


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_bandwidth_wants_gathers(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NET, "--input", "64x8", "--strategy", strategy, "--gather-bandwidth", "50GB"]) == 2
    told = f"--gather-bandwidth needs --strategy fsdp2: with {strategy} no parameters are gathered"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("text", ["fast", "50%", "0GB", "-1"])
def test_a_wrong_bandwidth_is_told(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NET, "--input", "64x8", "--strategy", "fsdp2", f"--gather-bandwidth={text}"]) == 2
    assert f"--gather-bandwidth is '{text}', expected bytes a second, such as 50GB" in capsys.readouterr().err
