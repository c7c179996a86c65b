"""Test that settings without effect in a combination are refused from --set, a recipe, or a row of a comparison."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from fairflare.base.acting import OnlyWith, idle, needs_of, only_with
from fairflare.base.settings import NonNegative, field_names, settings
from fairflare.federation.plan.describe import page
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
from fairflare.flare.export.recipes import FairRecipe
from fairflare.methods.base.catalog import all_methods
from fairflare_lab.cli.compare.series import Series, read_entry

VAIN: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [  # and what lets it act
    ("fed_avg", {"momentum": 0.5}, "optimizer=sgd, and optimizer is 'adam'", {"optimizer": "sgd"}),
    ("fed_avg", {"betas": [0.8, 0.9], "optimizer": "sgd"}, "optimizer=adam or adamw", {"optimizer": "adamw"}),
    ("fed_nova", {"nesterov": False}, "optimizer=sgd", {"optimizer": "sgd"}),
    ("fed_avg", {"prior_strength": 2.0, "task": "c"}, "criterion=logit_adjusted or fedlc, and criterion is 'task'",
     {"criterion": "logit_adjusted"}),
    ("fed_avg", {"lowest_rate": 1e-5}, "schedule=cosine, and schedule is 'constant'", {"schedule": "cosine"}),
    ("fed_ga", {"probe_loss": "la", "criterion": "task"}, "criterion=logit_adjusted or balanced_softmax or fedlc",
     {"criterion": "logit_adjusted"}),
    ("q_fed_avg", {"probe_loss": "la", "criterion": "task", "task": "c"}, "probe_loss='la' would do nothing",
     {"criterion": "fedlc"}),
    ("fed_avg", {"best_lambda": 2.0}, "best_by=mean_minus_std, and best_by is 'mean'", {"best_by": "mean_minus_std"}),
    ("fed_avg", {"crt_epochs": 2, "task": "c"}, "crt_rounds other than 0, empty or false, and crt_rounds is 0",
     {"crt_rounds": 1}),
    ("fed_lwr", {"cka_passes": 2}, "cka_estimator is 'full_biased'", {"preset": "authors"}),
    ("moon", {"temperature": 0.2, "mu": 0}, "mu other than 0, empty or false, and mu is 0", {"mu": 1}),
    ("fed_ism", {"beta": 0.3, "saga": False}, "saga other than 0, empty or false, and saga is False", {"saga": True}),
    ("fed_mrl", {"fair_max": 5.0, "use_fair": False}, "use_fair is False", {"use_fair": True}),
    ("fed_mas", {"severity": 2, "corrupted_sites": 0}, "corrupted_sites is 0", {"corrupted_sites": 1}),
    ("fed_avg", {"augmentation": ["flip"]}, "augment other than 0, empty or false, and augment is False",
     {"augment": True}),
]  # fmt: skip


def split(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    plain = {name: value for name, value in given.items() if name != "task"}
    return plain, {"task": "classification"} if "task" in given else {}


@pytest.mark.parametrize(("method", "given", "words", "remedy"), VAIN)
def test_vain_settings_are_refused_and_others_not(
    method: str, given: dict[str, Any], words: str, remedy: dict[str, Any]
) -> None:
    plain, options = split(given)
    with pytest.raises(ValueError, match="would do nothing") as refused:
        make_plan(method, settings=plain, num_rounds=20, **options)
    assert words in str(refused.value)
    assert f"method {method!r}" in str(refused.value)
    make_plan(method, settings={**plain, **remedy}, num_rounds=20, **options)


def test_in_recipes_and_rows_alike() -> None:
    with pytest.raises(ValueError, match=r"momentum=0\.5 would do nothing"):
        FairRecipe("fed_avg", settings={"momentum": 0.5})
    with pytest.raises(ValueError, match=r"best_lambda=2\.0 would do nothing"):
        FairRecipe("fed_avg", best_lambda=2.0)
    rows = [read_entry("fed_avg"), read_entry("fed_prox:lowest_rate=0.0001")]
    good, vain = Series(rows, seeds=[0]).runs()
    good.make()
    with pytest.raises(ValueError, match=r"'fed_prox .*lowest_rate=0\.0001 would"):
        vain.make()


def test_only_what_somebody_set_counts() -> None:
    """Check that settings of small jobs, papers and another method's set-up may have no effect."""
    for method in all_methods():
        make_plan(method, num_rounds=20)
    for paper in ("fed_lwr", "fed_mrl", "fed_ism", "fed_mas"):
        make_plan(paper, small=False)
    make_plan("fed_prox", train_like="fed_mas", num_rounds=20)
    make_plan("fed_avg", settings={"lowest_rate": None})


def test_what_is_declared_exists() -> None:
    """Check that a setting's declared needs exist, as others would never be looked at."""
    tasks = [load_task_class(file) for file in TASKS_BY_KIND.values()]
    for method in all_methods().values():
        classes = [method.rule, method.training, *tasks, RunSettings]
        known = {name for cls in classes for name in field_names(cls)}
        for cls in classes:
            for name, need in needs_of(cls).items():
                assert name in known, (cls, name)
                assert need is None or need.fact or need.other in known, (cls, name)


def test_a_setting_that_can_never_act_is_not_described() -> None:
    """Check that SCAFFOLD, whose optimizer is always SGD, has no betas among its settings, and FedAvg has."""
    assert [name for name in ("fed_avg", "scaffold") if "| `betas` |" in page(name)] == ["fed_avg"]
    assert all("| `momentum` |" in page(name) for name in ("fed_avg", "scaffold"))


def test_the_own_class_goes_first() -> None:
    @settings
    class Base:
        acts: ClassVar[dict[str, OnlyWith | None]] = {"a": only_with("b"), "c": only_with("b", 2, when=[5.0])}
        a: NonNegative = 0
        b: NonNegative = 0
        c: NonNegative = 0

    @settings
    class Free(Base):
        acts: ClassVar[dict[str, OnlyWith | None]] = {"a": None}

    assert [text.split()[0] for text in idle([Base(a=1, c=5.0)], ["a", "b", "c"])] == ["a=1.0", "c=5.0"]
    assert list(idle([Base(a=1, b=2, c=4.0)], ["a", "c"])) == []
    assert [text.split()[0] for text in idle([Free(a=1, c=5.0)], ["a", "c"])] == ["c=5.0"]
