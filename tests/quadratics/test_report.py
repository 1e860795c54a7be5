"""The one-call diagnosis: its numbers, its advice, its table."""

import pytest
import torch

from laplace_debias.quadratics import CurvatureBiasReport, curvature_bias_report
from tests.oracles_quadratics import dense_ggn
from tests.quadratics.test_quadratic import make_classifier


def made_report(factors, sizes=(16, 64, 256), tolerance=0.2):
    """A report with given over-estimations of the top curvature."""
    full = torch.ones(len(sizes), 2, 3)
    same = full * torch.tensor(factors).view(-1, 1, 1)
    return CurvatureBiasReport("ggn", 1024, 99, sizes, tolerance, same, full.clone(), full)


def test_numbers_match_dense_matrices():
    model, loss, X, y = make_classifier()
    report = curvature_bias_report(model, loss, (X, y), batch_sizes=(6, 12), k=3, draws=2, l2=0.1)
    assert report.same.shape == report.other.shape == report.full.shape == (2, 2, 3)
    assert (report.n_data, report.n_params) == (24, 43)
    spectrum = torch.linalg.eigvalsh(dense_ggn(model, loss, X, y, l2=0.1))
    assert (report.full <= spectrum[-1] * (1 + 1e-9)).all()
    # two halves of the data: the truth is the mean of the two mini-batches
    assert torch.allclose((report.same[1] + report.other[1]) / 2, report.full[1], rtol=1e-9)
    assert report.overestimation(top=1)[0] > 1
    errors = (report.same - report.full).abs() / report.full
    assert torch.allclose(report.relative_error(), errors.flatten(1).median(1).values)


def test_seeded_resumes_and_leaves_global_state(tmp_path):
    model, loss, X, y = make_classifier()
    state = torch.get_rng_state()
    options = {"k": 2, "draws": 2, "folder": tmp_path / "report"}
    one = curvature_bias_report(model, loss, (X, y), batch_sizes=(6,), **options)
    two = curvature_bias_report(model, loss, (X, y), batch_sizes=(6, 12), **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.same[0], two.same[0])
    other = curvature_bias_report(model, loss, (X, y), batch_sizes=(6,), k=2, draws=2, seed=1)
    assert not torch.equal(one.same, other.same)
    saved = CurvatureBiasReport.load(one.save(tmp_path / "saved.npz"))
    assert torch.equal(saved.same, one.same) and saved.table() == one.table()


def test_advice():
    assert made_report([3.0, 1.5, 1.1]).sufficient_batch_size == 256
    assert made_report([3.0, 1.15, 1.1]).sufficient_batch_size == 64
    assert made_report([1.1, 1.5, 1.1]).sufficient_batch_size == 256  # from there on
    none = made_report([5.0, 3.0, 2.0])
    assert none.sufficient_batch_size is None
    # factor - 1 = 4, 2, 1: halves with every quadrupling, so 0.2 is at 256 * 5^2 > N
    assert none.extrapolated_batch_size == none.n_data
    exact = made_report([1 + 16 / 16, 1 + 16 / 64, 1 + 16 / 256], tolerance=0.125)
    assert exact.extrapolated_batch_size in (128, 129)
    assert made_report([1.0, 1.0, 1.0]).extrapolated_batch_size is None
    assert made_report([1.5, 2.0, 3.0]).extrapolated_batch_size is None


def test_table():
    text = made_report([3.0, 1.5, 1.1]).table()
    assert "3.00x" in text and "200%" in text and "a mini-batch of 256 is enough" in text
    assert "extrapolated, about" in made_report([5.0, 3.0, 2.0]).table()
    assert len({len(line) for line in text.splitlines()[1:6]}) == 1  # columns line up


def test_bad_input():
    model, loss, X, y = make_classifier()
    with pytest.raises(ValueError, match="from 1 to 12"):
        curvature_bias_report(model, loss, (X, y), batch_sizes=(13,))
    with pytest.raises(ValueError, match="draws >= 1"):
        curvature_bias_report(model, loss, (X, y), batch_sizes=(4,), draws=0)
    with pytest.raises(ValueError, match="'same' or 'other'"):
        made_report([1.0, 1.0, 1.0]).overestimation("full")


def test_every_draw_and_seed_has_its_own_data():
    model, loss, X, y = make_classifier()
    reports = [
        curvature_bias_report(model, loss, (X, y), batch_sizes=(6,), k=2, draws=3, seed=seed)
        for seed in (0, 100)
    ]
    curvatures = torch.cat([report.same[0] for report in reports])  # [6, 2]
    assert len(curvatures.unique(dim=0)) == 6
