"""Products: of queries and keys, which begin attention, and of weights and values, which end it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._axes import KEYS, QUERIES, Terms, einsum_terms, matmul_terms, new_axes, of_product
from ._calls import Pending
from ._note import Note, Scores, Weights, axes_of, note_of, write_note

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
    """Note what a product is; the calls whose weights met values in it, and if as they should."""
    try:
        product = _read(name, args, kwargs)
        if product is None or not isinstance(result, Tensor):
            return []
        if isinstance(note_of(product.first), Weights):
            return _meet(product, result)
        if isinstance(note_of(product.second), Weights):
            first, second, terms = product
            return _meet(Product(second, first, Terms(terms[1], terms[0], terms[2])), result)
        write_note(result, _begin(name, args, kwargs, product))
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
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], product: Product
) -> Note | None:
    """What a product may be: scores, or a projection by weights of a shape of their own."""
    first, second, terms = product
    is_layer = [isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) for x in product[:2]]
    if any(is_layer) and not any(x in terms.second and x in terms.result for x in terms.first):
        layer = first if is_layer[0] else second
        if layer.dim() == 2:
            return None
        features = object()  # one layer makes them all
        some = tuple(
            tuple(axis._replace(family=features) for axis in dim) for dim in new_axes(layer.shape)
        )
        sides = (some, axes_of(second)) if layer is first else (axes_of(first), some)
        return Note(of_product(terms, *sides))
    notes = [note_of(x) or Note() for x in product[:2]]
    scale, raw = notes[0].factor * notes[1].factor, None
    if name in ("baddbmm", "addmm"):
        factor = kwargs.get("alpha", 1)
        scale *= factor
        if kwargs.get("beta", 1) != 0:
            raw = torch.matmul(first.detach(), second.detach()) * factor
    dk = math.prod(first.shape[terms.first.index(x)] for x in terms.summed)
    axes = of_product(terms, axes_of(first), axes_of(second))
    return Scores(axes, dk=dk, scale=scale, scores=raw)


def _meet(product: Product, result: Tensor) -> list[tuple[Pending, bool]]:
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
        write_note(result, Weights(axes, calls=note.calls))
        return []
    write_note(result, None)
    shape = dict(zip(terms.first, weights.shape, strict=True))
    columns = math.prod(shape[x] for x in terms.summed)
    # In a mixture each row has values of its own, in a codebook all batch entries have the same.
    is_loud = any(n > 1 for x, n in shape.items() if x not in terms.second) and values.dim() > 2
    found = []
    for pending in note.calls:
        understood = over_keys and pending.is_understood(columns)
        if understood or is_loud:
            found.append((pending, understood))
    return found
