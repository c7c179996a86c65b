"""Compute the ``$`` expressions of a sealed MONAI bundle by walking their syntax trees; Python runs none of them."""

from __future__ import annotations

import ast
import enum
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from fairflare.tasks.bundles.sealed import Sealed

MOST = 20_000  # largest number of values in a configuration or an argument
LONGEST = 500  # largest number of characters of an expression
BUDGET, STEP = 2**23, 64  # limit of elements that an object's expressions may work on, and what a step counts
REFERENCE = re.compile(r"@\w*(?:::\w*)*")
OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Invert: operator.invert,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
ARRAYS = (torch.Tensor, np.ndarray, np.generic)
NUMBERS = (bool, int, float, *ARRAYS)
KINDS = (type, torch.dtype, torch.device)  # may be arguments; in a list numpy would take them for record types
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
SHAPES = (  # syntax nodes of a function's body, besides names and attributes
    ast.Constant, ast.List, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Lambda,
    ast.arguments, ast.arg, ast.Call, ast.keyword, ast.Starred, ast.Load, *OPERATORS,
)  # fmt: skip
Scope = Mapping[str, Any]


class Refused(ValueError):
    """Report content that a sealed bundle may not have; the text names key and content, and what to write instead."""


class Expression:
    """Compute one ``$`` expression of a sealed bundle's configuration.

    Args:
        sealed: makes the objects that the expression refers to.
        key: configuration key of the expression.
        text: the expression's text, with its ``$``.
        budget: list of one number, shared by expressions: how many numbers and elements they may still work on.
    """

    def __init__(self, sealed: Sealed, key: str, text: str, budget: list[int]) -> None:
        self.sealed, self.key, self.text, self.budget = sealed, key, text, budget

    def value(self) -> Any:
        """Return the expression's value.

        Raises: Refused: the text is too long, is no expression, or has a form that is not allowed (names key and form).
        """
        source = self.text[1:].replace("#", "::").strip()
        self._need(len(source) <= LONGEST, f"is longer than {LONGEST} characters")
        try:
            tree = ast.parse(REFERENCE.sub(lambda place: f"at_{place.start()}", source), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise self._explain_refusal(f"is no expression ({error})") from None
        scope = {f"at_{place.start()}": self.sealed.make(place[0][1:]) for place in REFERENCE.finditer(source)}
        return self._evaluate(tree.body, scope)

    def _evaluate(self, node: Any, scope: Scope) -> Any:
        """Return the value of a node of the syntax tree; ``scope`` holds the values of local names."""
        self._spend()
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return self._sound(node.value)
            case ast.Name(id=name) if name in scope:
                return scope[name]
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return (tuple if isinstance(node, ast.Tuple) else list)(self._all(parts, scope))
            case ast.UnaryOp(op=op, operand=one):
                return self._compute(op, self._evaluate(one, scope))
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compute(op, self._evaluate(left, scope), self._evaluate(right, scope))
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._evaluate(body if self._evaluate(test, scope) else other, scope)
            case ast.Subscript(value=whole, slice=part):
                place = self._evaluate(part, scope)
                self._need(isinstance(place, int | str), "takes other than one entry, by its number or name")
                return self._evaluate(whole, scope)[place]
            case ast.Lambda(args=ast.arguments(args=names, vararg=None, kwonlyargs=[], kwarg=None, defaults=[])) if (
                names
            ):
                return self._function([one.arg for one in names], node.body, scope)
            case ast.Attribute() if (name := _join_dotted(node, scope)) in constants():
                return constants()[name]
            case ast.Call(func=called, args=given, keywords=named) if all(one.arg for one in named):
                by_name = {str(one.arg): self._evaluate(one.value, scope) for one in named}
                return self._call(called, self._all(given, scope), by_name, scope)
        raise self._explain_refusal(f"has {ast.unparse(node)!r:.80}, a shape ({type(node).__name__}) that is not known")

    def _all(self, parts: Sequence[ast.expr], scope: Scope) -> Any:
        """Return the values of several nodes; a node with a star stands for the values in it."""
        values = (
            self._evaluate(p.value, scope) if isinstance(p, ast.Starred) else [self._evaluate(p, scope)] for p in parts
        )
        return self._sound([*itertools.chain.from_iterable(values)])

    def _compute(self, op: ast.AST, *values: Any) -> Any:
        """Return the result of an operator: lists are joined and repeated, numbers and arrays computed."""
        kind, left, right = type(op), values[0], values[-1]
        listed = isinstance(left, list | tuple | str)
        joined = kind is ast.Add and listed and type(left) is type(right)
        repeated = kind is ast.Mult and listed and isinstance(right, int)
        self._need(
            joined or repeated or (kind in OPERATORS and all(isinstance(value, NUMBERS) for value in values)),
            f"has the operator {kind.__name__} on {' and '.join(type(one).__name__ for one in values)}",
        )
        self._spend(values, times=max(right, 1) if repeated else 1)
        return self._sound(OPERATORS[kind](*values))

    def _call(self, called: ast.expr, given: list[Any], by_name: dict[str, Any], scope: Scope) -> Any:
        """Return the result of calling an allowed function, or a method of an array or a network."""
        name, owner = _join_dotted(called, scope), None
        function: Any = functions().get(name)
        if isinstance(called, ast.Attribute) and called.attr in ARRAY_METHODS and not name:
            owner = self._evaluate(called.value, scope)
            owners = (torch.nn.Module, *ARRAYS) if called.attr == "to" else ARRAYS
            function = getattr(owner, called.attr, None) if isinstance(owner, owners) else None
        what = f"{ast.unparse(called)!r:.80}"
        self._need(function is not None, f"calls what it may not: {what} is not on the list of functions")
        inner = leaves([value for value in (*given, *by_name.values()) if not isinstance(value, KINDS)])
        of_arrays = name.partition(".")[0] in ("", *MODULES) and name != "torch.device"
        self._need(
            all(one is None or isinstance(one, NUMBERS if of_arrays else (*NUMBERS, str)) for one in inner),
            f"gives {what} texts, objects, or kinds of numbers in a list",
        )
        self._spend([owner, *inner])
        return self._sound(function(*given, **by_name))

    def _function(self, names: Sequence[str], body: ast.AST, scope: Scope) -> Callable[..., Any]:
        """Return a function that computes a lambda by its syntax tree; refuse at once what no call could compute."""
        inner_scope, known = {**scope, **dict.fromkeys(names)}, (*functions(), *constants())
        begun = {part for name in known for part in itertools.accumulate(name.split("."), "{}.{}".format)}
        odd = [
            ast.unparse(node) or type(node).__name__
            for node in ast.walk(body)
            if not isinstance(node, SHAPES)
            and getattr(node, "id", "") not in inner_scope
            and (
                name not in begun
                if (name := _join_dotted(node, inner_scope))
                else getattr(node, "attr", "") not in ARRAY_METHODS
            )
        ]
        self._need(not odd, f"has {', '.join(map(repr, odd)):.120} in a function, which is not known")

        def function(*values: Any) -> Any:
            budget = [BUDGET + 32 * sum(math.prod(value.shape) for value in values if isinstance(value, ARRAYS))]
            inner = Expression(self.sealed, self.key, self.text, budget)
            result = inner._evaluate(body, {**scope, **dict(zip(names, values, strict=True))})
            self._need(isinstance(result, NUMBERS), f"gives a {type(result).__name__}, which is no array and no number")
            return result

        return function

    def _spend(self, values: Sequence[Any] = (), times: int = 1) -> None:
        """Subtract a step's cost from the budget: the lists' lengths, ``times`` times, and the arrays' elements."""
        shapes = [tuple(value.shape) for value in values if isinstance(value, ARRAYS)]
        sides = itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
        self.budget[0] -= (
            STEP
            + times * sum(len(value) for value in values if isinstance(value, list | tuple | str))
            + max(math.prod(map(max, sides)), sum(map(math.prod, shapes)))
        )
        self._need(self.budget[0] >= 0, "works on more numbers than a sealed bundle may")

    def _sound(self, value: Any) -> Any:
        """Return a result, or refuse it if it is a very large number, or an array of texts or objects."""
        self._need(
            not (isinstance(value, int) and abs(value) >= 2**63)
            and not (isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "biuf"),
            "gives a number above 2 ** 63, or an array whose entries are no numbers",
        )
        self._spend([value])
        return value

    def _need(self, fine: bool, problem: str) -> None:
        """Refuse the expression because of ``problem``, unless ``fine`` is true."""
        if not fine:
            raise self._explain_refusal(problem)

    def _explain_refusal(self, problem: str) -> Refused:
        return Refused(
            f"{self.key!r}: the expression {self.text!r:.120} {problem}; write the value itself, or one of the shapes "
            "in docs/bundles.md"
        )


def _join_dotted(node: ast.AST, scope: Scope) -> str:
    """Return the dotted name that a node stands for, such as ``torch.float32``; empty for any other node."""
    parts = ast.unparse(node).split(".")
    return ".".join(parts) if parts[0] not in scope and all(part.isidentifier() for part in parts) else ""


def nodes(values: Any, key: str = "") -> list[tuple[str, Any]]:
    """Return every value in nested lists and dicts with its key, at all levels; refuse more than :data:`MOST`."""
    entries = [(key, values)]
    for place, value in entries:  # the loop appends to this list
        inner = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list | tuple) else {}
        entries += [(f"{place}#{name}".lstrip("#"), part) for name, part in inner.items()]
        if len(entries) > MOST:
            raise Refused(f"key {place[-80:]!r}: more than {MOST} values; write fewer")
    return entries


def leaves(values: Any) -> list[Any]:
    """Return the values inside nested lists and dicts, and the keys of these dicts."""
    inner = [value for _, value in nodes(values) if not isinstance(value, list | tuple)]
    return [one for value in inner for one in (value if isinstance(value, dict) else [value])]


@cache
def constants() -> dict[str, Any]:
    """Return the constants that an expression may name: types of numbers, members of MONAI's enumerations, pi."""
    import monai

    kinds: Any = {name: kind for name, kind in vars(monai.utils).items() if isinstance(kind, enum.EnumMeta)}
    return {
        f"{module}.{name}": value
        for module, inside in MODULES.items()
        for name, value in vars(inside).items()
        if name in ("pi", "inf", "nan", "e")
        or isinstance(value, torch.dtype)
        or (isinstance(value, type) and issubclass(value, np.number | np.bool_))
    } | {
        f"monai.utils.{prefix}{name}.{one.name}": one
        for name in kinds
        for one in kinds[name]
        for prefix in ("", "enums.")
    }


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions that an expression may call, by the names used in expressions."""
    from monai.apps.pathology.handlers.utils import from_engine_hovernet
    from monai.handlers import from_engine
    from monai.utils import optional_import

    return {
        **{one.__name__: one for one in (len, int, float, bool, abs, min, max, sum, list, tuple)},
        **{
            f"{module}.{name}": getattr(owner, name)
            for module, owner in MODULES.items()
            for name in ARRAY_FUNCTIONS
            if hasattr(owner, name)
        },
        "monai.handlers.from_engine": from_engine,
        "monai.handlers.utils.from_engine": from_engine,
        "monai.apps.pathology.handlers.utils.from_engine_hovernet": from_engine_hovernet,
        "skimage.measure.label": optional_import("skimage.measure", name="label")[0],  # a site may lack it
    }
