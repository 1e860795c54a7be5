"""Input factors of K-FAC-expand, and the rows behind them, from forward passes alone.

Conventions as in `kfac.engine`: A is the mean over data and positions of `a a^T`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.recorder import OwnedParameter, Tape, owned_parameters

Inputs = Tensor | MutableMapping[str, Any]


@dataclass(frozen=True)
class InputFactors:
    """Input factors of a model, from forward passes alone.

    Attributes:
        names: Name of each parameter, in the order of `model.parameters()`.
        A: Mean over data and positions of `a a^T` for a weight, None for a bias.
        rows: The rows `[n, d_in]` behind A where they were kept, None elsewhere.
        outputs: The network's outputs `[n, C]` of the same forward pass, for scores and losses.
        is_output: For each parameter, whether its layer's output is the network's output. Its B
            is then a sum of loss Hessians, and `mean_loss_hessian` gives it without backward pass.
        n_data: Number of data.
    """

    names: tuple[str, ...]
    A: tuple[Tensor | None, ...]
    rows: tuple[Tensor | None, ...]
    outputs: Tensor
    is_output: tuple[bool, ...]
    n_data: int

    def __add__(self, other: InputFactors) -> InputFactors:
        """Factors of the data of both: A averaged by numbers of data, outputs in a row."""
        check_names(self.names, other.names)
        return InputFactors(
            self.names,
            tuple(
                None if A is None else pooled_mean(A, self.n_data, A_other, other.n_data)
                for A, A_other in zip(self.A, other.A, strict=True)
            ),
            tuple(
                None if one is None or two is None else torch.cat([one, two])
                for one, two in zip(self.rows, other.rows, strict=True)
            ),
            torch.cat([self.outputs, other.outputs]),
            tuple(a and b for a, b in zip(self.is_output, other.is_output, strict=True)),
            self.n_data + other.n_data,
        )


@torch.no_grad()
def input_factors(
    model: nn.Module,
    x: Inputs,
    *,
    params: Iterable[nn.Parameter] | None = None,
    rows_from: float = math.inf,
) -> InputFactors:
    """Input factors A of a mini-batch: one forward pass, no gradient.

    Args:
        model: Network as for `kfac_factors`.
        x: Mini-batch, a tensor or a mapping that the model takes as its one argument.
        params: Parameters that get a block; by default all that require a gradient.
        rows_from: Keep the rows of linear layers of at least that many inputs, if they see one row
            per datum; by default of none.

    Returns:
        A for every weight, and the network's outputs.

    Raises:
        ValueError: As `kfac_factors`.

    Example:
        >>> factors = input_factors(nn.Linear(2, 1), torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
        >>> factors.names, factors.A
        (('weight', 'bias'), (tensor([[0.5000, 0.0000], [0.0000, 4.5000]]), None))
    """
    owned = owned_parameters(model, params)
    tape = Tape(owned, inputs=True, outputs=False, rows_from=rows_from)
    with evaluation_mode(model), tape.recording():
        f = model(x)
    check_outputs(f)
    A = tuple(tape.input_mean(p.layers) if p.role == "weight" else None for p in owned)
    is_output = tuple(tape.is_output(p, f) for p in owned)
    names = tuple(p.name for p in owned)
    return InputFactors(names, A, _kept_rows(tape, owned, len(f)), f, is_output, len(f))


@torch.no_grad()
def input_rows(
    model: nn.Module,
    x: Inputs,
    *,
    params: Iterable[nn.Parameter] | None = None,
    rows_from: float,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Outputs of a mini-batch, and the input rows of its wide linear layers; no factor is formed.

    Args:
        model: Network as for `kfac_factors`.
        x: Mini-batch, a tensor or a mapping that the model takes as its one argument.
        params: Parameters to consider; by default all that require a gradient.
        rows_from: See `input_factors`.

    Returns:
        Outputs `[n, C]`, and for each parameter the rows `[n, d_in]` or None, as in `InputFactors`.

    Raises:
        ValueError: As `kfac_factors`.

    Example:
        >>> outputs, rows = input_rows(nn.Linear(2, 1), torch.ones(3, 2), rows_from=2)
        >>> outputs.shape, rows[0].shape, rows[1]
        (torch.Size([3, 1]), torch.Size([3, 2]), None)
    """
    owned = owned_parameters(model, params)
    tape = Tape(owned, inputs=False, outputs=False, rows_from=rows_from)
    with evaluation_mode(model), tape.recording():
        f = model(x)
    check_outputs(f)
    return f, _kept_rows(tape, owned, len(f))


def _kept_rows(tape: Tape, owned: list[OwnedParameter], n: int) -> tuple[Tensor | None, ...]:
    """Rows of every weight, where the tape has one for each of n data."""
    return tuple(tape.input_rows(p.layers, n) if p.role == "weight" else None for p in owned)


def pooled_mean(A: Tensor, n: int, A_other: Tensor, n_other: int) -> Tensor:
    """Mean over n and n_other data from the two means."""
    return A.lerp(A_other, n_other / (n + n_other))


def check_names(names: tuple[str, ...], other: tuple[str, ...]) -> None:
    """Factors belong together only if they are of the same parameters."""
    if names != other:
        raise ValueError(
            f"Expected factors of the parameters {names}, got {other}; compute both with the same "
            "model and the same `params`."
        )


def check_outputs(f: Tensor) -> None:
    """The factors are defined for one vector of outputs per datum."""
    if not isinstance(f, Tensor) or f.ndim != 2:
        got = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
        raise ValueError(
            f"Expected a model output of shape [n, C], got {got}; wrap the model so that it "
            f"returns one vector of outputs per datum."
        )
