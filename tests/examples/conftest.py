"""CIFAR-10's folder with few random images, as the research examples read it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from examples import classifiers
from tests.examples.cifar_files import write_cifar10


def tiny_net():
    return nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(196, 10))


@pytest.fixture
def cifar10_folder(tmp_path, monkeypatch):
    """Random images in the layout of CIFAR-10: 60 for training, of which 10 are set aside."""
    write_cifar10(tmp_path, 12, 12)
    load = partial(classifiers.load_cifar, validation_size=10)
    monkeypatch.setattr(classifiers, "load_cifar", load)
    recipe = replace(classifiers.PROBLEMS["cifar10"], build=tiny_net)
    monkeypatch.setitem(classifiers.PROBLEMS, "cifar10", recipe)
    return tmp_path


def pytest_collection_modifyitems(items):
    """Leave examples out of the coverage: half of all time, and no test of the library's lines."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker("no_cover")
