r"""K-FAC-expand factors of the GGN by hooks, with a weight for every datum in the output factors.

For each trainable weight the block of the GGN is approximated by `kron(B, A)`, for each bias by
`B`::

    B = sum_n w_n sum_t sum_c g_ntc g_ntc^T      g_ntc = (d f_n / d s_nt)^T S_n[:, c]
    A = mean_{n,t} a_nt a_nt^T

with `a_nt` and `s_nt` the layer's input and output for datum `n` at position `t`, and `S_n S_n^T`
the Hessian of the loss with respect to the network's output `f_n`. B is a SUM over data, A a MEAN.
The loss is the cross-entropy (Hessian `diag(p) - p p^T`) or half the squared error (Hessian `I`),
summed over data.

The softmax Hessian has rank C - 1, and so does the root used here: C - 1 backward passes instead
of C. Weights ride on the root (`sqrt(w_n) S_n`). A module that is called several times in one
forward pass, or a parameter that several modules share, sees the calls as further positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from laplace.utils import Kron
from torch import Tensor, nn

from laplace_debias.data.reading import check_targets
from laplace_debias.kfac.input_factors import (
    InputFactors,
    Inputs,
    check_names,
    check_outputs,
    pooled_mean,
)
from laplace_debias.network.loss import loss_root, loss_sum
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.recorder import Tape, owned_parameters


@dataclass(frozen=True)
class KFACFactors:
    """K-FAC factors of a model, one block per parameter.

    Attributes:
        names: Name of each parameter, in the order of `model.parameters()`.
        blocks: `(B, A)` for a weight, `(B,)` for a bias; B a sum over data, A a mean.
        loss: Sum over data of the (weighted) loss, or None without targets.
        n_data: Number of data.
        n_outputs: Number C of outputs of the network.
        n_passes: Number of backward passes per datum.
    """

    names: tuple[str, ...]
    blocks: tuple[tuple[Tensor, ...], ...]
    loss: Tensor | None
    n_data: int
    n_outputs: int
    n_passes: int

    def __add__(self, other: KFACFactors) -> KFACFactors:
        """Factors of the data of both: B and loss added, A averaged by numbers of data."""
        check_names(self.names, other.names)
        blocks = tuple(
            (
                one[0] + two[0],
                *(
                    pooled_mean(A, self.n_data, A_other, other.n_data)
                    for A, A_other in zip(one[1:], two[1:], strict=True)
                ),
            )
            for one, two in zip(self.blocks, other.blocks, strict=True)
        )
        loss = None if self.loss is None or other.loss is None else self.loss + other.loss
        return replace(self, blocks=blocks, loss=loss, n_data=self.n_data + other.n_data)

    def with_inputs(self, inputs: InputFactors) -> KFACFactors:
        """The same output factors with the input factors of other data (more of them, say).

        Args:
            inputs: Input factors for the same parameters.

        Returns:
            Factors with each A replaced.

        Raises:
            ValueError: If the two do not belong to the same parameters.
        """
        check_names(self.names, inputs.names)
        blocks = tuple(
            block if A is None else (block[0], A)
            for block, A in zip(self.blocks, inputs.A, strict=True)
        )
        return replace(self, blocks=blocks)

    def to_kron(self) -> Kron:
        """The blocks as laplace-torch's `Kron`."""
        return Kron([list(block) for block in self.blocks])


def kfac_factors(
    model: nn.Module,
    x: Inputs,
    y: Tensor | None = None,
    *,
    likelihood: Literal["classification", "regression"],
    params: Iterable[nn.Parameter] | None = None,
    weights: Tensor | None = None,
    fisher: Literal["ggn", "mc", "ef"] = "ggn",
    generator: torch.Generator | None = None,
    inputs: bool = True,
    vectorize: bool = False,
) -> KFACFactors:
    """K-FAC-expand factors of the GGN (or empirical Fisher) on one mini-batch.

    The network is evaluated in eval mode; its modes, parameters, gradients and hooks are left as
    found.

    Args:
        model: Network of `Linear` and `Conv1d/2d/3d` layers whose output is `[n, C]`; anything
            else may stand between them if its own parameters are frozen.
        x: Mini-batch, a tensor or a mapping that the model takes as its one argument.
        y: Targets, `[n]` class indices or `[n, C]` values. Needed for the loss and for
            `fisher="ef"`.
        likelihood: `"classification"` (softmax cross-entropy) or `"regression"` (half squared
            error).
        params: Parameters that get a block; by default all that require a gradient.
        weights: Non-negative weight `[n]` of each datum in B and in the loss; by default 1. A
            stays a plain mean: the data worth backward passes for B need not be those that serve A.
        fisher: `"ggn"`: the exact Hessian of the loss, C - 1 backward passes (C for regression).
            `"mc"`: one random vector per datum with the Hessian as its second moment, one backward
            pass, see `sampled_hessian_root`. `"ef"`: the empirical Fisher at laplace-torch's scale
            (for regression twice the outer product of gradients of half the squared error).
        generator: Source of randomness for `fisher="mc"`; the global one by default.
        inputs: Whether to compute A; without it the blocks of weights are `(B,)`.
        vectorize: Whether to run all backward passes as one batched pass: C times the memory and
            no faster on a CPU, but fewer and larger kernels.

    Returns:
        The factors, in at least single precision.

    Raises:
        ValueError: If the model has no trainable parameter, if K-FAC cannot represent one or the
            forward pass never uses it, or if the shapes of outputs, targets or weights do not fit.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> x, y = torch.ones(5, 3), torch.tensor([0, 1, 0, 1, 1])
        >>> factors = kfac_factors(model, x, y, likelihood="classification")
        >>> [tuple(len(M) for M in block) for block in factors.blocks]
        [(4, 3), (4,), (2, 4), (2,)]
    """
    for value, name, known in (
        (likelihood, "likelihood", ("classification", "regression")),
        (fisher, "fisher", ("ggn", "mc", "ef")),
    ):
        if value not in known:
            raise ValueError(f"Expected {name} in {known}, got {value!r}; pass one of them.")
    owned = owned_parameters(model, params)
    tape = Tape(owned, inputs=inputs, outputs=True)
    with evaluation_mode(model), torch.enable_grad():
        with tape.recording():
            f = model(x)
        check_outputs(f)
        if y is not None:
            check_targets(y, f.shape, likelihood)
        root = loss_root(f.detach(), y, likelihood, fisher, generator)  # [n, C, columns]
        if weights is not None:
            root = root * _checked_weights(weights, f).to(root).sqrt()[:, None, None]
        columns = root.permute(2, 0, 1).to(f.dtype)
        B = tape.output_grams(f, columns, vectorize=vectorize)

    blocks = []
    for p in owned:
        block = (sum(B[layer] for layer in p.layers),)
        if p.role == "weight" and inputs:
            block += (tape.input_mean(p.layers),)
        blocks.append(block)
    loss = None if y is None else loss_sum(f.detach(), y, likelihood, weights)
    names = tuple(p.name for p in owned)
    return KFACFactors(names, tuple(blocks), loss, *f.shape, len(columns))


def _checked_weights(weights: Tensor, f: Tensor) -> Tensor:
    """One finite, non-negative weight per datum."""
    if weights.shape != (len(f),):
        raise ValueError(
            f"Expected weights of shape [{len(f)}], got {list(weights.shape)}; pass one per datum."
        )
    if not bool(torch.isfinite(weights).all() & (weights >= 0).all()):
        raise ValueError(
            "Expected finite, non-negative weights, got a negative or non-finite one; check the "
            "scores they were made from."
        )
    return weights
