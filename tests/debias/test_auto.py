"""Fits to a tolerance, seen from the posterior."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import CurvatureRecorder, Laplace, posterior_distance
from laplace_debias.debias import auto as module
from laplace_debias.debias import pool_inputs
from laplace_debias.debias.certificate import SPLITS, TILT
from laplace_debias.debias.drawn import DrawnFactor
from laplace_debias.debias.drawn_rows import DrawnRows
from laplace_debias.debias.rounds import Rounds

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(200, 4, generator=GENERATOR, dtype=torch.float64)
Y = (X[:, 0] + X[:, 1].square() > 0.5).long() + (X[:, 2] > 1).long()


@pytest.fixture(scope="module")
def net():
    """A classifier that has learnt something."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))
    net = net.double()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()
    net.zero_grad()
    return net.eval()


def loader(y=Y, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(X, y), batch_size=32, shuffle=True, generator=generator)


def auto(net, likelihood="classification", subset="all", data=None, n_data=None, **options):
    options.setdefault("generator", torch.Generator().manual_seed(1))
    la = Laplace(net, likelihood, subset, "kron", debias="auto", **options)
    la.fit(loader() if data is None else data, n_data=n_data)
    return la


def full(net, likelihood="classification", subset="all", y=Y, **options):
    la = Laplace(net, likelihood, subset, "kron", debias="single", **options)
    la.fit(loader(y))
    return la


def test_with_all_passes_it_is_the_full_batch(net):
    la = auto(net, tolerance=None, n_passes=10_000)
    assert posterior_distance(la, full(net), X[:20]) < 1e-7
    assert la.fit_report.distance == la.fit_report.standard_error == 0.0
    assert "full-batch" in la.fit_report.reason
    assert la.fit_cost.backward <= 600
    assert float(la.loss) == pytest.approx(float(full(net).loss))


@pytest.mark.parametrize("n_passes", [8, 33, 200])
def test_a_budget_is_spent_and_never_exceeded(net, n_passes):
    la = auto(net, tolerance=None, n_passes=n_passes)
    assert 0.95 * n_passes <= la.fit_cost.backward <= n_passes
    assert la.fit_report.n_passes == la.fit_cost.backward
    assert la.fit_report.n_forward == la.fit_cost.forward
    # the pool once, and then each datum of the draw once, however many of its classes are drawn
    assert 200 + n_passes / 3 <= la.fit_cost.forward <= 200 + min(n_passes, 200)


def test_it_is_nearer_than_a_mini_batch_of_as_many_passes(net):
    reference, ours, theirs = full(net), [], []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        la = auto(net, tolerance=None, n_passes=64, generator=generator)
        ours.append(posterior_distance(la, reference, X[:50]))
        rows = torch.randperm(200, generator=generator)[:32]
        single = Laplace(net, "classification", "all", "kron", debias="single")
        single.fit((X[rows], Y[rows]), n_data=200)
        theirs.append(posterior_distance(single, reference, X[:50]))
    assert sum(ours) < 0.3 * sum(theirs)


def test_a_tolerance_is_reached_by_rounds_that_compute_nothing_twice(net):
    la = auto(net, tolerance=0.02)
    assert la.fit_report.distance <= 0.02
    assert posterior_distance(la, full(net), X[:50]) < 0.04
    assert la.fit_cost.forward <= 200 + la.fit_cost.backward  # the pool once, each pair once
    assert "tolerance" in la.fit_report.reason or "full-batch" in la.fit_report.reason
    assert len(str(la.fit_report).splitlines()) == 3


def test_a_tighter_tolerance_takes_more_passes(net):
    loose, tight = (auto(net, tolerance=t).fit_cost.backward for t in (0.3, 0.003))
    assert loose < tight


def test_budgets_that_end_before_the_tolerance_are_told(net):
    with pytest.warns(UserWarning, match=r"estimated distance of 0\.\d+.*n_passes=64"):
        auto(net, tolerance=1e-6, n_passes=64)
    with pytest.warns(UserWarning, match="max_seconds"):
        auto(net, tolerance=1e-6, max_seconds=1e-3)


def test_all_pairs_are_not_the_full_batch_if_patches_were_left_out(monkeypatch):
    for name in ("MOST_FOR_PATCHES", "ROWS_PER_DIMENSION"):
        monkeypatch.setattr(pool_inputs, name, 0.0)
    monkeypatch.setattr("laplace_debias.debias.rounds.least_patches", lambda *_: 1)
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)).double()
    images = TensorDataset(X.view(-1, 1, 2, 2)[:, :, :, [0, 1, 1]], Y)
    data = DataLoader(images, 16, shuffle=True, generator=torch.Generator().manual_seed(0))
    conv[3] = nn.Linear(6, 3).double()
    with pytest.warns(UserWarning, match="input factors are those of a part of the data"):
        la = auto(conv, data=data, tolerance=1e-6)
    assert la.fit_report.distance > 1e-6
    spent = auto(conv, data=data, tolerance=None, n_passes=10_000)
    assert "every pair was propagated, but" in spent.fit_report.reason
    assert spent.fit_report.distance > 1e-6
    near = auto(conv, data=data, tolerance=0.9)
    assert near.fit_report.reason == "the estimate is below the tolerance of 90 %"


def test_a_stream_that_ends_too_early_is_told(net):
    with pytest.warns(UserWarning, match="loader ended after 60 of 5000"):
        la = auto(
            net, data=iter([(X[:30], Y[:30]), (X[30:60], Y[30:60])]), n_data=5000, tolerance=1e-4
        )
    assert la.fit_report.n_pool == 60


def test_a_stream_gives_the_full_batch_too(net):
    batches = zip(X.split(32), Y.split(32), strict=True)
    la = auto(net, data=batches, n_data=200, tolerance=None, n_passes=1000)
    assert posterior_distance(la, full(net), X[:20]) < 1e-7


class Mapped(nn.Module):
    """Takes a mapping."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        """Look at one entry."""
        return self.net(x["input_ids"])


def test_mappings(net):
    batches = [{"input_ids": x, "labels": y} for x, y in zip(X.split(50), Y.split(50), strict=True)]
    la = auto(Mapped(net), data=batches, n_data=200, tolerance=None, n_passes=60)
    plain = auto(net, data=list(zip(X.split(50), Y.split(50), strict=True)), n_data=200,
                 tolerance=None, n_passes=60)  # fmt: skip
    for one, two in zip(la.H.eigenvalues, plain.H.eigenvalues, strict=True):
        torch.testing.assert_close(one[0], two[0])


def test_a_last_layer_needs_no_backward_pass(net):
    la = auto(net, subset="last_layer", tolerance=0.05)
    assert la.fit_cost.backward == 0
    assert posterior_distance(la, full(net, subset="last_layer"), X[:20]) < 1e-6
    assert "no backward pass" in la.fit_report.reason


def test_regression_with_two_outputs(net):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    y = torch.stack([X[:, 0], X[:, 1] - X[:, 2]], dim=1)
    reference = full(net, "regression", y=y, sigma_noise=0.3)
    la = auto(net, "regression", data=loader(y), sigma_noise=0.3, tolerance=None, n_passes=150)
    assert posterior_distance(la, reference, X[:50]) < 0.05
    la = auto(net, "regression", data=loader(y), sigma_noise=0.3, tolerance=None, n_passes=400)
    assert posterior_distance(la, reference, X[:50]) < 1e-7


def test_the_full_batch_of_fewer_rows_than_outputs_has_no_floor():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    data = [(X[:12], X[:12, :1])]
    reference = Laplace(net, "regression", "all", "kron", debias="single")
    reference.fit(data, n_data=12)
    la = auto(net, "regression", data=data, n_data=12)
    expected = reference.H.to_matrix()
    torch.testing.assert_close(la.H.to_matrix(), expected, rtol=1e-9, atol=1e-12 * expected.max())


def test_convolutions_with_several_positions():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ).double()
    x = torch.randn(120, 1, 6, 6, dtype=torch.float64)
    data = [(x, torch.arange(120) % 3)]
    reference = Laplace(net, "classification", "all", "kron", debias="single")
    reference.fit(data, n_data=120)
    la = auto(net, data=data, n_data=120, tolerance=None, n_passes=60)
    assert posterior_distance(la, reference, x[:20]) < 0.05


def test_scores_from_training_save_the_scoring_pass(net):
    recorder = CurvatureRecorder(200)
    recorder.update(torch.arange(200), net(X) + 0.1 * torch.randn(200, 3, dtype=torch.float64))
    la = auto(net, scores=recorder, tolerance=None, n_passes=150, n_pool=100)
    assert la.fit_cost.forward == 100 + 150
    assert posterior_distance(la, full(net), X[:50]) < 0.2


def test_more_passes_than_data_with_scores_from_training(net):
    la = auto(net, scores=torch.ones(200), tolerance=None, n_passes=500)
    assert 475 <= la.fit_cost.backward <= 500
    assert la.fit_report.distance > 0
    assert posterior_distance(la, full(net), X[:50]) < 0.1


def test_a_part_of_the_data_stands_for_all(net):
    la = auto(net, tolerance=None, n_passes=64, n_pool=100)
    assert la.fit_report.n_pool == 100
    distance = posterior_distance(la, full(net), X[:50])
    report = la.fit_report
    assert 0.01 < distance < report.distance + 2 * report.standard_error < 0.5


def test_the_model_the_generators_and_the_prior_are_left_as_they_were(net):
    before = [p.detach().clone() for p in net.parameters()]
    state = torch.get_rng_state()
    net.train()
    la = auto(net, prior_precision=3.0)
    assert net.training and torch.equal(state, torch.get_rng_state())
    net.eval()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert float(la.prior_precision) == 3.0
    assert all(p.grad is None for p in net.parameters())


def test_the_same_generator_gives_the_same_posterior(net):
    one, two = (auto(net, tolerance=None, n_passes=40) for _ in range(2))
    for a, b in zip(one.H.eigenvalues, two.H.eigenvalues, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_saved_posterior_is_restored(net):
    la = auto(net, tolerance=None, n_passes=40)
    other = Laplace(net, "classification", "all", "kron", debias="auto")
    other.load_state_dict(la.state_dict())
    torch.testing.assert_close(la(X[:5]), other(X[:5]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tolerance": 0.0}, "positive `tolerance` below 1"),
        ({"tolerance": "5 %"}, "positive `tolerance` below 1, got .5 %.. Remedy: 0.05"),
        ({"tolerance": -1}, "positive `tolerance` below 1"),
        ({"tolerance": 5}, "positive `tolerance` below 1, got 5"),
        ({"max_seconds": 0}, "`max_seconds` below inf, got 0. Remedy: leave it out"),
        ({"max_seconds": float("inf")}, "positive `max_seconds` below inf"),
        ({"n_passes": 4}, "at least 8"),
        ({"n_passes": 10.5}, "whole number"),
        ({"tolerance": None}, "`n_passes` with tolerance=None"),
        ({"scores": torch.tensor([-1.0])}, "non-negative"),
        ({"n_folds": 3}, "debias='crossfit' only"),
        ({"fisher": "mc"}, "exact curvature"),
    ],
)
def test_bad_options_are_refused(net, options, words):
    with pytest.raises(ValueError, match=words):
        Laplace(net, "classification", "all", "kron", debias="auto", **options)


LOSSES = {
    "class weights": ("classification", {"class_weights": [1.0, 5.0, 0.2]}),
    "label smoothing": ("classification", {"label_smoothing": 0.2}),
    "both": ("classification", {"class_weights": [1.0, 5.0, 0.2], "label_smoothing": 0.2}),
    "a noise per output": ("regression", {"sigma_noise": torch.tensor([0.3, 1.0, 4.0])}),
    "yes or no": ("bernoulli", {}),
}


@pytest.mark.parametrize(("likelihood", "options"), LOSSES.values(), ids=LOSSES)
def test_other_losses_end_at_their_full_batch(net, likelihood, options):
    y = Y if likelihood == "classification" else nn.functional.one_hot(Y, 3).double()
    reference = full(net, likelihood, y=y, **options)
    plain = full(net, likelihood, y=y)
    la = auto(net, likelihood, data=loader(y), tolerance=None, n_passes=10_000, **options)
    assert posterior_distance(la, reference, X[:20]) < 1e-7
    assert float(la.loss) == pytest.approx(float(reference.loss))
    if "class_weights" in options or "sigma_noise" in options:
        assert posterior_distance(la, plain, X[:20]) > 0.05
    la = auto(net, likelihood, data=loader(y), tolerance=None, n_passes=150, **options)
    assert posterior_distance(la, reference, X[:20]) < 0.05
    stale = {"scores": torch.ones(200), "n_pool": 200}
    la = auto(net, likelihood, data=loader(y), tolerance=None, n_passes=2000, **stale, **options)
    assert posterior_distance(la, reference, X[:20]) < 0.1


class Transposed(nn.Module):
    """A classifier with a layer whose weight is ``[d_in, d_out]``, as in GPT-2, and a norm."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.conv, self.norm, self.out = Conv1D(6, 4), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        """Three positions, each a part of the input."""
        x = torch.stack([x, x.flip(1), x.square()], dim=1)
        return self.out(torch.tanh(self.norm(self.conv(x))).sum(1))


def test_transposed_weights_and_scales_of_normalisations():
    torch.manual_seed(0)
    net = Transposed().double()
    reference = full(net)
    la = auto(net, tolerance=None, n_passes=10_000)
    assert posterior_distance(la, reference, X[:20]) < 1e-7
    assert la.fit_report.distance == 0.0
    la = auto(net, tolerance=None, n_passes=200)
    distance, report = posterior_distance(la, reference, X[:50]), la.fit_report
    assert 1e-4 < distance < report.distance + 2 * report.standard_error < 0.2


def test_scores_that_do_not_fit_are_refused(net):
    with pytest.raises(ValueError, match=r"one score for each of the 200 data.*got 199. Remedy"):
        auto(net, scores=torch.ones(199))
    with pytest.raises(ValueError, match=r"no `scores` with a stream.*Remedy"):
        auto(net, data=iter([(X, Y)]), n_data=200, scores=torch.ones(200))


def test_its_options_belong_to_it_alone(net):
    with pytest.raises(ValueError, match="'tolerance' with debias='auto' only"):
        Laplace(net, "classification", "all", "kron", debias=True, tolerance=0.1)


def test_it_does_not_add_to_earlier_fits(net):
    la = Laplace(net, "classification", "all", "kron", debias="auto")
    with pytest.raises(ValueError, match="override=True"):
        la.fit(loader(), override=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.fit(loader())
    with pytest.raises(ValueError, match="debias='auto'"):
        la.curvature_bias()


def test_other_methods_report_their_cost(net):
    report = full(net).fit_report
    assert report.distance is None and report.n_passes == 400 and "not estimated" in str(report)


def test_draws_along_a_line_err_less_than_halves_of_neighbours(monkeypatch):
    """The first split's halves take every second draw; what only the others show is no noise."""
    torch.manual_seed(0)
    line = torch.linspace(-2, 2, 300, dtype=torch.float64)[:, None]
    net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))
    with torch.no_grad():
        net.double()[0].weight.mul_(2)
        net[2].weight.mul_(2)
    seen, plain, estimates = [], module.evenly_split, []
    options = dict(tolerance=None, n_passes=24, sigma_noise=0.1, prior_precision=0.1)
    for split in (plain, lambda errors: errors):
        monkeypatch.setattr(module, "evenly_split", lambda e, f=split: seen.append(e) or f(e))
        g = torch.Generator().manual_seed(0)
        la = auto(net, "regression", data=(line, line.sin()), n_data=300, generator=g, **options)
        estimates.append(la.fit_report.distance)
    even, *others = seen[0].square().mean(1).tolist()
    assert 3 * even < sum(others) / 2
    assert estimates[0] < 0.85 * estimates[1]


def test_what_is_left_of_the_full_batch_is_not_cut_into_two_rounds(net, monkeypatch):
    """A round that would leave no more than it takes takes all."""
    rounds, plain = [], Rounds.draw

    def draw(self, m):
        rounds.append((self.n_left(), m, self.whole))
        return plain(self, m)

    monkeypatch.setattr(Rounds, "draw", draw)
    auto(net, tolerance=1e-9)
    whole = [(left, m) for left, m, of_all in rounds if of_all]
    assert all(m >= left or left > 2 * m for left, m in whole)
    assert rounds[-1][1] == rounds[-1][0]
    assert any(m > 1.2 * (left / 2) and m == left for left, m in whole)


@pytest.mark.parametrize("stale", [True, False])
def test_tilted_halves_show_the_noise_of_the_whole(net, monkeypatch, stale):
    """Their difference, over three splits; with old scores nothing is certain or rare."""
    values, seen, plain = [], [], module.log_deviations

    def log_deviations(*arguments):
        values.append(plain(*arguments))
        return values[-1]

    def estimated_distance(errors, bias):
        seen.append(errors)
        return 0.5, 0.1

    monkeypatch.setattr(module, "log_deviations", log_deviations)
    monkeypatch.setattr(module, "estimated_distance", estimated_distance)
    rarities, rarity = [], DrawnRows.rarity
    monkeypatch.setattr(DrawnRows, "rarity", lambda *a: rarities.append(rarity(*a)) or rarities[-1])
    auto(net, scores=torch.ones(200) if stale else None, tolerance=None, n_passes=100)
    others = torch.stack(values[1:7])
    share = 1.0 if stale else rarities[-1]
    expected = (others[0::2] - others[1::2]) / (2 * TILT) * (share / 3) ** 0.5
    torch.testing.assert_close(seen[-1][:3], expected)


@pytest.mark.parametrize("loses", [True, False])
def test_groups_are_left_out_where_that_loses_span(net, monkeypatch, loses):
    """Then their mean tells the bias, by 7/9 of it; else that of the tilted ones does."""
    values, seen, plain = [], [], module.log_deviations
    monkeypatch.setattr(DrawnFactor, "loses_span", lambda *_: not loses)
    # the main process decides for all, whatever a process finds itself
    monkeypatch.setattr(module, "from_main", lambda x: not x if isinstance(x, bool) else x)
    monkeypatch.setattr(module, "log_deviations", lambda *a: values.append(plain(*a)) or values[-1])
    monkeypatch.setattr(
        module, "estimated_distance", lambda errors, bias: seen.append(bias) or (0.5, 0.1)
    )
    auto(net, tolerance=None, n_passes=100)
    assert len(values) == (11 if loses else 7)
    fewer, grown = (values[7:], (4 / 3) ** 2) if loses else (values[1:], (1 + TILT**2) ** 2)
    expected = (torch.stack(fewer).mean(0) - values[0]) / (grown - 1)
    torch.testing.assert_close(seen[-1], expected)


@pytest.mark.parametrize("pool", [100, 200])
def test_a_pool_that_is_no_training_set_has_noise_of_its_inputs(net, monkeypatch, pool):
    seen = []

    def estimated_distance(errors, bias):
        seen.append(len(errors))
        return 0.5, 0.1

    monkeypatch.setattr(module, "estimated_distance", estimated_distance)
    auto(net, tolerance=None, n_passes=60, n_pool=pool)
    assert seen[-1] == len(SPLITS) + 2 * (pool < 200)  # of inputs, and of the output layer


def test_a_progress_bar_counts_the_pool_and_backward_passes(net, capsys):
    la = Laplace(net, "classification", "all", "kron", debias="auto", tolerance=None, n_passes=33)
    la.fit(DataLoader(TensorDataset(X, Y), 50), progress_bar=True)
    shown = capsys.readouterr().err
    total = 200 + la.fit_report.n_passes
    assert "pairs" in shown and f"{total}/{total}" in shown


def test_an_empty_loader_is_refused_in_words():
    net, empty = nn.Linear(3, 2), TensorDataset(torch.zeros(0, 3), torch.zeros(0).long())
    la = Laplace(net, "classification", "all", "kron", debias="auto")
    with pytest.raises(ValueError, match="got an empty loader. Remedy"):
        la.fit(DataLoader(empty, 4), n_data=10)
