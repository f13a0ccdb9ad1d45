"""Whether a call of a module is a call of its forward and nothing else, so that another computation may stand in."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as every
from transformers.modeling_layers import GradientCheckpointingLayer

_CALLS = {nn.Module.__call__, GradientCheckpointingLayer.__call__}


def only_forward(module: nn.Module) -> bool:
    """Whether calling a module calls its `forward`, and nothing that could see or change the results."""
    return (
        type(module).__call__ in _CALLS
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not every._global_forward_hooks
        and not every._global_forward_pre_hooks
    )


def untouched(module: nn.Module) -> bool:
    """`only_forward`, and that `forward` is its class's: nobody has given this object another one."""
    return only_forward(module) and "forward" not in vars(module)
