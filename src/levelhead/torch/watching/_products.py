"""Products: of queries and keys, which begin attention, and of weights and values, which end it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._axes import KEYS, QUERIES, Terms, einsum_terms, matmul_terms, new_axes, of_product
from ._calls import Pending
from ._notes import Note, Operand, Path, Scores, Weights, axes_of, note_of, write_note

PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "linalg_matmul", "bmm", "mm", "einsum",
            "baddbmm", "addmm"}  # fmt: skip


class Product(NamedTuple):
    """A product of two tensors, its dimensions by name."""

    first: Tensor
    second: Tensor
    terms: Terms


def follow_product(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> list[tuple[Pending, bool]]:
    """Note what a product is; the calls that it completes, and whether they were understood."""
    try:
        product = _read(name, args, kwargs)
        if product is None or not isinstance(result, Tensor):
            return []
        if isinstance(note_of(product.first), Weights):
            return _weigh(product, result)
        if isinstance(note_of(product.second), Weights):
            first, second, terms = product
            return _weigh(Product(second, first, Terms(terms[1], terms[0], terms[2])), result)
        write_note(result, _begin(name, args, kwargs, product, result))
    except Exception:  # a form that we do not know is none that we can follow
        write_note(result, None)
    return []


def _read(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    tensors = [
        x
        for value in (*args, *kwargs.values())
        for x in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(x, Tensor)
    ]
    if name in ("baddbmm", "addmm"):
        del tensors[0]
    elif name == "__rmatmul__":
        tensors.reverse()
    if len(tensors) != 2:
        return None
    first, second = tensors
    if name == "einsum":
        terms = einsum_terms(args[0], first.dim(), second.dim())
    else:
        terms = matmul_terms(first.dim(), second.dim())
    return None if terms is None else Product(first, second, terms)


def _begin(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], product: Product, result: Tensor
) -> Note | None:
    """What a product may be: scores, or a projection by weights of a shape of their own."""
    first, second, terms = product
    shares = any(x in terms.second and x in terms.result for x in terms.first)
    layers = [x for x in (first, second) if _is_layer(x) and not shares]
    if layers and layers[0].dim() > 2:
        features = object()  # one layer makes them all
        sides = [
            tuple(tuple(axis._replace(family=features) for axis in dim) for dim in axes)
            if x is layers[0]
            else axes
            for x, axes in ((first, axes_of(first)), (second, axes_of(second)))
        ]
        return Operand(Path(of_product(terms, *sides), result.shape))
    if layers and (layers[0] is second or second.dim() == 2):
        return None
    if name == "addmm" and (args or [kwargs["input"]])[0].dim() < 2:  # a layer's bias
        return None
    notes = [note_of(x) or Operand() for x in (first, second)]
    scale, raw = notes[0].factor * notes[1].factor, None
    if name in ("baddbmm", "addmm"):
        factor = kwargs.get("alpha", 1)
        scale *= factor
        if kwargs.get("beta", 1) != 0:
            raw = torch.matmul(first.detach(), second.detach()) * factor
    dk = math.prod(first.shape[terms.first.index(x)] for x in terms.summed)
    axes = of_product(terms, axes_of(first), axes_of(second))
    return Scores(axes, dk, scale, scores=raw)


def _is_layer(tensor: Tensor) -> bool:
    """Whether a tensor is learned, or a view of what is."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _weigh(product: Product, result: Tensor) -> list[tuple[Pending, bool]]:
    """A product of weights, which come first here, with values or with something else."""
    weights, values, terms = product
    note = note_of(weights)
    assert isinstance(note, Weights)
    by_name = dict(zip(terms.first, note.axes or ((),) * weights.dim(), strict=True))
    summed = {axis.role for name in terms.summed for axis in by_name[name]}
    over_keys = KEYS in summed or all(axis.role != KEYS for dim in by_name.values() for axis in dim)
    if not over_keys and QUERIES not in summed:  # heads are mixed
        sizes = dict(zip(terms.second, values.shape, strict=True))
        axes = tuple(by_name.get(x, ()) or new_axes((sizes.get(x, 1),))[0] for x in terms.result)
        write_note(result, Weights(axes, note.calls))
        return []
    write_note(result, None)
    (*lead, query, key), column = terms.first, terms.second[-1]
    if (terms.second, terms.result) == ((*lead, key, column), (*lead, query, column)):
        for pending in note.calls:
            if pending.call is not None:
                pending.call.keep_values(weights, values)
    shape = dict(zip(terms.first, weights.shape, strict=True))
    has_rows = any(n > 1 for x, n in shape.items() if x not in terms.second)
    columns = math.prod(shape[x] for x in terms.summed)
    return _complete(
        note, over_keys, columns, has_rows and values.dim() > 2 and not _is_layer(values)
    )


def _complete(
    note: Weights, over_keys: bool, columns: int, weighs: bool
) -> list[tuple[Pending, bool]]:
    """The calls that are complete, or not understood.

    columns: of the weights
    weighs:  several rows weigh the same values, so this is no mixture (where each row has values of
        its own) and no codebook (the same for all the batch): not understood, it must be reported
    """
    found = []
    for pending in note.calls:
        understood = over_keys and pending.is_understood(columns)
        if understood or weighs:
            found.append((pending, understood))
    return found


def follow_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Pending, bool]]:
    """The calls whose weights, multiplied with values, are summed over the keys here."""
    product = args[0]
    note = note_of(product)
    if not isinstance(note, Weights) or note.axes is None or note.spread is None:
        return []
    dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    dims = [dims] if type(dims) is int else dims or []
    summed = [at for at in dims if any(axis.role == KEYS for axis in note.axes[at])]
    columns = math.prod(product.shape[at] for at in summed)
    return _complete(note, True, columns, note.spread) if summed else []
