"""Problems for the examples on quadratics: CIFAR from its standard folders, and flags."""

import pytest
import torch

from examples import debiased_cg
from examples.networks import make_model
from examples.quadratic_problems import cifar_problem
from tests.examples.cifar_files import write_cifar100


def test_cifar_problem_reads_standard_folders(tmp_path):
    write_cifar100(tmp_path, 10_016, 8)
    for name, l2 in (("convnet-1-4", 0.0), ("allcnnc", 5e-4)):
        torch.save(make_model(name, 100).state_dict(), tmp_path / "state.pt")
        problem = cifar_problem("cifar100", tmp_path, name, tmp_path / "state.pt", 12)
        assert problem.train[0].shape == (12, 3, 32, 32) and len(problem.test[1]) == 8
        assert problem.model(problem.test[0]).shape == (8, 100) and problem.l2 == l2


def test_cifar_needs_its_flags():
    with pytest.raises(SystemExit, match="--root and --checkpoint"):
        debiased_cg.main(["--data", "cifar10"])
