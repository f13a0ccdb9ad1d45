"""Words that an output must not have, as tokens: which one may not come next."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence


class BadWords:
    """Token sequences that no output has; all completions of a prompt share them.

    Args:
        sequences: none of them empty.

    Attributes:
        alone: tokens that are a word by themselves.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.alone = tuple(last for *head, last in sequences if not head)
        # By the token that the last one would follow; as bytes, of which many are compared at once.
        self._heads: defaultdict[int, list[tuple[bytes, int]]] = defaultdict(list)
        for *head, last in sequences:
            if head:
                self._heads[head[-1]].append((array("q", head).tobytes(), last))
        self._longest = max(map(len, sequences), default=0)

    def __bool__(self) -> bool:
        return bool(self.alone or self._heads)

    def completed(self, output: Sequence[int]) -> list[int]:
        """The tokens that would complete a word of several after this output."""
        heads = self._heads.get(output[-1]) if output else None
        if heads is None:
            return []
        end = array("q", output[-self._longest :]).tobytes()
        return [last for head, last in heads if end.endswith(head)]
