"""A model's weights as a tree, and the same tree of something else: how a backend prepares weights it knows nothing of.

A tree is a dataclass whose fields are leaves, dataclasses or tuples of them. Refuses to know any architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from headrace.tensor import Tensor


def map_weights(tree: Any, prepare: Callable[[Tensor], Any]) -> Any:
    """The tree with every Tensor replaced by what `prepare` makes of it.

    Tensors that are the same bytes in the same shape, format and order (a tied embedding and head) are prepared once.
    """
    prepared: dict[tuple[int, tuple[int, ...], str, int], Any] = {}

    def visit(node: Any) -> Any:
        if isinstance(node, Tensor):
            key = (node.stored.__array_interface__["data"][0], node.shape, node.format.name, id(node.row_order))
            if key not in prepared:
                prepared[key] = prepare(node)
            return prepared[key]
        if isinstance(node, tuple):
            return tuple(visit(item) for item in node)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            names = [field.name for field in dataclasses.fields(node)]
            return dataclasses.replace(node, **{name: visit(getattr(node, name)) for name in names})
        return node

    return visit(tree)
