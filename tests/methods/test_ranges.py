"""Test the range of every setting: of each method's halves, of the tasks and of a run.

tests/unit/test_settings.py tries that a declared range is the one that holds, and what a value out of it is told.
"""

from __future__ import annotations

from collections import defaultdict

from fairflare.base.described import describe_settings
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
from fairflare.methods.base.catalog import all_methods

RANGES: dict[str, str] = {
    "true or false": """
        adapters.train_norms allow_phantom attributes augment cache_features centred channels_last compile
        crt_mask_absent deterministic fairlora_shared fedlc_exclude_target include_round0 keep_local_models
        keep_optimizer_state mas max_pool nesterov require_all_sites retrained_head saga salt
        share_entropy shrinking stale_ok use_fair
    """,
    "an integer >= 1": """
        adapters.rank awa_steps batch_size cka_batch_size classifier_batch classifier_epochs crt_epochs
        gradient_images gradient_repeats in_channels local_epochs max_missed min_cases min_sites num_classes
        num_features num_rounds patch_size patches phantom_own_test phantom_samples phantom_sites phantom_test test_last
        weighting.epochs windows
    """,
    "a number > 0": """
        adapters.alpha afl_rate anchor_timeout awa_rate bound_gap cffl_alpha cgsv_beta cgsv_gamma
        check_timeout classifier_rate cosine_scale dro_rate eba_tau fair_max feddyn_alpha grad_clip
        learning_rate loss_bound mu_policy.learning_rate norms_timeout server_rate server_tau temperature
        tolerance train_timeout validate_timeout weighting.eta weighting.sigma_0 weighting.sigma_min
        weighting.sigma_w
    """,
    "a number >= 0": """
        best_lambda ditto_lambda dro_adjustment fair_weight fairfed_beta feature_rate flexfair_weight gsam_alpha
        lambda_f max_margin mu q rho straggler_grace weight_decay weighting.kappa
    """,
    "a number in [0, 1]": """
        attribute_noise attribute_prevalence drw_start eta foreground label_noise mu_policy.gamma
        mu_policy.zeta phantom_min_share reach
    """,
    "an integer >= 0": "cka_memory corrupted_sites crt_rounds feature_steps label_noise_sites phantom_seed test_every",
    "an integer >= 1 or nothing": "cka_passes local_steps max_samples neck_dim personal_epochs projector_dim width",
    "a number in (0, 1]": "adapters.own beta c_th norm_momentum",
    "a number in [0, 1)": "beta beta2 cgsv_alpha drw_beta fairlora_ema heal_beta heal_tau momentum overlap",
    "a number in [0, 1) or nothing": "beta1 channel_drop",
    "a number > 0 or nothing": "ga_step lowest_rate max_grad_norm server_rate tau",
    "a number >= 0 or nothing": "fair_clamp floor prior_strength",
    "an integer >= 0 or nothing": "ignore warmup_rounds",
    "a number in [0, 1] or nothing": "clip_max clip_min mix",
    "2 entries, each an integer >= 1": "image_size weighting.grid",
    "a text, not empty": "adapters.targets adapters.train_also",
    "a text, not empty or nothing": "freeze prior",
    "an integer >= 2 or nothing": "cka_max_samples num_classes",
    "an integer in [2, 1000]": "adapters.groups group_bins",
    "2 entries, each a multiple of 16 >= 32": "image_size",
    "2 entries, each a number in [0, 1)": "betas",
    "2 entries, each a number or a list, each entry 2 entries, each a number or nothing": "window",
    "3 entries, each a multiple of 16 >= 32": "patch_size",
    "3 entries, each a number > 0 or nothing": "spacing",
    "3 entries, each an integer >= 32": "volume_size",
    "4 entries, each an integer >= 1": "features",
    "6 entries, each an integer >= 1": "features",
    "a dict of a text to a list, each entry an integer >= 0, not empty or nothing": "class_groups",
    "a dict of a text to a number >= 0": "mu_policy.by_site",
    "a dict of a text, not empty to a text or nothing": "initial_keys",
    "a dict of an integer to an integer >= 0 or nothing": "mask_values",
    "a list, each entry a list, each entry an integer >= 1, not empty or nothing": "labels",
    "a list, each entry a number in [0, 1], not empty": "mu_policy.actions",
    "a list, each entry a number in [0, 1], not empty or nothing": "mu_policy.actions",
    "a list, each entry a text, not empty": "groups",
    "a list, each entry a text, not empty or nothing": "channels findings",
    "a multiple of 2 >= 2": "adapters.rank",
    "a number >= 1 or nothing": "max_update_norm",
    "a number in (0, 0.5) or nothing": "trim",
    "a number in (0, 1000]": "phantom_cases",
    "a number in (0, 1] or 'auto' or nothing": "max_weight",
    "a number in (0, 1] or nothing": "max_excess",
    "a number in [0, 1.5]": "camera_shift",
    "a number in [1e-06, 1e+09]": "alpha",
    "a number": "tilt",
    "an integer": "seed",
    "an integer >= 32 or nothing": "prior_image_size",
    "an integer in [0, 10000]": "bootstrap",
    "an integer in [1, 5]": "severity",
    "an integer in [2, 100]": "calibration_bins",
}  # fmt: skip
KINDS = ("number", "integer", "true or false", "multiple", "empty")


def test_every_setting_has_the_range_that_it_should_have() -> None:
    halves = [half for method in all_methods().values() for half in (method.rule, method.training)]
    found: dict[str, set[str]] = defaultdict(set)
    for cls in [*halves, *map(load_task_class, TASKS_BY_KIND.values()), RunSettings]:
        for setting in describe_settings(cls):
            if any(word in setting.wanted for word in KINDS) and "one of" not in setting.wanted:
                found[setting.wanted].add(setting.name)
    assert {wanted: sorted(names) for wanted, names in found.items()} == {
        wanted: names.split() for wanted, names in RANGES.items()
    }
