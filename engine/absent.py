"""Methods that vLLM's classes have and these do not: their absence is explained."""

from __future__ import annotations

from typing import NoReturn

from vattn.errors import VattnError

_POOLING = "the engine serves models that generate text; run a pooling model by transformers itself"
_WORKERS = "there are no workers: the model is in this process, as the attribute `model` of the LLM"
_ADAPTERS = "adapters are not served; merge the adapter into the model (peft's merge_and_unload) and load the result"
_PROFILE = "set on_step for the times of each step, or call it under torch.profiler"
_WEIGHTS = "weights stay as they were loaded; close the LLM, and make it with the new ones"
_REASONS = {
    **dict.fromkeys(("classify", "embed", "encode", "reward", "score"), _POOLING),
    **dict.fromkeys(("apply_model", "collective_rpc"), _WORKERS),
    **dict.fromkeys(("add_lora", "list_loras", "pin_lora", "remove_lora"), _ADAPTERS),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("init_weight_transfer_engine", "start_weight_update", "update_weights"), _WEIGHTS),
    "enqueue_chat": "call enqueue with prompts from `llm.prompts.apply_chat_template(conversation)`",
}


class NotOffered(VattnError, AttributeError):
    """A method of vLLM's that this class does not have; the message says why, and what to do."""


def absent(owner: object, name: str) -> NoReturn:
    """What `__getattr__` of these classes does with a name that they lack.

    Raises:
        NotOffered: vLLM's class has it.
        AttributeError: for any other name.
    """
    kind = type(owner).__name__
    if name in _REASONS:
        raise NotOffered(f"{kind} has no {name}: {_REASONS[name]}", name=name, obj=owner)
    raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)
