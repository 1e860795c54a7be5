"""The CIFAR example's experiment and runtimes, whole, on tiny made files and a tiny network."""

import importlib
import json
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from laplace_debias.comparison import CustomMethod, compare
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.kfac.factors import DataFactors
from laplace_debias.storage import CellStore

EXAMPLE = Path(__file__).parents[2] / "examples" / "cifar10"
MODULES = "models data train corruptions reference draws laplace_experiment runtime".split()
MODEL = "convnet-0-2"


@pytest.fixture(scope="module")
def example():
    """The example's modules, imported as its scripts import them."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def files(example, tmp_path_factory):
    """A folder in the standard layout, 40 training and 10 test images, and trained weights."""
    root = tmp_path_factory.mktemp("cifar")
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rng = np.random.default_rng(seed)
        n = 10 if name == "test_batch" else 8
        batch = {b"data": rng.integers(0, 256, (n, 3072), dtype=np.uint8)}
        batch[b"labels"] = rng.integers(0, 10, n).tolist()
        (folder / name).write_bytes(pickle.dumps(batch))
    torch.manual_seed(0)
    torch.save(example.models.make_model(MODEL).state_dict(), root / "weights.pt")
    return root


@pytest.fixture
def problem(example, files):
    """The tiny network with frozen biases, and its 32 training images."""
    train = example.data.load_cifar(files, validation_size=8).train
    return example.laplace_experiment.load_model(MODEL, files / "weights.pt", 10), train


@pytest.fixture
def library(monkeypatch):
    """Stands in for `imagecorruptions`, with its two kinds of randomness."""
    calls = []

    def corrupt(image, severity, corruption_name, seed=None):
        calls.append((corruption_name, severity))
        own = corruption_name in ("impulse_noise", "glass_blur")
        assert (seed is not None) == own
        noise = np.random.default_rng(seed) if own else np.random
        return (image + 40 * severity * noise.random(image.shape)).clip(0, 255).astype(np.uint8)

    module = types.ModuleType("imagecorruptions")
    module.corrupt = corrupt
    monkeypatch.setitem(sys.modules, "imagecorruptions", module)
    return calls


def arguments(files, out, *more):
    fixed = f"--data {files} --weights {files / 'weights.pt'} --out {out} --model {MODEL}"
    return [*fixed.split(), "--validation-size", "8", *map(str, more)]


EXPERIMENT = "--budgets 8 16 --n-test 6 --n-train 4 --n-corrupted 3 --severities 1".split()


def test_corruptions_are_drawn_per_image_and_reproducible(example, files, library):
    test = example.data.load_cifar(files, validation_size=8).test
    corruptions = example.corruptions
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    first = corruptions.make_corrupted(test, 3, seed=5)
    assert (np.random.get_state()[1] == before).all()
    assert first.images.shape == (10, 3, 32, 32) and first.images.dtype == torch.uint8
    assert torch.equal(first.labels, test.labels)
    assert [name for name, _ in library] == corruptions.draw_names(10, 3, 5)
    assert {severity for _, severity in library} == {3}
    np.random.seed(2)  # must not matter
    assert torch.equal(corruptions.make_corrupted(test, 3, seed=5).images, first.images)
    assert not torch.equal(corruptions.make_corrupted(test, 3, seed=6).images, first.images)
    drawn = corruptions.draw_names(3000, 1, 0)
    assert set(drawn) == set(corruptions.NAMES) and len(corruptions.NAMES) == 15
    assert drawn != corruptions.draw_names(3000, 2, 0)


def test_a_missing_library_is_explained(example, files, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    test = example.data.load_cifar(files, validation_size=8).test
    with pytest.raises(ImportError, match="pip install imagecorruptions-imaug"):
        example.corruptions.make_corrupted(test, 1)
    with pytest.raises(ValueError, match=r"severity in \(1, 2, 3, 4, 5\), got 6"):
        example.corruptions.make_corrupted(test, 6)


def test_published_files_are_read_at_the_right_rows(example, tmp_path):
    corruptions = example.corruptions
    for number, name in enumerate(corruptions.NAMES):
        pixels = np.arange(40, dtype=np.uint8)[:, None, None, None] + np.uint8(40 * (number % 5))
        np.save(tmp_path / f"{name}.npy", np.broadcast_to(pixels, (40, 32, 32, 3)))
    np.save(tmp_path / "labels.npy", np.arange(40) % 10)
    split = corruptions.read_published(tmp_path, 7, severity=4, seed=2, per_severity=8)
    names = corruptions.draw_names(7, 4, 2)
    for i, name in enumerate(names):
        row = 3 * 8 + i  # three severities of eight images come before
        assert (split.images[i] == row + 40 * (corruptions.NAMES.index(name) % 5)).all()
        assert split.labels[i] == row % 10
    with pytest.raises(ValueError, match="at most 8 images, got n = 9"):
        corruptions.read_published(tmp_path, 9, 1, per_severity=8)
    with pytest.raises(ValueError, match=r"shape \(45, 32, 32, 3\), got \(40, 32, 32, 3\)"):
        corruptions.read_published(tmp_path, 7, 1, per_severity=9)
    (tmp_path / "labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match="labels.npy of CIFAR-10-C"):
        corruptions.read_published(tmp_path, 7, 1, per_severity=8)


def assert_same(one, two, rtol=1e-10):
    assert one.n == two.n
    torch.testing.assert_close(one.loss, two.loss, rtol=rtol, atol=0)
    for block, other in zip(one.blocks, two.blocks, strict=True):
        for factor, expected in zip(block, other, strict=True):
            assert factor.dtype == torch.float64
            torch.testing.assert_close(factor, expected, rtol=rtol, atol=1e-12)


def test_reference_goes_on_and_grows(example, problem, tmp_path):
    model, train = problem
    reference, path = example.reference, tmp_path / "reference.pt"
    options = dict(chunk=3, save_every=5, seed=4)
    stopped = reference.reference_factors(model, train, 20, path, max_images=7, **options)
    assert stopped.n == 7
    resumed = reference.reference_factors(model, train, 20, path, **options)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(4))

    def oracle(n):
        X, y = example.data.normalise(train.images[order[:n]], torch.float64), train.labels
        model64 = example.laplace_experiment.make_model(MODEL).double()
        model64.load_state_dict(model.state_dict())
        for name, p in model64.named_parameters():
            p.requires_grad_(name.endswith("weight"))
        kfac = kfac_factors(model64, X, y[order[:n]], likelihood="classification")
        return DataFactors([list(block) for block in kfac.blocks], n, kfac.loss, 10)

    assert_same(resumed, oracle(20))
    assert_same(reference.reference_factors(model, train, 32, path, **options), oracle(32))
    assert next(model.parameters()).dtype == torch.float32
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(ValueError, match="at most 20 images in .* got 32"):
        reference.reference_factors(model, train, 20, path, **options)
    with pytest.raises(ValueError, match="'seed': \\(4, 5\\)"):
        reference.reference_factors(model, train, 32, path, seed=5)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(ValueError, match="'model'"):
        reference.reference_factors(model, train, 32, path, **options)
    with pytest.raises(ValueError, match="between 1 and 32, got 33"):
        reference.reference_factors(model, train, 33, path, **options)


def test_a_finished_reference_computes_nothing(example, problem, tmp_path, monkeypatch):
    model, train = problem
    reference = example.reference
    first = reference.reference_factors(model, train, 8, tmp_path / "reference.pt")
    monkeypatch.setattr(reference, "factors_of", None)
    assert_same(reference.reference_factors(model, train, 8, tmp_path / "reference.pt"), first)


@pytest.mark.parametrize("budget", [8, 16])
def test_nested_draws_are_the_comparisons_own(example, problem, budget):
    model, train = problem
    model.double()
    loader = DataLoader(train.to_dataset(torch.float64), batch_size=32)
    settings = dict(budgets=(budget,), n_draws=2, prior_precisions=(0.1, 3.0), seed=7)
    own = compare(model, loader, loader, methods=("single", "two-batch"), **settings)
    draws = example.draws.NestedDraws(model, train, [budget], seed=7)
    methods = [CustomMethod(name, fit) for name, fit in draws.fits.items()]
    nested = compare(model, loader, loader, methods=methods, **settings)
    for a, b in zip(own.rows, nested.rows, strict=True):
        assert (a.method, a.batch_size, a.draw) == (b.method, b.batch_size, b.draw)
        assert b.metrics["nll"] == pytest.approx(a.metrics["nll"], rel=1e-8)


def test_nested_draws_compute_every_image_once(example, problem):
    # posteriors are not compared: rounding turns the arbitrary basis of their null spaces
    model, train = problem
    draws = example.draws.NestedDraws(model, train, [8, 16], seed=7)
    for draw in (0, 1):
        order = draws.order(draw)
        for start, stop in ((0, 8), (0, 16), (0, 4), (4, 8), (8, 16)):
            direct = example.reference.factors_of(model.double(), train, order[start:stop])
            assert_same(draws.factors(draw, start, stop), direct)
    assert draws.n_images == 2 * 16  # not 2 * (8 + 8 + 16 + 16)
    with pytest.raises(ValueError, match=r"borders \[0, 4, 8, 16\], got 0 to 6"):
        draws.factors(0, 0, 6)


def test_experiment_from_data_to_figure(example, files, library, tmp_path, capsys):
    experiment = example.laplace_experiment
    more = [*EXPERIMENT, "--n-draws", 2, "--reference-size", 24, "--crossfit"]
    argv = arguments(files, tmp_path, *more)
    result = experiment.main(argv)
    assert result.reference == "large-batch" and result.budgets("large-batch") == (24,)
    assert result.methods == (
        "plain",
        "large-batch",
        "single",
        "two-batch",
        "crossfit-curvature",
    )
    assert len(result.rows) == 1 + 14 * (1 + 3 * 2 * 2)
    assert result.n_data == 32
    betas = sorted({row.prior_precision / 32 for row in result.select("single")})
    assert betas[0] == pytest.approx(1e-4) and betas[-1] == pytest.approx(10)
    assert {"train_nll", "c1_nll", "c1_auroc"} < set(result.metrics)
    printed = capsys.readouterr().out
    assert "Gap ratio two-batch / single" in printed and "c1     ece" in printed
    ratio = result.gap_ratio("c1_nll")[16]
    line = next(line for line in printed.splitlines() if line.startswith("c1     nll"))
    assert line.split()[-1] == f"{ratio:.2f}"
    figures = {path.name for path in tmp_path.glob("*.png")}
    assert figures == {f"figure_{name}.png" for name in ("test", "train", "c1")}
    made = len(library)
    assert made == 3

    again = experiment.run(experiment.parse(argv))
    assert again == result and len(library) == made  # corrupted images come from their file
    for path in tmp_path.glob("*.png"):
        path.unlink()
    redrawn = experiment.main(["--out", str(tmp_path), "--redraw"])
    assert {path.name for path in tmp_path.glob("*.png")} == figures
    assert redrawn.gap_ratio("nll") == result.gap_ratio("nll")
    assert sorted(redrawn.to_csv().splitlines()) == sorted(result.to_csv().splitlines())


def test_experiment_goes_on_after_an_interruption(example, files, tmp_path, monkeypatch):
    experiment, draws = example.laplace_experiment, example.draws
    small = "--budgets 8 --n-test 4 --n-train 0 --n-corrupted 0 --n-shared 2 --n-draws 2".split()
    expected = experiment.main(arguments(files, tmp_path / "whole", *small))
    assert expected.reference == "full"

    argv = arguments(files, tmp_path / "cut", *small)
    assert experiment.main([*argv, "--max-images", "20"]) is None  # the reference is not complete
    fitted = []
    originals = {name: getattr(draws.NestedDraws, name) for name in ("single", "two_batch")}

    def spy(name, stop):
        def fit(self, budget, draw):
            if len(fitted) == stop:
                raise KeyboardInterrupt
            fitted.append((name, budget, draw))
            return originals[name](self, budget, draw)

        return fit

    for stop in (2, None):
        for name in originals:
            monkeypatch.setattr(draws.NestedDraws, name, spy(name, stop))
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                experiment.main(argv)
    result = experiment.main(argv)
    assert len(result.rows) == len(expected.rows)
    for row, other in zip(result.rows, expected.rows, strict=True):
        assert row.metrics == pytest.approx(other.metrics, rel=1e-4)
    # full + single-0 were finished together; two-batch-0 was fitted, but its group was cut
    assert fitted.count(("single", 8, 0)) == 1
    assert fitted.count(("two_batch", 8, 0)) == 2
    assert len(fitted) == 2 + 3


def test_redrawing_takes_the_largest_reference(example, tmp_path):
    def cell(name, method, budget, nll):
        row = dict(method=method, budget=budget, batch_size=budget, draw=0, prior_precision=1.0)
        store.put(name, [row | {"metrics": {"nll": nll}}])

    store = CellStore(tmp_path, {"options": {"n_data": 32}})
    cell("single-8-0", "single", 8, 2.0)
    cell("large-batch-16-a", "large-batch", 16, 5.0)
    cell("large-batch-24-b", "large-batch", 24, 1.5)
    result = example.laplace_experiment.load_cells(tmp_path)
    assert result.gap("nll", "single", 8).gap == 0.5
    cell("full-c", "full", 32, 1.0)
    assert example.laplace_experiment.load_cells(tmp_path).gap("nll", "single", 8).gap == 1.0
    cell("full-d", "full", 32, 1.0)
    with pytest.raises(ValueError, match="one reference of 32 images"):
        example.laplace_experiment.load_cells(tmp_path)


def test_the_reported_run_can_be_redrawn(example):
    result = example.laplace_experiment.load_cells(EXAMPLE / "reported" / "cells")
    assert (result.reference, result.budgets("large-batch")) == ("large-batch", (8000,))
    methods, budgets = ("single", "two-batch", "crossfit-curvature"), (64, 256, 1024)
    for method in methods:
        assert {(row.budget, row.draw) for row in result.select(method)} == {
            (budget, draw) for budget in budgets for draw in range(5)
        }
    assert len(result.rows) == 1 + 14 * (1 + len(methods) * len(budgets) * 5)
    report = example.laplace_experiment.report(result).split("\n")
    lines = [line.split()[2:] for line in report if line.startswith("test   nll")]
    readme = (EXAMPLE.parents[1] / "README.md").read_text()
    for method, line, between in zip(methods[1:], lines, (" | ", "** | **"), strict=True):
        ratios = result.gap_ratio("nll", method)
        assert line == [f"{ratios[budget]:.2f}" for budget in budgets]
        assert between.join(line) in readme


def test_experiment_wants_its_inputs(example, tmp_path, capsys):
    with pytest.raises(SystemExit):
        example.laplace_experiment.main(["--out", str(tmp_path)])
    assert "expected --data and --weights" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="run the experiment first"):
        example.laplace_experiment.main(["--out", str(tmp_path), "--redraw"])


def test_runtimes_of_every_stage(example, files, tmp_path, capsys):
    more = "--budgets 8 --n-runs 2 --n-samples 3 --large-size".split()
    times = example.runtime.main(arguments(files, tmp_path, *more, 32))
    assert list(times) == ["single 8", "two-batch 2 x 4", "full"]
    assert set(times["two-batch 2 x 4"]) == {"construct", "decompose", "debias", "sample"}
    assert set(times["full"]) == {"construct", "decompose", "sample"}
    assert all(len(runs) == 2 and min(runs) > 0 for s in times.values() for runs in s.values())
    content = json.loads((tmp_path / "runtime.json").read_text())
    assert content["seconds"] == times and content["settings"]["n_samples"] == 3
    assert str(files) not in json.dumps(content)
    assert (tmp_path / "runtime.png").stat().st_size > 0
    assert "two-batch 2 x 4" in capsys.readouterr().out
    named = example.runtime.main(arguments(files, tmp_path, *more, 16, "--n-runs", 1))
    assert "large-batch 16" in named and "full" not in named
    with pytest.raises(ValueError, match="at most N = 32 training images"):
        example.runtime.main(arguments(files, tmp_path, *more, 33))
