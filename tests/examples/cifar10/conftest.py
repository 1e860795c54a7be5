"""Tiny made files, a tiny network with its weights, and a stand-in for the corruptions."""

import sys
import types

import numpy as np
import pytest
import torch

from examples.cifar10.data import load_cifar
from examples.cifar10.laplace_experiment import load_model
from examples.networks import make_model
from tests.examples.cifar_files import write_cifar10

MODEL = "convnet-0-2"


@pytest.fixture
def tiny_cifar10(tmp_path):
    """A folder with 30 training and 4 test images, and what was written."""
    return tmp_path, *write_cifar10(tmp_path, 6, 4)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder in the standard layout, 40 training and 10 test images, and trained weights."""
    root = tmp_path_factory.mktemp("cifar")
    write_cifar10(root, 8, 10)
    torch.manual_seed(0)
    torch.save(make_model(MODEL).state_dict(), root / "weights.pt")
    return root


@pytest.fixture
def problem(files):
    """The tiny network with frozen biases, and its 32 training images."""
    train = load_cifar(files, validation_size=8).train
    return load_model(MODEL, files / "weights.pt", 10), train


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


@pytest.fixture
def arguments(files):
    """Make a command line for the tiny network: ``arguments(out, *more)``."""

    def make(out, *more):
        fixed = f"--data {files} --weights {files / 'weights.pt'} --out {out} --model {MODEL}"
        return [*fixed.split(), "--validation-size", "8", *map(str, more)]

    return make
