"""Adam with compressed gradients: its second moment, held.

Error feedback gives back later what it keeps now, which an optimizer forgives that is linear in the
gradients. Adam's first moment is; its second is not: what compression puts into elements whose
gradients are small counts there by its square, and slows them down from then on. So 1-bit Adam
(Tang et al. 2021) holds the second moment after a dense start: what is left is momentum with a
fixed scale for each element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from pycollective.errors import ConfigurationError

_KINDS = (torch.optim.Adam, torch.optim.AdamW)


def hold_second_moment(optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Hold Adam's second moment as it is now.

    Call it when the dense start is over: a tenth to a fifth of all steps. Each later step sees the
    held moment and its own gradient's square, as Adam would, and forgets the latter. Local; the
    same on each rank, where gradients are. Costs 4 bytes a parameter. After loading a checkpoint
    call it again: the moment in it is the held one, to a rounding.

    Args:
        optimizer: torch's Adam or AdamW, without ``amsgrad``, that has made a step.

    Returns:
        A handle, whose ``remove()`` lets the moment go on.

    Raises:
        ConfigurationError: another optimizer, or one that has not made a step.
    """
    if not isinstance(optimizer, _KINDS):
        raise ConfigurationError(
            f"hold_second_moment: {type(optimizer).__name__} is not torch's Adam or AdamW"
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ConfigurationError("hold_second_moment: not with amsgrad, which keeps a maximum")
    if not optimizer.state:
        raise ConfigurationError("hold_second_moment: the optimizer has not made a step")
    held: dict[torch.Tensor, torch.Tensor] = {}

    def moments() -> Any:
        """Each parameter that has stepped, its state, and what Adam divides its moment by."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if state := optimizer.state.get(parameter):
                    yield parameter, state, 1 - group["betas"][1] ** float(state["step"])

    def hold(*_: object) -> None:
        for parameter, state, divisor in moments():
            if parameter not in held:  # also of one that steps for the first time
                held[parameter] = state["exp_avg_sq"] / divisor
            torch.mul(held[parameter], divisor, out=state["exp_avg_sq"])

    hold()
    return optimizer.register_step_post_hook(hold)
