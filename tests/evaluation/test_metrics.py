"""Class metrics against sums in plain Python, from the logits on, also where they underflow."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import roc_curve
from torchmetrics.classification import MulticlassCalibrationError

from laplace_debias.evaluation.metrics import (
    ECE,
    NLL,
    Accuracy,
    Brier,
    MeanEntropy,
    entropy_auroc,
    entropy_fpr95,
    predictive_entropy,
)

ALL = {"accuracy": Accuracy, "nll": NLL, "ece": ECE, "brier": Brier, "mean_entropy": MeanEntropy}


def log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    total = math.log(math.fsum(math.exp(f - top) for f in row))
    return [f - top - total for f in row]


def oracle(logits: list[list[float]], labels: list[int], n_bins: int = 15) -> dict[str, float]:
    """Every metric by its definition, one datum at a time."""
    n, sums = len(labels), dict.fromkeys(("accuracy", "nll", "brier", "mean_entropy"), 0.0)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row, y in zip(logits, labels, strict=True):
        lp = log_softmax(row)
        p = [math.exp(value) for value in lp]
        top = max(range(len(row)), key=row.__getitem__)
        sums["accuracy"] += top == y
        sums["nll"] -= lp[y]
        sums["brier"] += sum((q - (c == y)) ** 2 for c, q in enumerate(p))
        sums["mean_entropy"] -= sum(q * value for q, value in zip(p, lp, strict=True))
        bins.setdefault(int(p[top] * n_bins), []).append((p[top], top == y))
    ece = sum(
        abs(sum(right for _, right in rows) - sum(conf for conf, _ in rows))
        for rows in bins.values()
    )
    return {name: value / n for name, value in sums.items()} | {"ece": ece / n}


def predictions(n=200, C=5, sharpness=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(n, C, generator=generator, dtype=torch.float64)
    return logits, torch.randint(C, (n,), generator=generator)


def value_of(metric, *batches):
    for batch in batches:
        metric.update(*batch)
    return metric.compute().item()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sharpness", [0.5, 3.0, 40.0])
def test_against_plain_python(name, sharpness):
    logits, y = predictions(sharpness=sharpness)
    found = value_of(ALL[name](), (logits.log_softmax(-1), y))
    # the confidences of the ECE are in single precision, as torchmetrics keeps them
    assert found == pytest.approx(
        oracle(logits.tolist(), y.tolist())[name], rel=1e-5 if name == "ece" else 1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nll_has_no_floor(dtype):
    logits = torch.tensor([[0.0, 2000.0], [5000.0, 0.0]], dtype=dtype)
    log_probs = logits.log_softmax(-1)
    assert value_of(NLL(), (log_probs, torch.tensor([0, 1]))) == 3500.0
    assert (log_probs.exp() == 0).any()  # the probabilities are zero
    certain = torch.tensor([[1.0, 0.0]], dtype=dtype).log()
    assert value_of(NLL(), (certain, torch.tensor([1]))) == math.inf
    assert value_of(NLL(), (certain, torch.tensor([0]))) == 0.0


@pytest.mark.parametrize("name", ALL)
def test_nan_is_never_a_number(name):
    logits, y = predictions(n=6)
    logits[2, 1] = math.nan
    y[2] = 0  # argmax of NaN is 0, so this would count as right
    log_probs = logits.log_softmax(-1)
    assert math.isnan(value_of(ALL[name](), (log_probs, y)))
    # one bad mini-batch among good ones
    batches = zip(log_probs.split(2), y.split(2), strict=True)
    assert math.isnan(value_of(ALL[name](), *batches))
    good = torch.tensor([0, 1, 3, 4, 5])
    assert math.isfinite(value_of(ALL[name](), (log_probs[good], y[good])))


@pytest.mark.parametrize("name", ALL)
def test_mini_batches_and_processes_add_up(name):
    logits, y = predictions()
    log_probs = logits.log_softmax(-1)
    whole = value_of(ALL[name](), (log_probs, y))
    batches = list(zip(log_probs.split(17), y.split(17), strict=True))
    assert value_of(ALL[name](), *batches) == pytest.approx(whole, rel=1e-6)
    # what torchmetrics does with the states of two processes
    one, other = ALL[name](), ALL[name]()
    one.update(log_probs[:30], y[:30])
    other.update(log_probs[30:], y[30:])
    one.merge_state(other)
    assert one.compute().item() == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("n_bins", [5, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ece_equals_torchmetrics(n_bins, dtype):
    logits, y = predictions(n=400, C=7, sharpness=4.0)
    probs = logits.to(dtype).softmax(-1)
    probs[:20] = torch.eye(7, dtype=dtype)[y[:20]]  # confidence exactly 1
    expected = MulticlassCalibrationError(7, n_bins=n_bins, norm="l1")(probs.log().exp(), y).item()
    assert value_of(ECE(n_bins), (probs.log(), y)) == expected


def test_ece_by_hand():
    # right with 0.75, wrong with 0.6, right with 0.9: each alone in one of ten bins
    batch = torch.tensor([[0.75, 0.25], [0.4, 0.6], [0.1, 0.9]]).log(), torch.tensor([0, 0, 1])
    expected = (abs(1 - 0.75) + abs(0 - 0.6) + abs(1 - 0.9)) / 3
    assert value_of(ECE(10), batch) == pytest.approx(expected, rel=1e-6)
    assert value_of(ECE(1), batch) == pytest.approx(0.75 - 2 / 3, rel=1e-5)
    with pytest.raises(ValueError, match="Expected n_bins >= 1, got 0. Remedy"):
        ECE(0)


def test_ece_gives_what_it_is_computed_from():
    metric = ECE()
    metric.update(torch.tensor([[0.75, 0.25]]).log(), torch.tensor([0]))
    metric.update(torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log(), torch.tensor([1, 1]))
    confidences, correct = metric.top_label()
    torch.testing.assert_close(confidences, torch.tensor([0.75, 0.5, 0.9]))
    assert correct.tolist() == [1, 0, 1]


def test_directions():
    better = {name: metric().higher_is_better for name, metric in ALL.items()}
    assert better == {
        "accuracy": True,
        "nll": False,
        "ece": False,
        "brier": False,
        "mean_entropy": None,
    }


def test_entropy_of_certain_and_uniform_predictions():
    log_probs = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64).log()
    torch.testing.assert_close(
        predictive_entropy(log_probs), torch.tensor([0.0, math.log(3)], dtype=torch.float64)
    )


def test_auroc_by_hand():
    low, high = torch.tensor([0.1, 0.4, 0.2]), torch.tensor([0.3, 0.2])
    # of six pairs (ID, OOD), 3 + 0.5 have the larger OOD entropy
    assert entropy_auroc(low, high) == pytest.approx(3.5 / 6)


def test_auroc_separates_tiny_entropies():
    # torchmetrics squashes scores outside [0, 1], such as log 4, by a sigmoid; the tiny entropies
    # would then be ties in single precision
    id_entropies = torch.tensor([3e-11, math.log(4)])
    ood_entropies = torch.tensor([3e-8, math.log(4)])
    assert entropy_auroc(id_entropies, ood_entropies) == (1 + 1 + 0 + 0.5) / 4


def test_fpr95_against_sklearn():
    generator = torch.Generator().manual_seed(0)
    inside = 5 * torch.rand(200, generator=generator, dtype=torch.float64) ** 3  # beyond 1 as well
    outside = 0.5 + 4 * torch.rand(150, generator=generator, dtype=torch.float64)
    is_id = [1] * 200 + [0] * 150
    fpr, tpr, _ = roc_curve(is_id, -torch.cat([inside, outside]).numpy(), drop_intermediate=False)
    assert entropy_fpr95(inside, outside) == pytest.approx(fpr[tpr >= 0.95].min())
    threshold = inside.sort().values[189]  # 190 of 200 pass
    assert entropy_fpr95(inside, outside) == pytest.approx((outside <= threshold).double().mean())
    assert entropy_fpr95(inside, inside + 100) == 0.0
