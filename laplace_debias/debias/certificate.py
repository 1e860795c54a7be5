r"""How far a fit is from the full-batch posterior, as far as its own draws tell.

The distance is the mean, over inputs and outputs, of the absolute log ratio of the predictive
standard deviations to the full batch's: 0.05 is 5 % off. A linearised network has

.. math:: \sigma^2 \propto \sum_l \sum_{ji}
          \frac{(Q_B^\top J_l\, Q_A)_{ji}^2}{\lambda_{B,j} \lambda_{A,i} + \delta_l / h}

with :math:`J_l` the gradient of one output. A few probe inputs, each with one random output, stand
for all; other directions would tell of another distance, as all logits share a part that hardly
depends on the draw.

Draws come in four independent groups, with three ways to split them into halves. A half counts
:math:`1 + \epsilon` times, the other :math:`1 - \epsilon` times, and the other way round: six
posteriors, in pairs. Their difference over :math:`2 \epsilon` varies as the error of the whole does
(variance), but for what drawing without replacement saves, and what evenly spread draws save where
neighbours are alike (:func:`evenly_split`). With :math:`\epsilon = 1` these would be the halves
themselves, which may have fewer draws than dimensions where the whole has not, and then err far
more; with less, they span what the whole spans.

Counts like these vary by :math:`\epsilon^2`, so that what falls as :math:`1 / n` is
:math:`1 + \epsilon^2` times as large; what falls as :math:`1 / n^2`, as the correction for the
inverse leaves it, :math:`(1 + \epsilon^2)^2` times. So the mean of the six tells the bias. What is
outside their span only fewer draws can show: where draws are alone in a direction once a group is
left out, the bias comes from leaving out one group after the other, :math:`(4/3)^2` times as large
there.

Three splits know a standard deviation badly, and too small on average: by
:math:`c_4 = \sqrt{2/3}\, \Gamma(2) / \Gamma(3/2)` of three degrees of freedom. The estimate divides
by it, its own standard error is that of Student's t with three degrees of freedom, and the bias
again, which is known no better than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_debias.data.inputs import Inputs, Keys, size_of, take
from laplace_debias.debias.eigen import EigenFactors
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.network.calling import call_model
from laplace_debias.network.layers import is_transposed
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.recorder import check_outputs

__all__ = [
    "LEFT_OUT",
    "TILTED",
    "errors_and_bias",
    "estimated_distance",
    "evenly_split",
    "log_deviations",
    "probe_gradients",
    "rotated",
]

SPLITS = (((0, 2), (1, 3)), ((0, 1), (2, 3)), ((0, 3), (1, 2)))
"""Ways to split four groups, dealt in turn, into halves; those of the first are evenly spread."""
TILT = 0.95
"""How much more often than once a half counts, and the other less often."""
TILTED = tuple(
    tuple(1 + TILT if group in half else 1 - TILT for group in range(4))
    for split in SPLITS
    for half in split
)
"""How often each group counts, for both halves of each split in turn."""
LEFT_OUT = tuple(tuple(4 / 3 * (group != left) for group in range(4)) for left in range(4))
"""How often each group counts if one of them is left out."""
N_FREE = 3
"""Degrees of freedom of the variance that three splits of four groups show."""
CERTAIN_RATIO = 3.0
"""How many times smaller a mean square has to be before its ratio counts."""


def probe_gradients(
    engine: EngineInterface, X: Inputs, directions: Tensor, key: Keys = "input_ids"
) -> list[Tensor]:
    """Gradients of one direction of the output per input, for every parameter.

    Args:
        engine: The engine; its passes are not counted, as they serve no factor.
        X: Inputs of n data.
        directions: Directions of the output, ``[n, C]``.
        key: Key of the inputs in a mapping.

    Returns:
        ``[n, d_out, d_in]`` per weight and ``[n, d_out, 1]`` per bias, in the parameters' type.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(torch.nn.Linear(2, 3), "regression")
        >>> J = probe_gradients(engine, torch.ones(4, 2), torch.ones(4, 3))
        >>> [tuple(part.shape) for part in J]
        [(4, 3, 2), (4, 3, 1)]
    """
    owned = [p.tensor for p in engine.owned]
    parts: list[list[Tensor]] = [[] for _ in owned]
    with evaluation_mode(engine.root):
        for i in range(size_of(X, key)):
            x = take(X, slice(i, i + 1), key)
            x = x if engine.embed is None else engine.embed(x)
            with torch.enable_grad():
                f = check_outputs(call_model(engine.root, x))
                value = (f[0] * directions[i].to(f)).sum()
                gradients = torch.autograd.grad(value, owned, allow_unused=True)
            for part, g, p, own in zip(parts, gradients, owned, engine.owned, strict=True):
                g = (torch.zeros_like(p) if g is None else g).detach()
                if own.scales or own.role == "bias":
                    part.append(g.reshape(-1, 1))
                else:
                    part.append(g.T if is_transposed(own.layers[0]) else g.flatten(1))
    return [torch.stack(part) for part in parts]


def log_deviations(
    blocks: Sequence[EigenFactors], gradients: Sequence[Tensor], ridges: Tensor
) -> Tensor:
    """Logarithms of the predictive standard deviations, up to a constant.

    Args:
        blocks: The posterior's curvature, one block per parameter.
        gradients: See :func:`probe_gradients`, along the directions of A: ``J Q_A``.
        ridges: Prior precision over the Hessian factor, ``[n_blocks]``.

    Returns:
        ``[n]``, in float64.

    Example:
        >>> block = EigenFactors(torch.eye(1), torch.tensor([3.0]))
        >>> log_deviations([block], [torch.ones(2, 1, 1)], torch.tensor([1.0])).exp()
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    total = gradients[0].new_zeros(len(gradients[0]), dtype=torch.float64)
    for block, J, ridge in zip(blocks, gradients, ridges, strict=True):
        variances = (1 / (block.table.double() + ridge)).to(J)
        squares = rotated(block, J).square_().mul_(variances)  # positive terms: no cancellation
        total += squares.sum((1, 2), dtype=torch.float64)
    return 0.5 * total.log()


def rotated(block: EigenFactors, J: Tensor) -> Tensor:
    """Gradients ``Q_B^T (J Q_A)``, in their type.

    Args:
        block: One of the posterior's blocks.
        J: Its gradients, see :func:`log_deviations`.

    Example:
        >>> block = EigenFactors(torch.eye(2), torch.ones(2))
        >>> rotated(block, torch.ones(3, 2, 1)).shape
        torch.Size([3, 2, 1])
    """
    return block.Q_B.to(J).T @ J


def errors_and_bias(
    theta: Tensor, tilted: Tensor, left_out: Tensor | None = None, *, corrected: bool = True
) -> tuple[Tensor, Tensor]:
    r"""What posteriors of tilted and of fewer draws say of the whole's.

    .. math:: e_s = \frac{\theta_s^+ - \theta_s^-}{2 \epsilon}, \qquad
              b = \frac{\bar\theta_{3/4} - \theta}{(4/3)^p - 1} \quad \text{or} \quad
              b = \frac{\bar\theta^\pm - \theta}{(1 + \epsilon^2)^p - 1}

    for a bias of the whole that falls as :math:`1 / n^p`: p = 2 with eigenvalues corrected for
    the inverse, else 1.

    Args:
        theta: Log deviations of the whole at n probes, ``[n]``.
        tilted: Those with the counts :data:`TILTED`, ``[6, n]``.
        left_out: Those with the counts :data:`LEFT_OUT`, ``[4, n]``, where they lose span.
        corrected: Whether eigenvalues were corrected for the inverse.

    Returns:
        Errors ``[3, n]``, of one standard deviation of the whole each, and the bias ``[n]``.

    Example:
        >>> theta, tilted = torch.zeros(1), torch.tensor([[0.19], [-0.19]] * 3)
        >>> errors, bias = errors_and_bias(theta, tilted, torch.full((4, 1), 0.07))
        >>> errors.flatten(), bias
        (tensor([0.2000, 0.2000, 0.2000]), tensor([0.0900]))
    """
    fewer = 4 / 3 if left_out is not None else 1 + TILT**2
    others = tilted if left_out is None else left_out
    bias = (others.mean(0) - theta) / (fewer ** (2 if corrected else 1) - 1)
    return (tilted[0::2] - tilted[1::2]) / (2 * TILT), bias


def evenly_split(errors: Tensor) -> Tensor:
    r"""Errors of the three splits, without what only halves of neighbours show.

    Draws are spread evenly along an order of similar pairs, and dealt into four groups in turn.
    The halves of the first split take every second draw: they are spread evenly themselves, as the
    whole is. Those of the others take two neighbours and leave out two, and err more where
    neighbours are alike, while all three splits err alike where draws are as good as independent.
    With the mean squares :math:`m_s` over probes, errors of the other two splits are multiplied by

    .. math:: \sqrt{\min(1, \kappa\, q)}, \qquad q = \frac{2 m_1}{m_2 + m_3}, \qquad \kappa = 3,

    so that only a ratio counts that chance does not bring about easily.

    Args:
        errors: Half the difference of the halves of each of :data:`SPLITS`, at n probes,
            ``[3, n]``.

    Returns:
        Errors ``[3, n]``, none larger.

    Example:
        >>> evenly_split(torch.tensor([[0.1], [1.0], [1.0]]))
        tensor([[0.1000],
                [0.1732],
                [0.1732]])
    """
    squares = errors.square().mean(1)
    others = float(squares[1:].mean())
    if others <= 0:
        return errors
    share = min(1.0, CERTAIN_RATIO * float(squares[0]) / others)
    return torch.cat([errors[:1], share**0.5 * errors[1:]])


def estimated_distance(errors: Tensor, bias: Tensor, n_draws: int = 4096) -> tuple[float, float]:
    r"""Mean and standard deviation of the distance, given what halves say of error and bias.

    The distance is :math:`\mathrm{mean}_p |\sum_s z_s e_{sp} + b_p|` over random z. At a probe
    whose error has the standard deviation :math:`\sigma`, :math:`\hat\sigma^2 = \sum_s e_s^2` is
    :math:`\sigma^2 \chi^2_3 / 3`, so that :math:`\mathrm{E}\, \hat\sigma = c_4 \sigma`. The mean
    is over normal z, divided by :math:`c_4`: without a bias its expectation is that of the true
    distance. The standard deviation is over z with the common scale of Student's t with three
    degrees of freedom, which knows how badly :math:`\hat\sigma` is known, and the mean size of the
    bias besides.

    Args:
        errors: Independent parts of the error at n probes, of one standard deviation each,
            ``[k, n]``.
        bias: See :func:`errors_and_bias`, ``[n]``.
        n_draws: Number of random z, from a seed of their own.

    Returns:
        Mean and standard deviation.

    Example:
        >>> mean, deviation = estimated_distance(torch.zeros(3, 5), torch.full((5,), 0.1))
        >>> round(mean, 6), round(deviation, 6)
        (0.1, 0.1)
    """
    generator, e, b = torch.Generator().manual_seed(0), errors.double().cpu(), bias.double().cpu()
    z = torch.randn(n_draws, len(e), generator=generator, dtype=torch.float64)
    chi = torch.randn(n_draws, N_FREE, generator=generator, dtype=torch.float64)
    c4 = (2 / N_FREE) ** 0.5 * math.gamma((N_FREE + 1) / 2) / math.gamma(N_FREE / 2)
    noise, scale = z @ e, chi.square().mean(1).sqrt()
    mean = (noise / c4 + b).abs().mean()
    deviation = (noise / scale[:, None] + b).abs().mean(1).std()
    return float(mean), float(torch.hypot(deviation, b.abs().mean()))
