"""Tables and figures of the CIFAR example, from made cells and from those that are kept."""

from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from examples.cifar10 import reporting
from laplace_debias.comparison import ComparisonResult, ComparisonRow
from laplace_debias.storage import CellStore

ROOT = Path(__file__).parents[3]


def made(n_draws=2, sets=("", "train_", "c1_"), two=0.25):
    """A run whose single mini-batch is 1 off and whose pair is ``two`` off, at three betas."""
    metrics = ("accuracy", "nll", "ece", "brier")

    def row(method, budget, draw, delta, offset):
        values = {f"{s}{m}": i + 1 + offset for s in sets for i, m in enumerate(metrics)}
        values |= {f"{s}auroc": 0.5 for s in sets if s}
        return ComparisonRow(method, budget, budget, draw, delta, values)

    rows = [row("plain", 0, 0, None, 0.0)]
    for delta in (1.0, 10.0, 100.0):
        rows.append(row("large-batch", 50, 0, delta, 0.0))
        for draw in range(n_draws):
            rows.append(row("single", 8, draw, delta, 1.0))
            rows.append(row("two-batch", 8, draw, delta, -two))
    return ComparisonResult(tuple(rows), 100, {})


def test_gap_table_has_gaps_and_their_ratio():
    last = reporting.gap_table({"one": made(), "other": made(3, two=0.5)}).splitlines()[2:]
    assert last[0].startswith("| one | 8 | 2 | 1.0000 (1.0000, 0.0000) | 0.2500 (")
    assert last[0].endswith("| 0.250 |") and last[1].endswith("| 0.500 |")
    assert last[1].startswith("| other | 8 | 3 |")


def test_report_has_the_auroc_of_corrupted_images_only():
    lines = [line.split()[:2] for line in reporting.report(made()).splitlines() if line]
    assert ["c1", "auroc"] in lines and ["c1", "ece"] in lines and ["train", "ece"] in lines
    assert ["test", "auroc"] not in lines and ["train", "auroc"] not in lines


def test_curve_table_takes_some_betas_and_the_largest():
    lines = reporting.curve_table(made(), every=2).splitlines()
    assert lines[0] == "| nll by beta | 0.01 | 1 |"
    assert "| single, 8 | 3.000 | 3.000 |" in lines
    assert "| two-batch, 8 | 1.750 | 1.750 |" in lines
    assert "0.01 | 0.1 | 1" in reporting.curve_table(made(), every=1)


def test_figures_have_the_papers_layout(tmp_path, monkeypatch):
    saved = {}

    def spy(figure, path, **kwargs):
        saved[Path(path).name] = (
            [
                [ax.get_ylabel() for ax in part.axes if ax.axison]
                for part in (figure.subfigs or [figure])
            ],
            [len(part.legends) for part in (figure.subfigs or [figure])],
        )

    monkeypatch.setattr(plt.Figure, "savefig", spy)
    reporting.draw(made(), tmp_path)
    assert saved["figure.png"] == ([["accuracy", "NLL", "ECE"]], [1])
    labels, legends = saved["figure_sets.png"]
    assert labels[0] == ["accuracy (train)", "NLL (train)", "ECE (train)"]
    assert labels[1] == ["accuracy (c1)", "NLL (c1)", "ECE (c1)", "AUROC (c1)"]
    assert legends == [0, 1]
    reporting.draw_beside({"a": made(), "b": made()}, tmp_path / "beside.png")
    assert saved["beside.png"] == ([["NLL"], ["NLL"]], [1, 1])
    assert [path.name for path in reporting.draw(made(sets=("",)), tmp_path)] == ["figure.png"]


def test_the_readme_figure_shows_the_nll_of_every_budget(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(plt, "close", closed.append)
    reporting.draw_hero(made(), tmp_path / "hero.png")
    (panel,) = closed[0].axes
    assert panel.get_ylabel() == "NLL" and panel.get_title() == "8 images"
    assert len(panel.texts) == 2 and (tmp_path / "hero.png").exists()


def test_redrawing_takes_the_largest_reference(tmp_path):
    def cell(name, method, budget, nll):
        row = dict(method=method, budget=budget, batch_size=budget, draw=0, prior_precision=1.0)
        store.put(name, [row | {"metrics": {"nll": nll}}])

    store = CellStore(tmp_path, {"options": {"n_data": 32}})
    cell("single-8-0", "single", 8, 2.0)
    cell("large-batch-16-a", "large-batch", 16, 5.0)
    cell("large-batch-24-b", "large-batch", 24, 1.5)
    result = reporting.load_cells(tmp_path)
    assert result.gap("nll", "single", 8).gap == 0.5
    cell("full-c", "full", 32, 1.0)
    assert reporting.load_cells(tmp_path).gap("nll", "single", 8).gap == 1.0
    cell("full-d", "full", 32, 1.0)
    with pytest.raises(ValueError, match="one reference of 32 images"):
        reporting.load_cells(tmp_path)


def test_the_reported_run_can_be_redrawn():
    result = reporting.load_cells(ROOT / "examples" / "cifar10" / "reported" / "cells")
    assert (result.reference, result.budgets("large-batch")) == ("large-batch", (8000,))
    methods, budgets = ("single", "two-batch", "crossfit-curvature"), (64, 256, 1024)
    for method in methods:
        assert {(row.budget, row.draw) for row in result.select(method)} == {
            (budget, draw) for budget in budgets for draw in range(5)
        }
    assert len(result.rows) == 1 + 14 * (1 + len(methods) * len(budgets) * 5)
    report = reporting.report(result).split("\n")
    lines = [line.split()[2:] for line in report if line.startswith("test   nll")]
    page = (ROOT / "docs" / "results" / "cifar10.md").read_text()
    for method, line in zip(methods[1:], lines, strict=True):
        ratios = result.gap_ratio("nll", method)
        assert line == [f"{ratios[budget]:.2f}" for budget in budgets]
        assert " | ".join(line) in page


def test_the_page_says_what_the_kept_cells_say(tmp_path):
    runs = reporting.reported_runs()
    assert set(runs) == set(reporting.RUNS)
    page = (ROOT / "docs" / "results" / "cifar10.md").read_text()
    named = {reporting.RUNS[name]: run for name, run in runs.items()}
    for metric in ("nll", "ece", "accuracy"):
        assert reporting.gap_table(named, metric) in page
    for name in ("backpack_label", "trained_backpack_label"):
        assert reporting.curve_table(runs[name]) in page
    bars = {"backpack_label": (0.15, 0.15), "backpack_exact": (0.3, 0.3)}
    for name, most in (bars | {"trained_backpack_label": (0.4, 0.3)}).items():
        ratios = runs[name].gap_ratio("nll")
        for budget, bar in zip((64, 256), most, strict=True):
            assert ratios[budget] <= bar


def test_the_readme_says_what_the_kept_cells_say():
    runs, readme = reporting.reported_runs(), (ROOT / "README.md").read_text()
    trained = runs["trained_backpack_label"]
    for method, mark in (("single", ""), ("two-batch", "**")):
        gaps = [trained.gap("nll", method, budget).gap for budget in (64, 256, 1024)]
        assert " | ".join(f"{mark}{gap:.3f}{mark}" for gap in gaps) in readme
