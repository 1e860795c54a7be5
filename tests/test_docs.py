"""Every code block of the README and the documentation runs, page by page, as a reader would."""

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return BLOCK.findall(page.read_text())


def what_a_reader_has() -> dict:
    """A trained classifier and its data, under the names that the pages use."""
    torch.manual_seed(0)
    X = torch.randn(200, 4)
    y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    train = TensorDataset(X[:160], y[:160])
    shuffled = DataLoader(train, 32, shuffle=True, generator=torch.Generator().manual_seed(0))
    held_out = [(X[160:], y[160:])]
    return {
        "__name__": "page",
        "torch": torch,
        "nn": nn,
        "DataLoader": DataLoader,
        "TensorDataset": TensorDataset,
        "model": model,
        "train_loader": shuffled,
        "val_loader": held_out,
        "test_loader": held_out,
        "ood_loader": [(X[160:] + torch.randn(40, 4), y[160:])],
        "batch_a": next(iter(shuffled)),
        "batch_b": next(iter(shuffled)),
        "N": len(train),
        "x": X[160:170],
    }


def test_there_are_blocks():
    assert sum(len(blocks(page)) for page in PAGES) > 10


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = what_a_reader_has()
    for i, block in enumerate(blocks(page)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(block, f"{page.name}, block {i + 1}", "exec"), names)


def test_pages_name_files_that_exist():
    """Links and pictures lead somewhere; those of the gallery lie beside the examples."""
    missing = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" in target or target.startswith("mailto:"):
                continue
            where = page.parent / target
            if "gallery/" in target:
                where = ROOT / "examples" / "gallery" / Path(target).name
            if not where.exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert not missing


def test_the_api_reference_has_everything_public():
    """What a room or the package exports stands in the reference, by itself or with its room."""
    named, whole = set(), set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for target, options in re.findall(
            r"^::: ([\w.]+)\n((?:    .*\n)*)", page.read_text(), re.M
        ):
            (whole if "members: true" in options else named).add(target)
    documented = {id(_resolved(target)) for target in named}
    for room in whole:
        module = importlib.import_module(room)
        documented |= {id(getattr(module, name)) for name in module.__all__}
    rooms = [p.parent.name for p in (ROOT / "laplace_debias").glob("*/__init__.py")]
    missing = []
    for name in ["laplace_debias", *(f"laplace_debias.{room}" for room in rooms)]:
        module = importlib.import_module(name)
        public = [n for n in module.__all__ if callable(getattr(module, n))]
        missing += [f"{name}.{n}" for n in public if id(getattr(module, n)) not in documented]
    assert len(rooms) > 8 and not missing


def _resolved(target: str) -> object:
    """What a dotted name stands for."""
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)
