"""Choose which parts of a network are trained: low-rank adapters (LoRA, by the library ``peft``), or parts by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from fairflare.base import checks
from fairflare.base.settings import Flag, Part, Positive, PositiveInt, Share, choices, settings
from fairflare.core.features.adapting import Adapting, outline_of

if TYPE_CHECKING:
    from torch import nn

#: Regular expressions for parameter names of FairFlare's own networks: encoders, heads, attention projections, MLPs.
ENCODER = r"^(encoder|swinViT|convInit|down_|conv_0)"
HEADS = r"^(head|neck|projector|out|\w*final\w*|decoder\.seg\w+)\."
ATTENTION = r"(^|\.)attn\.(qkv|out_proj|proj)$"
PERCEPTRONS = r"(^|\.)(mlp\.(linear|fc)\d|conv\d)$"


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression: {error}") from None
    return value


Pattern = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_pattern)]


class Adapters(Part):
    """Define which adapters a network gets; a task's setting gives a kind, or ``{"kind": ..., setting: value}``."""

    average: str = "factors"

    def put_into(self, model: nn.Module) -> nn.Module:
        """Put the adapters into a network, freeze other parameters as the settings demand, and return the network."""
        return model

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls is not Adapters:
            return handler(source)
        return core_schema.no_info_before_validator_function(Adapters.parse, core_schema.is_instance_schema(Adapters))

    @staticmethod
    def parse(value: Any) -> Any:
        """Make adapters from a kind, from ``{"kind": ...}``, or from the form stored in a model file or job."""
        if isinstance(value, Adapters):
            return value
        kinds = choices(Adapters)
        given: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"kind": value}
        if "path" in given:
            by_class = {
                "FairLora": GroupLora.kind,
                **{cls.__name__: kind for kind, cls in kinds.items()},
            }  # its old name
            given = {**given.get("args", {}), "kind": by_class.get(str(given["path"]).rpartition(".")[2])}
        kind = checks.choice("adapters", given.pop("kind", value), kinds)
        return kinds[kind](**given)


@settings
class NoAdapters(Adapters):
    """Leave the network without adapters, so that it is trained as it is."""

    kind: ClassVar[str] = "none"


@settings
class Lora(Adapters):
    """Put low-rank adapters beside chosen layers (LoRA), W + (alpha / rank) B A; needs the package ``peft``.

    All other tensors are frozen and stay unchanged. Norms use their running statistics in training, too.

    Args:
        rank: columns of B and rows of A, the same in the common model for all layers.
        alpha: numerator of the scale.
        targets: regular expression, searched for in the names of linear layers and convolutions (without groups).
            Default: the projections of attention.
        train_also: regular expression, searched for in the names of parameters that are trained as a whole. Default:
            the heads of the networks that come with FairFlare; ``^$``: none.
        train_norms: norms are trained as well.
        average: ``"product"``: the sites' products B A are averaged and cut to the rank by SVD; ``"factors"``: A and B
            each by itself, as any tensor.

    Source:
        Hu et al., ICLR 2022 (LoRA); Liu et al., 2025 (HLoRA: the average of products).
    """

    kind: ClassVar[str] = "lora"

    rank: PositiveInt = 8
    alpha: Positive = 16
    targets: Pattern = ATTENTION
    train_also: Pattern = HEADS
    train_norms: Flag = False
    average: Literal["product", "factors"] = "product"

    def put_into(self, model: nn.Module) -> nn.Module:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ValueError(
                f"adapters=lora needs the package peft ({error}); install it with: pip install 'fairflare[adapters]'"
            ) from error
        from fairflare.core.aggregation.low_rank import FACTOR
        from fairflare.tasks.freezing import targets_of, train_only

        # peft matches such a pattern with a layer's whole name
        exactly = "|".join(map(re.escape, targets_of(model, self.targets, self.train_also)))
        return train_only(
            inject_adapter_in_model(LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=exactly), model),
            lambda name: FACTOR.fullmatch(name) is not None or re.search(self.train_also, name) is not None,
            norms=self.train_norms,
        )


@settings
class GroupLora(Adapters):
    """Put low-rank adapters with singular values for each group of people into a network (method ``fair_lora``).

    All other tensors are frozen, as with ``lora``. No further package is needed.

    Args:
        groups: number of groups of people that the datalists declare for the method's attribute, ``>= 2``; people
            whose group is not known form no group of their own.
        rank: rank in all layers, an even number: half of the singular values start alike for all groups.
        alpha: numerator of the scale.
        own: share of its own group's singular values in those that an image is given; the others share the rest.
        targets: regular expression, searched for in the names of linear layers and convolutions (without groups).
            Default: the two layers behind each attention, and a ResNet's convolutions.
        train_also, train_norms: as with ``lora``.

    Source:
        Li et al., IEEE TMI 2025; defaults: the authors' scripts for ViT-B/16.
    """

    kind: ClassVar[str] = "fair_lora"

    groups: Annotated[int, Field(strict=True, ge=2, le=1000)] = 2
    rank: Annotated[int, Field(strict=True, ge=2, multiple_of=2)] = 12
    alpha: Positive = 2
    own: Share = 0.7
    targets: Pattern = PERCEPTRONS
    train_also: Pattern = HEADS
    train_norms: Flag = False

    def put_into(self, model: nn.Module) -> nn.Module:
        from fairflare.core.features.group_adapter import GroupAdapter
        from fairflare.tasks.freezing import targets_of, train_only

        targets = targets_of(model, self.targets, self.train_also)
        for name in targets:
            parent, _, last = name.rpartition(".")
            adapter = GroupAdapter(model.get_submodule(name), name, self.groups, self.rank, self.alpha, self.own)
            setattr(model.get_submodule(parent), last, adapter)
        prefixes = tuple(f"{name}.fair_" for name in targets)
        return train_only(
            model,
            lambda name: (
                name.startswith(prefixes) or (".base_layer." not in name and bool(re.search(self.train_also, name)))
            ),
            norms=self.train_norms,
        )


@settings
class RandomInputs(Adapters):
    """Normalise a network's inputs by statistics of the site's images (method ``fed_rdn``); nothing is frozen."""

    kind: ClassVar[str] = "fed_rdn"

    def put_into(self, model: nn.Module) -> nn.Module:
        from fairflare.core.features.input_norm import put_before

        return put_before(model)


def merge_adapters(model: nn.Module) -> nn.Module:
    """Add all low-rank adapters of a network to the layers beside which they are, and return the network."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "base_layer") and hasattr(module, "merge"):
            module.merge()
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, module.base_layer)
    return model


@settings
class Fitted(Adapting):
    """Define the settings of a task about which parts of its network are trained, and from which initial weights.

    Args:
        adapters: what is trained in place of the network itself.
        freeze: what is not trained: a regular expression, searched for in the names of parameters, or ``"encoder"``;
            ``None`` if everything is trained.
        initial_keys: how names in the file of ``initial_weights`` become names here, ``{REGEX: replacement}`` one after
            the other; tensors that then fit are loaded, and the log names those that do not; ``None`` if the whole file
            must fit.
    """

    adapters: Adapters = field(default_factory=NoAdapters)
    freeze: Pattern | None = None
    initial_keys: dict[Pattern, str] | None = None

    @property
    def averages_products(self) -> bool:
        return self.adapters.average == "product"

    def insert_adapters(self, model: nn.Module) -> nn.Module:
        if self.freeze is None:
            return self.adapters.put_into(model)
        if not isinstance(self.adapters, NoAdapters):
            raise ValueError(f"freeze={self.freeze!r} beside adapters: these freeze all else already; leave freeze out")
        from fairflare.tasks.freezing import matching, train_only

        pattern = ENCODER if self.freeze == "encoder" else self.freeze
        names = [name for name, _ in model.named_parameters()]
        if matching("freeze", pattern, names, "parameters") == names:
            raise ValueError(f"freeze={self.freeze!r} leaves nothing of the network to train")
        return train_only(model, lambda name: re.search(pattern, name) is None)

    def load_what_fits(self, model: nn.Module, path: str) -> str:
        """Load the tensors of a file that fit the network, by :func:`fairflare.tasks.pretrained.load_partial`."""
        from fairflare.tasks.pretrained import load_partial

        return load_partial(model, Path(path), self.initial_keys or {})

    def check(self) -> None:
        """Build the network once if settings select its parts, so that a pattern without a match ends the run early."""
        super().check()  # type: ignore[misc]
        if self.freeze is not None or not isinstance(self.adapters, NoAdapters):
            outline_of(self)  # type: ignore[arg-type]
