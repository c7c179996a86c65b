"""Declare settings once: a class's typed fields give its arguments, and their checks, export and documentation.

.. code-block:: python

    @settings
    class FedISM(Rule):
        '''SAGA.

        Args:
            q: exponent.
        '''
        variant: Literal["S", "L"] = "S"
        q: NonNegative = 2.0

``FedISM(q=-1)`` raises ``q must be a number >= 0, got -1``; FLARE's job export writes the fields and its component
builder gives them back; :mod:`fairflare.base.described` lists them with type, default, range and meaning (from the
docstring).

A field may be another such object (a *part*): in a job it is a nested ``{"path", "args"}``, on the command line
``part=KIND`` and ``part.setting=value``; see :func:`build`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection, Mapping
from functools import cache
from threading import RLock
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass, rebuild_dataclass
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from pydantic_core.core_schema import DataclassSchema, DictSchema, IsInstanceSchema
from typing_extensions import dataclass_transform

from fairflare.base import checks

# Types of numbers are strict, as in JSON: neither a text nor ``true`` is taken for a number.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
Fraction = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
Whole = Annotated[int, Field(strict=True)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
BelowOne = Annotated[float, Field(strict=True, ge=0, lt=1)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]

C = TypeVar("C", bound=type)
KEYWORD, VARIOUS = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, KEYWORD)
REQUIRED = inspect.Parameter.empty
_ALONE = RLock()
_FINISHING: list[type] = []  # the class whose checks are being built


class Part:
    """Mark a class whose objects can be the value of a setting; subclasses that can be chosen have a ``kind``."""

    kind: ClassVar[str]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and values_of(self) == values_of(other)

    __hash__ = object.__hash__


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(Field, dataclasses.field))
def settings(cls: C) -> C:
    """Make the annotated fields of a class, and those of its bases, its keyword arguments.

    Such a class calls a base class's own ``__init__`` from ``__post_init__``; a ``ValueError`` raised there reaches the
    caller with its own text. A subclass with its own ``__init__(..., **more)`` must store each argument that it adds as
    an attribute of the same name.

    Raises:
        ValueError: (when an object is made) a setting is unknown, missing, of another type or out of range; the message
            is one line with the setting's name.
    """
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, use_enum_values=True, defer_build=True)
    declared: Any = dataclass(kw_only=True, eq=False, repr=False, config=config)(cls)
    check = declared.__init__

    def __init__(self: Any, **arguments: Any) -> None:
        if not self.__pydantic_complete__:
            _finish(next(c for c in type(self).__mro__ if "__pydantic_complete__" in vars(c)))
        try:
            check(self, **arguments)
        except ValidationError as error:
            raise ValueError(_first_problem(type(self), error)) from None

    def __init_subclass__(below: type[Any], /, **options: Any) -> None:
        super(declared, below).__init_subclass__(**options)
        _name_what_is_passed_on(below)

    # FLARE's exporter and builder look at the signature of __init__.
    named = [
        inspect.Parameter(f.name, KEYWORD, default=default_of(declared, f.name), annotation=f.type)
        for f in dataclasses.fields(declared)
    ]
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = inspect.Signature([itself, *named])  # type: ignore[attr-defined]
    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    declared.__init__ = __init__
    declared.__init_subclass__ = classmethod(__init_subclass__)
    # A field of this class takes only its objects; pydantic would also accept any dict.
    declared.__get_pydantic_core_schema__ = classmethod(
        lambda cls, source, handler: handler(source) if cls in _FINISHING else core_schema.is_instance_schema(cls)
    )
    # FLARE's exporter omits values that equal the default. Users edit the job folder, so it must show every setting.
    declared._always_serialize_args = property(_list_given)
    return cast(C, declared)


def _finish(cls: Any) -> None:
    """Build what checks the settings of a class, at its first object: a command makes objects of few classes."""
    with _ALONE:
        if not cls.__pydantic_complete__:
            shown = cls.__init__
            _FINISHING.append(cls)
            rebuild_dataclass(cls)
            _FINISHING.remove(cls)
            cls.__init__ = shown  # which pydantic has replaced


def _name_what_is_passed_on(cls: type) -> None:
    """Give a subclass's own ``__init__(..., **more)`` a signature with all arguments, since FLARE's export reads it."""
    constructor: Any = vars(cls).get("__init__")
    signature = inspect.signature(constructor) if constructor is not None else None
    if signature is None or all(p.kind is not VARIOUS for p in signature.parameters.values()):
        return
    parent: Any = cls.__mro__[1]
    named = [p for p in signature.parameters.values() if p.kind is not VARIOUS]
    known = {p.name for p in named}
    inherited = inspect.signature(parent.__init__).parameters.values()
    more = [p.replace(kind=KEYWORD) for p in inherited if p.name not in known and p.kind in BY_NAME]
    constructor.__signature__ = signature.replace(parameters=[*named, *more])


def _list_given(component: Any) -> list[str]:
    cls = type(component)
    return [n for n in cls.__pydantic_fields__ if getattr(component, n) is not None or default_of(cls, n) is not None]


def default_of(cls: Any, name: str) -> Any:
    """Return the default value of a settings class's field; ``REQUIRED`` when the field has none."""
    field: FieldInfo = cls.__pydantic_fields__[name]
    return REQUIRED if field.is_required() else field.get_default(call_default_factory=True)


# ------------------------------------------------------------------------------------------------ in words


def quote_names(names: Collection[Any]) -> str:
    """Return the names quoted and separated by commas."""
    return ", ".join(map(repr, names))


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the type hints of a class's fields, with their ``Annotated`` metadata."""
    return get_type_hints(cls, include_extras=True)


def describe_type(hint: Any) -> str:
    """Return a type in words, such as ``a number >= 0``, made from the type's JSON schema."""
    if isinstance(hint, type) and issubclass(hint, Part):
        return f"a {hint.__name__} ({', '.join(kind.__name__ for kind in choices(hint).values())})"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint.__name__
    adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    return _schema_in_words(adapter.json_schema(schema_generator=_InWords))


class _InWords(GenerateJsonSchema):
    """Build a JSON schema that also holds the type of a dict's keys (in JSON all are texts), and names of classes."""

    def dict_schema(self, schema: DictSchema) -> JsonSchemaValue:
        keys = {"propertyNames": self.generate_inner(schema["keys_schema"])} if "keys_schema" in schema else {}
        return super().dict_schema(schema) | keys

    def is_instance_schema(self, schema: IsInstanceSchema) -> JsonSchemaValue:
        return {"title": schema["cls"].__name__}

    def dataclass_schema(self, schema: DataclassSchema) -> JsonSchemaValue:
        return {"title": schema["cls"].__name__}


PLAIN = {
    "integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a text", "object": "a dict",
    "array": "a list",
}  # fmt: skip


def _schema_in_words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        options = [_schema_in_words(option) for option in schema["anyOf"] if option != {"type": "null"}]
        return " or ".join(options) + (" or nothing" if len(options) < len(schema["anyOf"]) else "")
    if "enum" in schema:
        return f"one of {quote_names(schema['enum'])}"
    if "const" in schema:
        return repr(schema["const"])
    if "prefixItems" in schema:
        return f"{len(schema['prefixItems'])} entries, each {_schema_in_words(schema['prefixItems'][0])}"
    words: str = PLAIN.get(schema.get("type", ""), schema.get("title", "anything"))
    if "multipleOf" in schema:
        words = f"a multiple of {schema['multipleOf']:g}"
    if isinstance(values := schema.get("additionalProperties"), Mapping):
        words += (
            f" of {_schema_in_words(schema.get('propertyNames', {'type': 'string'}))} to {_schema_in_words(values)}"
        )
    if schema.get("items"):
        words += f", each entry {_schema_in_words(schema['items'])}"
    return words + _range_in_words(schema)


def _range_in_words(schema: Mapping[str, Any]) -> str:
    """Return the text of a range, to follow a type: `` >= 1``, `` in [0, 1)``, ``, not empty``, or nothing."""
    limits = {"low": "minimum", "high": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}
    if words := checks.spell_limits(**{end: schema[key] for end, key in limits.items() if key in schema}):
        return f" {words}"
    least = schema.get("minLength") or schema.get("minItems")
    if not least:
        return ""
    if least == schema.get("maxLength", schema.get("maxItems")):
        return f" of {least}"
    return f", at least {least}" if least > 1 else ", not empty"


def _first_problem(cls: type, error: ValidationError) -> str:
    """Return the first problem that pydantic found, as one line in this package's wording."""
    problem = error.errors(include_url=False)[0]
    kind, place, value = problem["type"], problem["loc"], problem["input"]
    if kind == "value_error":  # the text of a ValueError from __post_init__ or a validator of this package
        text = str(problem["ctx"]["error"])
        return text if not place or str(place[0]) in text else f"{place[0]}: {text}"
    if kind == "unexpected_keyword_argument":
        known = [field.name for field in dataclasses.fields(cls)]
        where = "`fairflare describe METHOD` has all of a method"
        rest = checks.unknown(place[0], known, where) if known else "; it has none"
        return f"{cls.__name__} has no setting {place[0]!r}{rest}"
    if kind.startswith("missing") and len(place) == 1:
        return f"{cls.__name__} needs the setting {place[0]!r}"
    if not place or not isinstance(place[0], str):
        return f"{cls.__name__}: {problem['msg']}"
    wanted = describe_type(hints_of(cls)[place[0]])
    near = checks.nearest(value, re.findall("'([^']+)'", wanted)) if kind == "literal_error" else ""
    inside = place[1] if len(place) > 1 and (isinstance(place[1], int) or "a dict" in wanted) else None
    if inside is None or kind.startswith("missing"):
        return f"{place[0]} must be {wanted}, got {value!r:.80}{near}"
    return f"{place[0]} must be {wanted}; entry {inside!r:.80} is {value!r:.80}{near}"


# ------------------------------------------------------------------------------------------------ values


def field_names(cls: type) -> list[str]:
    """List the names of a class's settings; those of its bases too if its own ``__init__`` takes ``**``."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            names |= dict.fromkeys(p.name for p in parameters if p.kind in BY_NAME)
            if all(p.kind is not VARIOUS for p in parameters):
                break
    return list(names)


def values_of(component: Any) -> dict[str, Any]:
    """Return an object's class path and settings as plain values, as a job folder holds them; parts are nested alike.

    For a class without :func:`settings`: the arguments of its ``__init__`` that are attributes of the same names.
    """
    values = {name: getattr(component, name) for name in field_names(type(component)) if hasattr(component, name)}
    return {
        "path": f"{type(component).__module__}.{type(component).__name__}",
        "args": {name: _plain(value) for name, value in values.items()},
    }


def _plain(value: Any) -> Any:
    """Return a value in the form that it has after it was written to and read from JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return values_of(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def choices(base: type) -> dict[str, type]:
    """Return the classes that a setting of class ``base`` may have, by their ``kind``: ``base`` and its subclasses."""
    classes = {vars(base)["kind"]: base} if isinstance(vars(base).get("kind"), str) else {}
    below: list[type] = type.__subclasses__(base)
    for cls in below:
        classes |= choices(cls)
    return classes


def parts_of(cls: type, name: str) -> dict[str, type]:
    """Return the classes that can be the value of a field, by kind; ``{}`` when the field is no part."""
    hint = hints_of(cls).get(name)
    return choices(hint) if isinstance(hint, type) and issubclass(hint, Part) else {}


def build(cls: type, given: Mapping[str, Any]) -> Any:
    """Return an object made from settings by name, where ``part=KIND`` and ``part.setting=value`` describe a part.

    Args:
        cls: a :func:`settings` class.
        given: values by name, such as ``{"weighting": "som", "weighting.grid": [4, 4]}``. If only a part's
            settings are given and not its kind, they apply to the default part.

    Raises:
        ValueError: a kind is unknown, this kind has no such setting, or the class refuses a value.
    """
    arguments = {key: value for key, value in given.items() if "." not in key}
    dotted = ((key.partition("."), value) for key, value in given.items())
    inner = checks.group_by_key((part, (rest, value)) for (part, dot, rest), value in dotted if dot)
    for field in (fields := dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()):
        kinds = parts_of(cls, field.name)
        kind = arguments.get(field.name)
        if not kinds or isinstance(kind, Part) or (kind is None and field.name not in inner):
            continue
        name = checks.choice(field.name, kind, kinds) if kind is not None else type(default_of(cls, field.name)).kind
        try:
            arguments[field.name] = build(kinds[name], dict(inner.pop(field.name, ())))
        except ValueError as error:
            raise ValueError(f"{field.name}={name}: {error}") from None
    if inner:
        part = next(iter(inner))
        known = [f.name for f in fields if parts_of(cls, f.name)]
        raise ValueError(f"{cls.__name__} has no part {part!r}{checks.nearest(part, known)}")
    return cls(**arguments)


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested values of :func:`values_of` as a flat dict such as ``{"rule.q": 2.0}``, with the users' names."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        full: plain
        for key, entry in value.items()
        for full, plain in flatten(
            entry, name if key == "args" and "path" in value else f"{name}.{key}".strip(".")
        ).items()
    }
