"""Whether a call of a module is a call of its forward and nothing else, so that another computation may stand in; and
other forwards for modules.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

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


def put(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives a module another forward. A deep copy of it has its own again, which computes with the copy's weights."""
    module.forward = forward
    if not hasattr(type(module), "__deepcopy__"):
        vars(module)["__deepcopy__"] = functools.partial(_copy, module, forward)


def is_put(module: nn.Module) -> bool:
    """Whether the module has a forward that `put` gave it."""
    copies = vars(module).get("__deepcopy__")
    return isinstance(copies, functools.partial) and copies.func is _copy and copies.args[1] is module.forward


def take_back(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Undoes `put`, if nobody has given the module yet another forward."""
    if vars(module).get("forward") is forward:
        del module.forward
    vars(module).pop("__deepcopy__", None)


def _copy(module: nn.Module, forward: Callable[..., Any], memo: dict[int, Any]) -> nn.Module:
    memo[id(module)] = copied = module.__new__(type(module))
    own = {name: value for name, value in vars(module).items() if name != "__deepcopy__" and value is not forward}
    vars(copied).update(copy.deepcopy(own, memo))
    return copied
