r"""The loss people really trained with: class weights, label smoothing, one noise per output.

Class weights :math:`w` and label smoothing :math:`\epsilon` make a soft target of a label,
:math:`t_c = w_c \left((1 - \epsilon) y_c + \epsilon / C\right)`, and the loss
:math:`-\sum_c t_c \log p_c`, as ``torch.nn.CrossEntropyLoss`` has it. Its Hessian is that of the
plain cross-entropy times :math:`\sum_c t_c`: label smoothing alone changes no curvature, class
weights count a datum more or less. A noise :math:`\sigma_c` of each output makes a regression one
of :math:`f_c / \sigma_c`, with the Hessian :math:`\mathrm{diag}(1 / \sigma_c^2)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from laplace_debias.data.targets import IGNORED

__all__ = ["Objective", "objective_of"]


@dataclass(frozen=True)
class Objective:
    """What the loss of the training differs in from the plain one.

    Attributes:
        class_weights: Weight ``[C]`` of each class.
        label_smoothing: Share of a label that is spread over all classes.
        output_noise: Standard deviation ``[C]`` of the noise of each output of a regression.
        ignore_index: The label of positions (tokens, pixels) that do not count.
    """

    class_weights: Tensor | None = None
    label_smoothing: float = 0.0
    output_noise: Tensor | None = None
    ignore_index: int = IGNORED

    def targets(
        self, y: Tensor, C: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Class probabilities that stand for labels, and how much each datum or position counts.

        Args:
            y: Class indices ``[n, *positions]``, or class probabilities ``[n, *positions, C]``.
            C: Number of classes.
            dtype: In which to compute; by default torch's own.

        Returns:
            Targets that sum to one, and the weights ``[n, *positions]``; ``None`` if all count one.

        Raises:
            ValueError: If there is not one weight for each class.

        Example:
            >>> weighted = Objective(class_weights=torch.tensor([1.0, 3.0]))
            >>> weighted.targets(torch.tensor([0, 1]), 2)
            (tensor([[1., 0.], [0., 1.]]), tensor([1., 3.]))
        """
        counts = None
        if y.ndim > 1 and not y.is_floating_point():  # positions
            counts = y != self.ignore_index
            y = y.where(counts, 0)
        if self.class_weights is None and not self.label_smoothing:
            return y, None if counts is None else counts.float()
        w = torch.ones(C) if self.class_weights is None else self.class_weights
        _check_length(w, C, "class_weights", "class")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        w = w.to(y.device, y.dtype if y.is_floating_point() else dtype)
        t = y if y.is_floating_point() else F.one_hot(y.long(), C).to(w)
        t = w * ((1 - self.label_smoothing) * t + self.label_smoothing / C)
        total = t.sum(-1)
        share = t / total.clamp(min=torch.finfo(t.dtype).tiny).unsqueeze(-1)
        if self.class_weights is None:
            return share, None if counts is None else counts.to(total)
        return share, total if counts is None else total * counts

    def whitened(self, values: Tensor) -> Tensor:
        """Outputs, targets or backward vectors of a regression in units of the noise.

        Args:
            values: ``[..., C]``.

        Returns:
            The same divided by the noise of each output.

        Raises:
            ValueError: If there is not one noise for each output.

        Example:
            >>> Objective(output_noise=torch.tensor([1.0, 2.0])).whitened(torch.ones(1, 2))
            tensor([[1.0000, 0.5000]])
        """
        if self.output_noise is None:
            return values
        _check_length(self.output_noise, values.shape[-1], "sigma_noise", "output")
        return values / self.output_noise.to(values)


def objective_of(
    likelihood: str,
    class_weights: Any,
    label_smoothing: float,
    output_noise: Tensor | None,
    ignore_index: int = IGNORED,
) -> Objective:
    """Check the options of a training loss.

    Args:
        likelihood: ``"classification"``, ``"regression"`` or ``"bernoulli"``.
        class_weights: One positive number per class, or ``None``.
        label_smoothing: In ``[0, 1)``.
        output_noise: One positive number per output of a regression, or ``None``.
        ignore_index: The label of positions that do not count, a whole number.

    Returns:
        The objective.

    Raises:
        ValueError: If an option does not fit the likelihood, or is out of range.

    Example:
        >>> objective_of("classification", [1.0, 3.0], 0.1, None).class_weights.tolist()
        [1.0, 3.0]
    """
    weights = None
    if class_weights is not None:  # in float64, for models of any precision
        given = isinstance(class_weights, Tensor)
        weights = torch.as_tensor(class_weights, dtype=None if given else torch.float64)
        weights = weights.detach().cpu().double()
    if (weights is not None or label_smoothing) and likelihood != "classification":
        raise ValueError(
            "Expected `class_weights` and `label_smoothing` with likelihood='classification' "
            f"only, got them with {likelihood!r}. Remedy: leave them out."
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"Expected `label_smoothing` in [0, 1), got {label_smoothing}. Remedy: pass what "
            "`nn.CrossEntropyLoss` was given."
        )
    if output_noise is not None and likelihood != "regression":
        raise ValueError(
            "Expected one `sigma_noise` per output with likelihood='regression' only, got "
            f"{len(output_noise)} with {likelihood!r}. Remedy: leave it out."
        )
    for name, values in (("class_weights", weights), ("sigma_noise", output_noise)):
        if values is not None and not (
            values.ndim == 1 and bool((values.isfinite() & (values > 0)).all())
        ):
            raise ValueError(
                f"Expected `{name}` as a vector of positive, finite numbers, got "
                f"{values.tolist()}. Remedy: pass one for each output."
            )
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise ValueError(
            f"Expected `ignore_index` to be a whole number, got {ignore_index!r}. Remedy: pass "
            "what `nn.CrossEntropyLoss` was given, by default -100."
        )
    return Objective(weights, float(label_smoothing), output_noise, ignore_index)


def _check_length(values: Tensor, C: int, name: str, each: str) -> None:
    """Raise unless there is one value for each output."""
    if len(values) != C:
        raise ValueError(
            f"Expected {C} numbers in `{name}`, one for each {each}, got {len(values)}. Remedy: "
            f"pass one for each of the model's outputs."
        )
