"""The example on debiased CG runs at a small size, draws, and resumes."""

import re

import pytest
import torch

from examples import debiased_cg
from examples.quadratic_problems import digits, digits_model, digits_problem, train


def test_debiased_cg(tmp_path, capsys):
    options = "--batch-sizes 128 --draws 2 --iterations 30 --epochs 60 --width 128"
    flags = ["--out", str(tmp_path), *options.split()]
    debiased_cg.main(flags)
    first = capsys.readouterr().out
    assert "debiased lower in 2 of 2" in first
    assert (tmp_path / "debiased_cg-digits-with-0-random-labels" / "cg.png").stat().st_size > 10_000
    debiased_cg.main(flags)  # from the file
    assert capsys.readouterr().out == first


def test_a_subset_is_evaluated_and_a_run_goes_on_from_its_products(tmp_path, monkeypatch, capsys):
    options = "--batch-sizes 128 --draws 1 --iterations 30 --epochs 60 --width 128"
    flags = ["--out", str(tmp_path), *options.split(), "--eval-images", "256"]
    product, made = debiased_cg.Quadratic.__matmul__, []

    def interrupted(self, V):
        if len(made) == 40:  # within the debiased run
            raise InterruptedError
        made.append(len(V))
        return product(self, V)

    with monkeypatch.context() as patch:
        patch.setattr(debiased_cg.Quadratic, "__matmul__", interrupted)
        with pytest.raises(InterruptedError):
            debiased_cg.main(flags)
    counted = []
    count = lambda self, V: counted.append(1) or product(self, V)  # noqa: E731
    monkeypatch.setattr(debiased_cg.Quadratic, "__matmul__", count)
    debiased_cg.main(flags)
    assert len(counted) == 30 + 60 - 40
    out = capsys.readouterr().out
    assert "debiased lower in 1 of 1" in out and out.count("M = ") == 1  # no run on all data
    folder = tmp_path / "debiased_cg-digits-with-0-random-labels"
    assert not list((folder / "products").glob("*/*"))


def test_whether_the_first_step_helps(tmp_path, capsys):
    """Along its own gradient a mini-batch of all data has its own slope and curvature."""
    problem = digits_problem(0.5, epochs=3, width=16, constant_sgd=0.3)
    assert problem.name.endswith("SGD at 0.3")
    options = {"l2": problem.l2, "regularize_biases": False, "chunk_size": 512}
    n = len(problem.train[1])
    assert debiased_cg.first_step(problem, n, 1, options).tolist() == pytest.approx(
        [1, 1], rel=1e-4
    )
    slope, curvature = debiased_cg.first_step(problem, 64, 4, options).tolist()
    assert 0 < slope < 1 and 0.5 < curvature < 2
    flags = "--label-noise 0.5 --constant-sgd 0.3 --epochs 20 --first-step --draws 2".split()
    sizes = "--batch-sizes 256 --iterations 6 --width 64".split()
    debiased_cg.main(["--out", str(tmp_path), *flags, *sizes])
    line = capsys.readouterr().out.splitlines()[1]
    start, _, single, _, debiased = map(float, re.findall(r"\d+\.\d{4}", line))
    assert single < start and debiased < start  # the paper's picture: both first improve


def test_a_constant_rate_is_sgd_s():
    """One epoch of one mini-batch: the step of SGD."""
    model = digits_model(8)
    before = [p.detach().clone() for p in model.parameters()]
    X, y = digits(0.5)[0]
    train(model, (X, y), l2=0.0, epochs=1, batch_size=len(y), constant_sgd=0.5)
    again = digits_model(8)
    torch.nn.functional.cross_entropy(again(X), y).backward()
    for p, start, q in zip(model.parameters(), before, again.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), start - 0.5 * q.grad, rtol=1e-4, atol=1e-6)
