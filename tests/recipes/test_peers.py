"""The comparison with other methods, at toy size: what each does to results and peak, and the report of it."""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential
from torchvision.models import VGG, DenseNet
from torchvision.models.vgg import make_layers

from benchmarks import peer_networks, peers
from benchmarks.allocator_peak import allocator_growth
from benchmarks.peer_methods import Peer
from benchmarks.peer_networks import NETWORKS, Network
from benchmarks.peer_report import COUNTED, Row, read_rows, summary, table, write_results
from remat_recipes.networks.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread")


def small_vgg() -> VGG:
    network = VGG(make_layers([8, "M", 8, 8, "M"]), init_weights=False)
    network.classifier = nn.Sequential(nn.Linear(8 * 49, 16), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(16, 5))
    return network


def densenet(_: bool = True) -> nn.Sequential:
    return nn.Sequential(*peer_networks.densenet_stages(DenseNet(8, (2, 1, 1, 1), 8)))


TOY = Network(densenet, peer_networks.images, (2, 64), (8, 64))
NUM_SEQUENTIAL = math.isqrt(len(densenet())) - 1


def bench() -> peers.Bench:
    torch.manual_seed(0)
    chain = densenet()
    return peers.Bench.of("toy", lambda: copy.deepcopy(chain), TOY.batch(*TOY.cpu))


@pytest.mark.parametrize(
    ("network", "stages", "x"),
    [
        (DenseNet(8, (2, 2, 2, 2), 8), peer_networks.densenet_stages, torch.randn(2, 3, 64, 64)),
        (small_vgg(), peer_networks.vgg_stages, torch.randn(2, 3, 32, 32)),
        (GPT(20, 8, 2, 2, 16, tied=False, dropout=0.0), peer_networks.gpt_stages, torch.randint(20, (2, 16))),
    ],
    ids=["densenet", "vgg", "gpt"],
)
def test_a_chain_computes_what_its_network_does(network: nn.Module, stages, x: torch.Tensor) -> None:
    expected = network(x)
    chain = nn.Sequential(*stages(network))
    assert torch.equal(chain(x), expected)
    segmented = checkpoint_sequential(chain, 3, x, use_reentrant=False)
    segmented.sum().backward()  # every stage may begin a segment
    assert torch.equal(segmented, expected)


@pytest.mark.slow
def test_every_peer_on_real_tensors() -> None:
    made = bench()
    rows = [peers.compare(made, peer, 1, "cpu") for peer in peers.peers(made.plain.chain, None)]
    assert [row.method for row in rows][-2:] == ["checkpoint_wrapper, every block", "memory_efficient=True"]
    assert sum(row.method.startswith("checkpoint_sequential") for row in rows) == NUM_SEQUENTIAL
    assert min(row.peak_bytes or 0 for row in rows) < made.plain_bytes
    for row in rows:
        assert row.exact == "buffers differ", "a checkpoint updates the running statistics twice"
        assert row.peak_bytes is not None
        assert row.auto_bytes is not None
        assert row.auto_bytes <= row.peak_bytes


@pytest.mark.slow
def test_auto_has_no_plan_under_its_floor() -> None:
    assert bench().auto(1000) is None


@pytest.mark.slow
def test_main_writes_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(NETWORKS, "toy", TOY)
    monkeypatch.setattr(sys, "argv", ["peers.py", "toy", "--paper-scale", "--threads", "1", "--results", str(tmp_path)])
    peers.main()
    rows = read_rows(tmp_path / "peers.csv")
    assert len(rows) == NUM_SEQUENTIAL + 2
    assert {row.network for row in rows} == {"toy, paper scale"}
    assert all(row.seconds == COUNTED and row.ratio is not None and row.ratio > 1 for row in rows)
    assert all(row.auto_bytes is not None and row.auto_bytes <= (row.peak_bytes or 0) for row in rows)
    assert summary(rows) in capsys.readouterr().out
    assert table(rows) in (tmp_path / "README.md").read_text()
    assert (tmp_path / "peers.png").stat().st_size > 0


def test_the_claim_is_checked_on_checkpoint_sequential_alone() -> None:
    def row(method: str, gain: float | None) -> Row:
        return Row("net", method, 100, 60, ratio=1.3, gain=gain, seconds=COUNTED)

    rows = [row("checkpoint_sequential, 2 segments", 1.0), row("checkpoint_sequential, 3 segments", 1.21)]
    text = summary([*rows, row("checkpoint_wrapper, every block", 9.0), row("checkpoint_sequential, 4 segments", None)])
    assert "2 settings" in text
    assert "arithmetic mean 1.105, geometric mean 1.100" in text
    assert "not met" in text


def test_results_survive_the_file(tmp_path: Path) -> None:
    rows = [
        Row("net", "checkpoint_sequential, 2 segments", 100, 60, 70, "yes", 1.5, 60, 70, 1.25, 1.2, COUNTED),
        Row("net", "rockmate: cannot be imported (none)", 100),
    ]
    write_results(tmp_path, rows)
    assert read_rows(tmp_path / "peers.csv") == rows
    other = Row("other", "checkpoint_wrapper, every block", 100, 50)
    assert write_results(tmp_path, [other]) == [*rows, other]
    assert write_results(tmp_path, rows[:1]) == [other, rows[0]], "the network's former rows are gone"


def test_the_allocator_as_second_witness() -> None:
    def block() -> None:
        a = torch.ones(1 << 18)
        b = a + 1
        del a
        b.add_(1)

    assert 2 << 20 <= allocator_growth(block) < (2 << 20) + 100, "two tensors at once, and small change"


@pytest.mark.slow
def test_compiled_code_is_measured_by_the_allocator() -> None:
    made = bench()
    peer = Peer("doubles", lambda chain, _: lambda x: chain(x), is_compiled=True)
    row = peers.compare(made, peer, 1, "cpu")
    assert row.allocated_bytes is not None
    assert row.peak_bytes == row.allocated_bytes - made.workspace_bytes
    assert row.exact == "yes"
