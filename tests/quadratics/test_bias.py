"""The bias studies: exact identities, the paper's claims on a trained network, saving, resuming."""

import pytest
import torch
from torch import nn

from examples.quadratic_problems import digits_problem
from laplace_debias.quadratics import (
    BatchSizeBias,
    BiasSeries,
    DirectionalBias,
    EigenspaceOverlaps,
    Quadratic,
    bias,
    bias_by_batch_size,
    bias_by_model_size,
    bias_over_training,
    curvature_bias_report,
    directional_bias,
    overlap_study,
    partition,
    relative_biases,
    studies,
)
from tests.oracles_quadratics import book_cg, dense_ggn, dense_hessian
from tests.quadratics.test_quadratic import make_classifier

DENSE = {"ggn": dense_ggn, "hessian": dense_hessian}


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_eigenvector_bias_matches_dense(curvature):
    model, loss, X, y = make_classifier()
    batches = partition((X, y), 8)
    options = {"curvature": curvature, "l2": 0.1}
    result = directional_bias(model, loss, batches, k=4, chosen=(0, 2), **options)
    H = [DENSE[curvature](model, loss, *batch, l2=0.1) for batch in batches]
    g = [Quadratic(model, loss, batch, l2=0.1).gradient for batch in batches]
    full = DENSE[curvature](model, loss, X, y, l2=0.1)
    for row, s in enumerate((0, 2)):
        values, U = (part.flip(-1)[..., :4] for part in torch.linalg.eigh(H[s]))
        for m in range(3):
            curvatures = (U * (H[m] @ U)).sum(0)
            assert torch.allclose(result.curvatures[row, m], curvatures, rtol=1e-8)
            slopes = (U.T @ g[m]).abs()  # eigenvectors have no sign
            assert torch.allclose(result.slopes[row, m].abs(), slopes, rtol=1e-7, atol=1e-10)
        assert torch.allclose(result.same()[row], values, rtol=1e-8)
        assert torch.allclose(result.full()[row], (U * (full @ U)).sum(0), rtol=1e-8)
    assert result.others().shape == (2, 2, 4)
    expected = (result.same() - result.full()).abs() / result.full().abs()
    assert torch.equal(result.relative_errors(), expected)
    assert torch.allclose(result.percentiles(percent=(50,))[:, 0], expected.quantile(0.5, dim=1))


def test_cg_bias_matches_dense_and_gives_magnitudes():
    model, loss, X, y = make_classifier()
    batches = partition((X, y), 8)
    result = directional_bias(model, loss, batches, directions="cg", k=5, chosen=(1,), l2=0.1)
    H = [dense_ggn(model, loss, *batch, l2=0.1) for batch in batches]
    g = [Quadratic(model, loss, batch, l2=0.1).gradient for batch in batches]
    iterates, directions, taus = book_cg(H[1], g[1], 5)
    for m in range(3):
        for p, (x, d) in enumerate(zip(iterates, directions, strict=False)):
            slope, curvature = d @ (H[m] @ x + g[m]), d @ H[m] @ d
            assert torch.allclose(result.slopes[0, m, p], slope, rtol=1e-8, atol=1e-12)
            assert torch.allclose(result.curvatures[0, m, p], curvature, rtol=1e-8)
    assert torch.allclose(result.same("magnitudes")[0], torch.stack(taus), rtol=1e-8)
    assert (result.same("slopes") < 0).all() and (result.same("magnitudes") > 0).all()
    truth = -result.slopes.mean(1) / result.curvatures.mean(1)
    assert torch.allclose(result.full("magnitudes"), truth)


def test_cg_that_stops_early_is_padded():
    model, loss, X, y = make_classifier()
    result = directional_bias(
        model, loss, partition((X, y), 8), directions="cg", k=40, chosen=(0,), curvature="hessian"
    )
    known = torch.isfinite(result.curvatures)
    count = int(known[0, 0].sum())
    assert count < 40 and known[..., :count].all() and not known[..., count:].any()
    assert torch.isfinite(result.percentiles()).all()


def test_regression_to_the_mean_on_memorised_digits():
    """Top-20 curvature at batch size 64: twice too large at home, right on other data."""
    problem = digits_problem(label_noise=0.5)  # learned by heart: every datum counts
    report = curvature_bias_report(
        problem.model,
        nn.CrossEntropyLoss(),
        problem.train,
        batch_sizes=(64,),
        k=20,
        draws=3,
        l2=problem.l2,
        regularize_biases=False,
    )
    assert (report.same / report.full).mean() >= 2.0
    assert abs((report.other / report.full).mean() - 1) <= 0.3


def test_series_over_training_and_model_size():
    model, loss, X, y = make_classifier()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    other = {k: 0.5 * v for k, v in state.items()}
    options = {"batch_size": 8, "k": 4, "draws": 2, "l2": 0.1}
    series = bias_over_training(model, {1: other, 30: state}, loss, (X, y), **options)
    direct = relative_biases(model, loss, (X, y), **options)
    assert torch.allclose(series.curvature_errors[1], direct["curvatures"])
    assert torch.allclose(series.errors("slopes")[1], direct["slopes"])
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert series.percentiles().shape == (2, 2, 3)
    # by definition, on the first draw
    batch = partition((X, y), 8, generator=torch.Generator().manual_seed(0))[0]
    values, U = torch.linalg.eigh(dense_ggn(model, loss, *batch, l2=0.1))
    values, U = values.flip(0)[:4], U.flip(1)[:, :4]
    full = (U * (dense_ggn(model, loss, X, y, l2=0.1) @ U)).sum(0)
    assert torch.allclose(series.curvature_errors[1, 0], (values - full).abs() / full, rtol=1e-6)
    wide = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    sizes = bias_by_model_size({"5": model, "9": wide}, loss, (X, y), **options)
    assert sizes.positions.tolist() == [43.0, 75.0] and sizes.labels == ("5", "9")
    with pytest.raises(ValueError, match="disjoint"):
        relative_biases(model, loss, (X, y), batch_size=8, k=2, draws=4)
    with pytest.raises(ValueError, match="'slopes' or 'curvatures'"):
        series.errors("magnitudes")


def equal_results(one, two):
    for name, value in vars(one).items():
        other = getattr(two, name)
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True)
        elif isinstance(value, tuple) and value and hasattr(value[0], "save"):
            for a, b in zip(value, other, strict=True):
                equal_results(a, b)
        else:
            assert value == other


def test_results_save_and_load(tmp_path):
    model, loss, X, y = make_classifier()
    batches = partition((X, y), 8)
    results = [
        (DirectionalBias, directional_bias(model, loss, batches, k=2)),
        (EigenspaceOverlaps, overlap_study(model, loss, batches, k=2)),
        (BatchSizeBias, bias_by_batch_size(model, loss, (X, y), batch_sizes=(4, 8), k=2)),
        (BiasSeries, bias_by_model_size({"a": model}, loss, (X, y), batch_size=8, k=2, draws=2)),
    ]
    for cls, result in results:
        equal_results(cls.load(result.save(tmp_path / "result.npz")), result)
    with pytest.raises(ValueError, match="saved DirectionalBias"):
        DirectionalBias.load(tmp_path / "result.npz")
    with pytest.raises(ValueError, match=r"\.npz"):
        result.save(tmp_path / "result.json")


def test_studies_resume(tmp_path, monkeypatch):
    model, loss, X, y = make_classifier()
    batches = partition((X, y), 8)
    folder = tmp_path / "study"
    first = directional_bias(model, loss, batches, k=3, chosen=(0, 1), folder=folder)
    calls = []
    choose = bias.kept_directions
    monkeypatch.setattr(bias, "kept_directions", lambda *a, **k: calls.append(1) or choose(*a, **k))
    again = directional_bias(model, loss, batches, k=3, chosen=(0, 1, 2), folder=folder)
    assert len(calls) == 1  # only the third mini-batch was left
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == []
    assert torch.equal(again.curvatures[:2], first.curvatures)
    with pytest.raises(ValueError, match="options.k: 3 there, 2 now.*Remedy: use another folder"):
        directional_bias(model, loss, batches, k=2, folder=folder)
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(ValueError, match="model: "):
        directional_bias(model, loss, batches, k=3, folder=folder)

    options = {"batch_size": 8, "k": 2, "draws": 2, "folder": tmp_path / "series"}
    one = bias_by_model_size({"a": model}, loss, (X, y), **options)

    def again(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(studies, "relative_biases", again)
    equal_results(bias_by_model_size({"a": model}, loss, (X, y), **options), one)


@pytest.mark.parametrize("shared", [False, True])
def test_a_study_goes_on_within_a_mini_batch(tmp_path, monkeypatch, shared):
    model, loss, X, y = make_classifier()
    batches = partition((X, y), 8)
    plain = {"k": 3, "chosen": (0, 1), "l2": 0.1, "solver_options": {"block_size": 1}}
    options = {**plain, "folder": tmp_path / "study"}
    if shared:
        options["directions_folder"] = tmp_path / "directions"
    expected = directional_bias(model, loss, batches, **plain)
    product, restrict = Quadratic.__matmul__, Quadratic.restrict
    calls = {"products": 0, "restrictions": 0}
    most = {"products": 5, "restrictions": 2}

    def count(name):
        if calls[name] == most[name]:
            raise InterruptedError
        calls[name] += 1

    monkeypatch.setattr(Quadratic, "__matmul__", lambda q, V: count("products") or product(q, V))
    monkeypatch.setattr(Quadratic, "restrict", lambda q, D: count("restrictions") or restrict(q, D))
    with pytest.raises(InterruptedError):
        directional_bias(model, loss, batches, **options)
    assert calls == {"products": 5, "restrictions": 0}  # in the midst of the first eigenvectors
    most["products"] = 1_000
    with pytest.raises(InterruptedError):
        directional_bias(model, loss, batches, **options)
    assert calls["products"] > 5 and calls["restrictions"] == 2  # two mini-batches were measured
    most["restrictions"] = 6  # of two times three
    result = directional_bias(model, loss, batches, **options)
    assert calls["restrictions"] == 6
    equal_results(result, expected)
    made, calls["products"], calls["restrictions"] = calls["products"], 0, 0
    directional_bias(model, loss, batches, **plain)
    assert made == calls["products"]  # though interrupted twice, it made no product twice
    folders = {path.name for path in tmp_path.glob("*/*") if path.is_dir()}
    assert folders == ({"eigenvectors of 0", "eigenvectors of 1"} if shared else set())
    if shared:
        kept = {name: options[name] for name in ("k", "l2", "solver_options", "directions_folder")}
        calls["products"] = 0
        overlaps = overlap_study(model, loss, batches[:2], **kept)
        assert calls["products"] == 0  # the eigenvectors were there
        del kept["directions_folder"]
        equal_results(overlaps, overlap_study(model, loss, batches[:2], **kept))


def test_bad_input():
    model, loss, X, y = make_classifier()
    with pytest.raises(ValueError, match="one size"):
        directional_bias(model, loss, [(X[:8], y[:8]), (X[8:], y[8:])], k=2)
    with pytest.raises(ValueError, match="chosen in"):
        directional_bias(model, loss, partition((X, y), 12), k=2, chosen=(2,))
    with pytest.raises(ValueError, match="directions in"):
        directional_bias(model, loss, partition((X, y), 8), k=2, directions="random")
    with pytest.raises(ValueError, match="kind in"):
        directional_bias(model, loss, partition((X, y), 8), k=2).same("values")
    with pytest.raises(ValueError, match="1 <= k <= 43"):
        directional_bias(model, loss, partition((X, y), 8), k=44)
