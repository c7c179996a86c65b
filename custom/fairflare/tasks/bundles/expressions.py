"""Compute the ``$`` expressions of a sealed MONAI bundle by walking their syntax trees; Python runs none of them."""

from __future__ import annotations

import ast
import builtins
import enum
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from fairflare.tasks.bundles.sealed import Sealed

MOST = 20_000  # values of a configuration, or in an argument
LONGEST = 500  # characters of an expression
BUDGET, STEP = 2**23, 64  # numbers and elements that all expressions of an object may work on, and what a step counts
REFERENCE = re.compile(r"@\w*(?:::\w*)*")
MARK = "reference_"  # begin of a reference's name in the tree
OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
    ast.Invert: operator.invert, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip
SEARCHED = (ast.In, ast.NotIn)
COMPARED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.Not)
ARRAYS = (torch.Tensor, np.ndarray, np.generic)
NUMBERS = (bool, int, float, *ARRAYS)
SINGLE = (int, float, str, type(None), enum.Enum, torch.dtype, torch.device)
ARRAY_VALUES = ("shape", "ndim", "dtype", "T", "requires_grad")
ARRAY_METHODS = (
    "abs", "all", "amax", "amin", "any", "argmax", "argmin", "astype", "bool", "clamp", "clip", "flatten", "float",
    "int", "item", "long", "max", "mean", "min", "permute", "reshape", "squeeze", "std", "sum", "to", "transpose",
    "unsqueeze", "view",
)  # fmt: skip
ARRAY_FUNCTIONS = (
    "abs", "argmax", "array", "as_tensor", "cat", "clip", "concatenate", "device", "exp", "isnan", "log", "max", "mean",
    "min", "sqrt", "squeeze", "stack", "sum", "tensor", "where",
)  # fmt: skip
MODULES = {"torch": torch, "np": np, "numpy": np}
Scope = Mapping[str, Any]


class Refused(ValueError):
    """Report content that a sealed bundle may not have; the text names key and content, and what to write instead."""


class Expression:
    """Compute one ``$`` expression of a sealed bundle's configuration.

    Args:
        sealed: makes what the expression refers to.
        key: where the expression stands.
        text: the expression's text, with its ``$``.
        budget: numbers and elements that it may still work on, alone in a list, as expressions share them.
    """

    def __init__(self, sealed: Sealed, key: str, text: str, budget: list[int]) -> None:
        self.sealed, self.key, self.text, self.budget = sealed, key, text, budget

    def value(self) -> Any:
        """Return the expression's value.

        Raises: Refused: the text is too long, is no expression, or has a form that is not allowed (names key and form).
        """
        source = self.text[1:].replace("#", "::").strip()
        try:
            if len(source) > LONGEST:
                raise ValueError("longer than that")
            tree = ast.parse(REFERENCE.sub(_named, source), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise self._refused(f"no expression of up to {LONGEST} characters ({error})") from None
        scope = {_named(place): self.sealed.make(place[0][1:]) for place in REFERENCE.finditer(source)}
        return self._of(tree.body, scope)

    def _of(self, node: Any, scope: Scope) -> Any:
        """Return the value of a node of the syntax tree; ``scope`` holds the values of local names."""
        self._spend(STEP)
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return self._sound(node.value)
            case ast.Name(id=name) if name in scope:
                return scope[name]
            case ast.List(elts=parts):
                return self._all(parts, scope)
            case ast.Tuple(elts=parts):
                return tuple(self._all(parts, scope))
            case ast.UnaryOp(op=op, operand=one):
                return self._computed(op, self._of(one, scope))
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._computed(op, self._of(left, scope), self._of(right, scope))
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._of(body if self._of(test, scope) else other, scope)
            case ast.Slice(lower=low, upper=high, step=step):
                return slice(*(part and self._of(part, scope) for part in (low, high, step)))
            case ast.Subscript(value=whole, slice=part):
                return self._entry(self._of(whole, scope), self._of(part, scope))
            case ast.ListComp(elt=one, generators=[ast.comprehension(target=ast.Name(id=name), iter=many, ifs=tests)]):
                scopes = ({**scope, name: part} for part in self._of(many, scope))
                return [self._of(one, own) for own in scopes if all(self._of(test, own) for test in tests)]
            case ast.Lambda(args=ast.arguments(args=names, vararg=None, kwonlyargs=[], kwarg=None, defaults=[])) if (
                names
            ):
                return self._function([one.arg for one in names], node.body, scope)
            case ast.Attribute() if (name := _dotted(node, scope)) in constants():
                return constants()[name]
            case ast.Attribute(value=inner, attr=name) if name in ARRAY_VALUES:
                if isinstance(owner := self._of(inner, scope), ARRAYS):
                    return getattr(owner, name)
            case ast.Call(func=called, args=given, keywords=named) if all(one.arg for one in named):
                by_name = {str(one.arg): self._of(one.value, scope) for one in named}
                return self._called(called, self._all(given, scope), by_name, scope)
        raise self._refused(f"has {ast.unparse(node)!r:.80}, a shape ({type(node).__name__}) that is not known")

    def _all(self, parts: Sequence[ast.expr], scope: Scope) -> list[Any]:
        """Return the values of several nodes; a node with a star stands for the values in it."""
        found: list[Any] = []
        for part in parts:
            found += self._of(part.value, scope) if isinstance(part, ast.Starred) else [self._of(part, scope)]
            self._spend(len(found))
        return found

    def _entry(self, whole: Any, place: Any) -> Any:
        """Return an entry of a list or dict, or a part of an array by whole numbers and slices."""
        places = place if isinstance(place, tuple) else (place,)
        plain = all(isinstance(one, int | slice | None) for one in places)
        self._need(plain or not isinstance(whole, ARRAYS), "takes entries of an array by a list or an array")
        return whole[place]

    def _computed(self, op: ast.AST, *values: Any) -> Any:
        """Return the result of an operator: lists are joined, repeated and searched, numbers and arrays computed."""
        kind, left, right = type(op), values[0], values[-1]
        if kind is ast.Mult and isinstance(left, int):
            left, right = right, left
        listed = isinstance(left, list | tuple | str)
        repeated = kind is ast.Mult and listed and isinstance(right, int)
        compared = (*NUMBERS, *SINGLE) if kind in COMPARED else NUMBERS
        known = (
            repeated
            or (kind is ast.Add and listed and type(left) is type(right))
            or (kind in SEARCHED and isinstance(left, SINGLE) and isinstance(right, list | tuple | dict))
            or (kind in OPERATORS and all(isinstance(value, compared) for value in values))
        )
        what = " and ".join(type(value).__name__ for value in values)
        self._need(known, f"has the operator {kind.__name__} on {what}")
        small = kind is not ast.Pow or isinstance(right, ARRAYS) or abs(right) <= 64
        self._need(small, "has an exponent above 64")
        lists = [value for value in values if isinstance(value, list | tuple | str | dict)]
        self._spend(len(left) * right if repeated else sum(map(len, lists)))
        self._fits(values)
        return self._sound(OPERATORS[kind](*((left, right) if len(values) > 1 else values)))

    def _called(self, called: ast.expr, given: list[Any], by_name: dict[str, Any], scope: Scope) -> Any:
        """Return the result of calling an allowed function, or a method of an array or a network."""
        name, values = _dotted(called, scope), [*given, *by_name.values()]
        inner = leaves([value for value in values if isinstance(value, list | tuple | dict)])
        # Types inside of lists define numpy's record types.
        odd = any(isinstance(one, type | torch.dtype) for one in inner)
        plain = not odd and not any(isinstance(one, str) for one in [*inner, *values])
        if name:
            self._need(name in functions(), f"calls what it may not: {name!r:.80} is not on the list of functions")
            texts = name == "torch.device" or name.partition(".")[0] not in MODULES
            self._need(plain or texts, f"gives texts or kinds of numbers to {name}")
            self._fits([*inner, *values])
            return self._sound(functions()[name](*given, **by_name))
        if isinstance(called, ast.Attribute) and plain:
            owner, method = self._of(called.value, scope), called.attr
            self._fits([owner, *inner, *values])
            moved = isinstance(owner, torch.nn.Module) and method == "to"
            if moved or (isinstance(owner, ARRAYS) and method in ARRAY_METHODS):
                return self._sound(getattr(owner, method)(*given, **by_name))
        raise self._refused(f"calls {ast.unparse(called)!r:.80} in a way that is not known")

    def _function(self, names: Sequence[str], body: ast.AST, scope: Scope) -> Callable[..., Any]:
        """Return a function that computes a lambda by its syntax tree; refuse Python's own names at once."""
        used = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
        odd = sorted(used.intersection(vars(builtins)).difference(scope, names, functions()))
        self._need(not odd, f"has {', '.join(map(repr, odd))} in a function, which is not known")

        def function(*values: Any) -> Any:
            numbers = sum(math.prod(value.shape) for value in values if isinstance(value, ARRAYS))
            called = self.budget is self.sealed.budget and not self.sealed.making  # by a transform: with its own budget
            budget = [BUDGET + 16 * numbers] if called else self.budget
            inner = Expression(self.sealed, self.key, self.text, budget)
            found = inner._of(body, {**scope, **dict(zip(names, values, strict=True))})
            self._need(isinstance(found, NUMBERS), f"gives a {type(found).__name__}, which is no array and no number")
            return self._sound(found)

        return function

    def _spend(self, numbers: int) -> None:
        self.budget[0] -= max(numbers, 0)
        self._need(self.budget[0] >= 0, "works on more numbers than a sealed bundle may")

    def _fits(self, values: Iterable[Any]) -> None:
        """Refuse arrays with too many numbers, alone or broadcast against each other."""
        shapes = [tuple(value.shape) for value in values if isinstance(value, ARRAYS)]
        sides = itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
        self._spend(max(math.prod(map(max, sides)), sum(map(math.prod, shapes))))

    def _sound(self, value: Any) -> Any:
        """Return a result, or refuse it if it is a very large number, or an array of texts or objects."""
        large = isinstance(value, int) and abs(value) >= 2**63
        odd = isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "biuf"
        self._need(not (large or odd), "gives a number above 2 ** 63, or an array whose entries are no numbers")
        self._spend(len(value) if isinstance(value, range) else 0)
        return value

    def _need(self, fine: bool, problem: str) -> None:
        """Refuse the expression, with the problem that it has, unless all is fine."""
        if not fine:
            raise self._refused(problem)

    def _refused(self, problem: str) -> Refused:
        remedy = "write the value itself, or one of the shapes in docs/bundles.md"
        return Refused(f"{self.key!r}: the expression {self.text!r:.120} {problem}; {remedy}")


def _dotted(node: ast.AST, scope: Scope) -> str:
    """Return the dotted name that a node stands for, such as ``torch.float32``; empty for any other node."""
    match node:
        case ast.Name(id=name) if name not in scope:
            return name
        case ast.Attribute(value=inner, attr=name) if before := _dotted(inner, scope):
            return f"{before}.{name}"
    return ""


def _named(place: re.Match[str]) -> str:
    """Return the Python name that stands for a reference (``@key``) in the syntax tree."""
    return f"{MARK}{place[0].encode().hex()}"


def nodes(values: Any, key: str = "") -> list[tuple[str, Any]]:
    """Return every value in nested lists and dicts with its key, at all levels; refuse more than :data:`MOST`."""
    found = [(key, values)]
    for place, value in found:  # which grows
        inner = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list | tuple) else {}
        found += [(f"{place}#{name}".lstrip("#"), part) for name, part in inner.items()]
        if len(found) > MOST:
            raise Refused(f"key {place[-80:]!r}: more than {MOST} values; write fewer")
    return found


def leaves(values: Any) -> list[Any]:
    """Return the values inside nested lists and dicts, and the keys of these dicts."""
    inner = [value for _, value in nodes(values)]
    names = [name for value in inner if isinstance(value, dict) for name in value]
    return [*names, *(value for value in inner if not isinstance(value, dict | list | tuple))]


@cache
def constants() -> dict[str, Any]:
    """Return the constants that an expression may name: types of numbers, members of MONAI's enumerations, pi."""
    import monai

    kinds: Any = [(name, kind) for name, kind in vars(monai.utils).items() if isinstance(kind, enum.EnumMeta)]
    members = [(name, member) for name, kind in kinds for member in kind.__members__.values()]
    return {
        f"{module}.{name}": value
        for module, inside in MODULES.items()
        for name, value in vars(inside).items()
        if name in ("pi", "inf", "nan", "e")
        or isinstance(value, torch.dtype)
        or (isinstance(value, type) and issubclass(value, np.number | np.bool_))
    } | {f"monai.utils.{place}{name}.{m.name}": m for name, m in members for place in ("", "enums.")}


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions that an expression may call, by the names used in expressions."""
    from monai.apps.pathology.handlers.utils import from_engine_hovernet
    from monai.handlers import from_engine
    from monai.utils import optional_import

    plain = (len, int, float, bool, abs, min, max, sum, list, tuple, range)
    arrays = itertools.product(MODULES.items(), ARRAY_FUNCTIONS)
    return {
        **{one.__name__: one for one in plain},
        **{f"{module}.{name}": getattr(own, name) for (module, own), name in arrays if hasattr(own, name)},
        "monai.handlers.from_engine": from_engine,
        "monai.handlers.utils.from_engine": from_engine,
        "monai.apps.pathology.handlers.utils.from_engine_hovernet": from_engine_hovernet,
        "skimage.measure.label": optional_import("skimage.measure", name="label")[0],  # a site may lack it
    }
