"""Make a trained network Bayesian from two mini-batches, and see what debiasing does.

Scikit-learn's digits, a small CNN, and a K-FAC Laplace approximation fitted in three ways: on a
single mini-batch of 64 data, debiased on two mini-batches of 32, and on the whole training set.

    python -m examples.quickstart    # some seconds
"""

# %%
from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassCalibrationError

from laplace_debias import Laplace, sweep_prior_precision

# %% [markdown]
# ## Data and network
# 1,000 digits train, 297 choose the prior precision, 500 test. Nothing is downloaded.

# %%
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.as_tensor(labels)
order = torch.randperm(len(y))
X, y = X[order], y[order]
train, validation, test = (
    TensorDataset(X[part], y[part]) for part in (slice(1000), slice(1000, 1297), slice(1297, None))
)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10),
)  # fmt: skip
optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(30):
    for inputs, targets in DataLoader(train, batch_size=64, shuffle=True):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimiser.step()


# %% [markdown]
# ## Three posteriors
# All three stand for the same 1,000 data; the first two have seen 64 of them.


# %%
def fit(debias: bool | str, batch_size: int) -> Laplace:
    """A posterior over all weights from a shuffled loader."""
    la = Laplace(model, "classification", "all", "kron", debias=debias)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(train, batch_size=batch_size, shuffle=True, generator=generator)
    if debias == "single" and batch_size < len(train):
        la.fit(next(iter(loader)), n_data=len(train))  # one mini-batch for both roles
    else:
        la.fit(loader)  # two-batch: its first mini-batch for directions, its second for curvatures
    return la


posteriors = {
    "single mini-batch of 64": fit("single", 64),
    "debiased, 2 x 32": fit(True, 32),
    "whole training set": fit("single", len(train)),
}

# %% [markdown]
# ## How wrong was one mini-batch about its own curvature?
# The convolutions see hundreds of patches, so 32 images know their curvature well; the linear
# layers see one position per image, and there the bias is plain.

# %%
bias = posteriors["debiased, 2 x 32"].curvature_bias(fraction=0.01)
print(bias, end="\n\n")
head = next(layer for layer in bias.layers if layer.name == "7.weight")
assert head.top_ratio > 1, "the head's top curvature is over-estimated on the data that chose it"

# %% [markdown]
# ## Prior precision
# One pass over the validation data evaluates the paper's 14 prior precisions.

# %%
validation_loader = DataLoader(validation, batch_size=100)
sweeps = {name: sweep_prior_precision(la, validation_loader) for name, la in posteriors.items()}
for name, la in posteriors.items():
    la.prior_precision = sweeps[name].best("nll")
full = torch.tensor(sweeps["whole training set"].values["nll"])
gap = {
    name: (torch.tensor(sweep.values["nll"]) - full).abs().mean().item()
    for name, sweep in sweeps.items()
}

# %% [markdown]
# ## Predictions on the test set

# %%
inputs, targets = test.tensors
print(f"{'posterior':<26}{'prior precision':>16}{'accuracy':>10}{'NLL':>8}{'ECE':>8}")


def report(name: str, prior_precision: str, probs: torch.Tensor) -> None:
    """Print a line of the table."""
    nll = nn.functional.nll_loss(probs.log(), targets).item()
    ece = MulticlassCalibrationError(num_classes=10)(probs, targets).item()
    accuracy = (probs.argmax(-1) == targets).float().mean().item()
    print(f"{name:<26}{prior_precision:>16}{accuracy:>10.3f}{nll:>8.3f}{ece:>8.3f}")


with torch.no_grad():
    report("none (the plain network)", "-", model(inputs).softmax(-1))
for name, la in posteriors.items():
    report(name, f"{la.prior_precision.item():.3g}", la(inputs))
print(
    "\nMean distance of the validation NLL from the whole training set's, over the 14 prior "
    f"precisions: {gap['single mini-batch of 64']:.4f} for the single mini-batch, "
    f"{gap['debiased, 2 x 32']:.4f} debiased, at the same 64 data."
)
