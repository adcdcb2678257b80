"""The papers' experiments run from one command at toy size, and what they say of the papers is what is printed."""

import csv
from pathlib import Path

import bench
import pytest
from hydra import compose, initialize_config_dir
from PIL import Image

from remat_recipes.papers import beaumont2024, chen2016, kusumoto2019
from remat_recipes.papers.published import figures, printed
from remat_recipes.papers.sheets import Sheet

CONF = Path(__file__).parents[2] / "conf"


def run(paper, folder, **options):
    """Runs the command of a paper; returns its page."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("bench", [f"paper={paper}", f"output_dir={folder}"])
    assert set(options) <= set(config.options)
    config.options = {**config.options, **options}
    bench.main.__wrapped__(config)
    for picture in folder.glob("*.png"):
        with Image.open(picture) as image:
            assert image.width > 500
    page = (folder / "README.md").read_text()
    assert all(f"({picture.name})" in page for picture in folder.glob("*.png"))
    return page


def rows(folder, name):
    return list(csv.DictReader((folder / f"{name}.csv").read_text().splitlines()))


@pytest.mark.slow
def test_kusumoto2019(tmp_path):
    page = run("kusumoto2019", tmp_path, networks=["VGG19"], scale=0.04)
    assert "| VGG19 | 7.0 →" in page
    assert "36 →" in page
    found = rows(tmp_path, "details")
    assert {row["method"] for row in found} == {
        *("Vanilla", "ApproxDP+MC", "ApproxDP+TC", "ExactDP+MC", "ExactDP+TC", "Chen", "auto", "auto at their lowest")
    }
    peaks = {(row["method"], row["liveness"]): float(row["simulated GB"]) for row in found}
    for row in found:
        if row["metered GB"]:
            assert float(row["metered GB"]) == pytest.approx(float(row["simulated GB"]), rel=0.01)
        assert peaks["auto", "yes"] <= peaks[row["method"], row["liveness"]]
        if row["liveness"] == "no":
            assert peaks[row["method"], "yes"] <= peaks[row["method"], "no"]


@pytest.mark.slow
def test_chen2016(tmp_path):
    page = run(
        "chen2016", tmp_path, depths=[14, 26], lengths=[2, 3], planners=["chen", "auto"], batch_sizes=[4, 4],
        image_size=32, hidden_size=16,
    )  # fmt: skip
    assert "Exponent of the growth with depth" in page
    for name, sizes in (("figure5", [14, 26]), ("figure6", [2, 3])):
        found = rows(tmp_path, name)
        assert [int(next(iter(row.values()))) for row in found] == sizes
        for row in found:
            none, inplace, sharing, _, sublinear = (float(row[f"{s} GB"]) for s in chen2016.STRATEGIES)
            assert sharing < inplace <= none
            assert name == "figure6" or sublinear < sharing  # three steps are too few to gain by recomputation
    for row in rows(tmp_path, "sublinear"):
        assert float(row["without parameters GB"]) < float(row["peak GB"]) <= float(row["plain GB"])
        if row["planner"] != "chen":
            assert float(row["metered GB"]) == pytest.approx(float(row["peak GB"]), rel=0.01)
        if "35%" in row["planner"]:
            assert float(row["recomputation %"]) <= 35


@pytest.mark.slow
def test_feng2018(tmp_path):
    page = run("feng2018", tmp_path, networks=["AlexNet"], scale=0.004)
    assert "| AlexNet | 1024 | 3550 →" in page
    (row,) = rows(tmp_path, "table1")
    regular, chen, theirs = (float(row[f"{m} MB"].split(" → ")[1]) for m in ("Regular", "Chen", "Re-forwarding"))
    assert float(row["auto MB"]) <= min(chen, theirs) < regular
    (row,) = rows(tmp_path, "table2")
    assert row["vertices"].startswith("12 →")


@pytest.mark.slow
def test_beaumont2024(tmp_path):
    run(
        "beaumont2024", tmp_path, experiments={"ResNet18": {64: 8}}, strategies=["rotor", "auto"], checkmate=[]
    )  # fmt: skip
    (summary,) = rows(tmp_path, "summary")
    assert float(summary["auto over sequential %"]) >= float(summary["rotor over sequential %"]) > 0
    found = rows(tmp_path, "points")
    assert {row["strategy"] for row in found} == {"plain", "sequential", "rotor", "auto"}
    plain = next(row for row in found if row["strategy"] == "plain")
    for row in found:
        assert float(row["images/s"]) <= float(plain["images/s"])
        if row["limit GiB"]:
            assert float(row["peak GiB"]) <= float(row["limit GiB"])


@pytest.mark.slow
def test_sequential_recomputes_all_but_the_last_segment():
    graph = beaumont2024.network_of("ResNet18", 64, 2).graph()
    schedules = list(beaumont2024.sequential(graph))
    assert len(schedules) > 4
    assert len(set(schedules)) == len(schedules)
    first = [sum(action.kind == "F" for action in schedule) for schedule in schedules]
    assert len(graph.nodes) < first[0] < 2 * len(graph.nodes)


def test_every_paper_has_a_config_and_printed_figures():
    choices = {file.stem for file in (CONF / "paper").glob("*.yaml")}
    assert choices == set(bench.PAPERS)
    for paper, place in (
        ("kusumoto2019", "Table 1"),
        ("chen2016", "section 5.2"),
        ("beaumont2024", "Figure 6"),
        ("feng2018", "Table 2"),
    ):
        assert list(figures(paper, place))


def test_printed_reductions_follow_from_the_printed_memory():
    """Of the typing: in Table 1 each reduction is that of two memories which are printed as well."""
    memory = printed("kusumoto2019", "Table 1", "memory")
    reductions = printed("kusumoto2019", "Table 1", "memory reduction")
    assert len(reductions) == 7 * 5
    for (network, method), figure in reductions.items():
        plain = memory[network, "Vanilla"].number
        low = 100 * (1 - (memory[network, method].number + 0.05) / (plain - 0.05))
        high = 100 * (1 - (memory[network, method].number - 0.05) / (plain + 0.05))
        assert low - 1 <= figure.number <= high + 1
    feng = printed("feng2018", "Table 1", "memory")
    for (network, method), figure in printed("feng2018", "Table 1", "memory reduction").items():
        cut = 100 * (1 - feng[network, method].number / feng[network, "Regular"].number)
        assert cut == pytest.approx(figure.number, abs=1)


def test_what_is_not_printed_is_named():
    with pytest.raises(LookupError, match="'seconds' of kusumoto2019, Table 1"):
        printed("kusumoto2019", "Table 1", "seconds")


def test_depths_of_residual_networks():
    assert sum(chen2016.blocks_of(1001)) == 333
    assert chen2016.blocks_of(200) == chen2016.RESNET200
    with pytest.raises(ValueError, match="100 is not 3n"):
        chen2016.blocks_of(100)


def test_segments_end_with_what_is_kept():
    assert kusumoto2019.segments([1, 0, 1, 1, 0, 1]) == [0, 0, 1, 1, 1, 2]
    assert kusumoto2019.partition(4, [frozenset({0, 1}), frozenset({0, 1, 2, 3})]) == [0, 0, 1, 1]


def test_sheet_as_markdown_and_csv(tmp_path):
    sheet = Sheet("memory", "Memory", ["network", "GB"], [["U-Net", 1.23456789], ["VGG", None]], "A note.")
    assert sheet.markdown().splitlines()[2:6] == ["| network | GB |", "| --- | --- |", "| U-Net | 1.23 |", "| VGG |  |"]
    assert sheet.markdown().endswith("A note.")
    sheet.write_csv(tmp_path)
    assert (tmp_path / "memory.csv").read_text() == "network,GB\nU-Net,1.23457\nVGG,\n"
