"""FedMRL.

Made by tools/write_recipes.py; change the declarations and run it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from fairflare.flare.recipes import MethodRecipe, only_what_is_given


class FedMRLRecipe(MethodRecipe):
    """Fairness loss, mu by QMIX, weights by a map (use_fair, mu_policy, weighting: ablations).

    Source: Sahoo et al., MICCAI 2024.

    The defaults are those of a job that is quick to try; with ``small=False`` whatever is not given is as in the paper,
    which is said where it differs ("paper: ...").

    Args:
        name: of the job; default: the method's.
        packaging: ``"task_file"``: the job carries ``app/custom/task.py`` and sites must permit custom code;
            ``"preinstalled"``: no custom code, sites need the package and ``fairflare.`` in their class allow list;
            ``"bundle"``: the job carries the whole package. A ``"preinstalled"`` job is for hospitals: one site's
            influence is bounded in it (``fairflare.federation.influence.FOR_HOSPITALS``); ``settings`` go before.
        task: ``"segmentation"`` or ``"classification"``; default: what the method's paper learns.
        sites: their number (named ``site-1`` ...), their names, or ``None`` for every connected site; 0: as many as the
            method's small job has.
        small: False: the paper's settings for whatever is not given.
        train_like: another method whose set-up this one gets (task, network, data, local training, rounds, number of
            sites), so that the two can be compared.
        task_file: a Python file with a class ``Task``: your own network and data.
        monai_bundle: folder of a MONAI bundle: network, loss, optimizer, transforms and metric are its own.
        isolate: each task in a child process at the site.
        max_weight: largest share of one site, in each layer where weights are by layer; what is cut goes to the others
            in proportion. With K sites at least 1/K. A preinstalled job has 0.4; a number in (0, 1] or nothing.
        max_samples: a site that claims more training samples counts as having so many. A preinstalled job has 100000;
            an integer >= 1 or nothing.
        max_update_norm: an update with a norm of more than so many times the round's median is scaled down to that. A
            preinstalled job has 3.0; a number >= 1 or nothing.
        num_rounds: communication rounds; an integer >= 1 (paper: ``60``).
        min_sites: usable results a round needs; an integer >= 1.
        seed: of the initial model and of every site's training; an integer.
        experiment: id under which checkpoint and site state outlive the job; empty: no resume; a text.
        check_timeout: seconds a site may take, before the first round, to open its data and say what it has; a number >
            0.
        require_all_sites: a site whose data or settings fail that check ends the run; False: the run begins without it,
            and it is in as soon as it can train. A silent site never ends the run while ``min_sites`` answer; true or
            false.
        train_timeout: seconds a phase may take; a site may never answer; a number > 0.
        anchor_timeout: seconds a phase may take; a site may never answer; a number > 0.
        norms_timeout: seconds a phase may take; a site may never answer; a number > 0.
        validate_timeout: seconds a phase may take; a site may never answer; a number > 0.
        straggler_grace: seconds that late sites get once ``min_sites`` answered well; 0: the phase's whole timeout; a
            number >= 0.
        max_missed: a site without an answer in time in so many phases running is not asked again until it shows up, and
            then after 2 rounds, 4, 8, ... while it stays late; the final test asks it all the same; an integer >= 1.
        keep_local_models: leave each round's local models in the run directory (for audits; large); true or false.
        initial_ckpt: checkpoint that the federation starts from, at the server: a plain state dict or an
            ``FL_global_model.pt``, of exactly the task's network; empty: as the task says. An absolute path; a relative
            one is a file that the job carries; a text.
        best_by: what makes a model the best by the primary metric on the sites' validation splits: ``mean`` over the
            sites, the ``worst`` site, or ``mean_minus_std``: mean minus ``best_lambda`` times the standard deviation;
            one of 'mean', 'worst', 'mean_minus_std'.
        best_lambda: see there; a number >= 0.
        test_last: of so many last models the test metrics are averaged in the results; each one more than the last
            costs a ``validate``. The papers' settings have 5; an integer >= 1 (paper: ``5``).
        bootstrap: in the final test every site measures the primary metric also on so many draws of its test images
            with replacement, and sends these values, for the intervals of ``fairflare compare``; 0: none; an integer in
            [0, 10000].
        recalibration: ``"exact"``: in one exchange for each group of norms that do not depend on one another, as if all
            images were in one place; ``"one_pass"``: in one exchange, with the batch's statistics in front of each
            norm, an approximation; one of 'exact', 'one_pass'.
        anchor_as: how the average of the local models travels to the sites, where a method asks about it (Fed-LWR):
            ``"model"``, as it is; ``"bf16"``, in half the bytes; ``"difference"``, what it differs by from the model
            that the sites began the round with, in bf16: half the bytes, nearly exact, and a site keeps that model
            until it is asked; one of 'model', 'bf16', 'difference'.
        crt_rounds: of so many more rounds behind ``num_rounds`` the classifier alone is trained anew, on classes in
            equal parts (cRT, ``docs/crt.md``); 0: none; an integer >= 0.
        crt_epochs: of each of them; one is as many draws as the site has training images; an integer >= 1.
        crt_weights: of their averages: ``samples``, or those of the ``method`` in its last round; one of 'samples',
            'method'.
        crt_mask_absent: a site leaves the classifier's rows of classes that it does not have as they are; true or
            false.
        settings: further settings by name, such as those of another ``task`` or of your own in ``task_file``.
        mu_policy: who chooses mu: ``"qmix"``, ``"vdn"`` (Q_tot is a plain sum, the paper's Eq. 4), ``"fixed"`` (the
            sites' own mu) or ``"random"`` (a control); one of 'fixed', 'random', 'qmix', 'vdn' (paper: ``"qmix"``).
        mu_policy_by_site: ``{site: mu}``, told to these sites instead of their own; the same in every round; with
            mu_policy=fixed, default ``{}``.
        mu_policy_actions: mu to choose from, ascending; with mu_policy=random, default ``[1e-05, 0.001, 0.01, 0.05,
            0.1, 0.2, 0.4, 0.6, 0.8, 1.0]``.
        mu_policy_seed: a draw depends on it, the site and the round alone; ``None``: the run's; with mu_policy=random,
            default ``null``.
        mu_policy_action_mode: "grid": a network has one output for each action; "critic": the action is its fifth
            input, and it has one output; with mu_policy=qmix, vdn, default ``grid``.
        mu_policy_agents: "own": a network for each site, the paper's; "shared": one for all, which also sees whose turn
            it is and the action before; "auto": shared with more than 8 sites; with mu_policy=qmix, vdn, default
            ``auto``.
        mu_policy_zeta: target accuracy of the reward exp(accuracy - zeta) - 1, a fraction; with mu_policy=qmix, vdn,
            default ``0.95``.
        mu_policy_gamma: discount of later rewards; with mu_policy=qmix, vdn, default ``0.99``.
        mu_policy_learning_rate: of the agents; with mu_policy=qmix, vdn, default ``0.001``.
        mu_policy_hidden: width of an agent's two layers; with mu_policy=qmix, vdn, default ``64``.
        mu_policy_warmup: transitions (one a round from the third round on) before the first update; a quarter of the
            rounds where that is less; with mu_policy=qmix, vdn, default ``10``.
        mu_policy_updates: gradient steps after each transition; with mu_policy=qmix, vdn, default ``8``.
        mu_policy_explore: share of the rounds in which, after the warm-up, random actions fall from all to 5 %; with
            mu_policy=qmix, vdn, default ``0.3``.
        mu_policy_cautious: explore with mu up to 0.1 only, until the warm-up is over; with mu_policy=qmix, vdn, default
            ``false``.
        mu_policy_double_q: choose the next action by the trained networks and value it by the target ones; with
            mu_policy=qmix, vdn, default ``false``.
        weighting: how the models are weighed: ``"som"``, ``"samples"`` or ``"uniform"``; one of 'samples', 'uniform',
            'som'.
        weighting_grid: rows and columns of the map; with weighting=som, default ``[5, 5]``.
        weighting_init: where neurons start: "sample", around the mean of the first local models, or "uniform", U[0, 1)
            as in the paper; with weighting=som, default ``sample``.
        weighting_space: what is on the map: "weights", the local models, or "updates", local minus received; with
            weighting=som, default ``weights``.
        weighting_sigma_0: radius of the neighbourhood in the first round; with weighting=som, default ``2.0``.
        weighting_kappa: decay of the radius per round; with weighting=som, default ``0.1``.
        weighting_sigma_min: least radius; with weighting=som, default ``0.5``.
        weighting_eta: learning rate of the map; with weighting=som, default ``0.5``.
        weighting_epochs: passes over the sites in a round; with weighting=som, default ``1``.
        weighting_sigma_w: width of the weights; with weighting=som, default ``1.0``.
        weighting_restart: a new map every round; nothing is kept on disk; with weighting=som, default ``false``.
        weighting_seed: of the neurons' starts; ``None``: the run's; with weighting=som, default ``null``.
        mean_loss: F of the fairness term: ``"mean"`` over the sites, ``"weighted"`` by samples, or ``"sum"`` (the text
            after Eq. 9; not a fairness term any more); one of 'mean', 'weighted', 'sum'.
        fair_mean: ``"winsorised"`` (ours): in F a site's loss counts within 1 of the median loss and within a quarter
            and four times of it, so that no single site can stop the training of the others; ``"plain"``: as it is
            reported, the paper's; one of 'winsorised', 'plain'.
        optimizer: "sgd", as the paper; "adam", as the authors' code; "adamw"; "task", a MONAI bundle's own; one of
            'adam', 'adamw', 'sgd', 'task'.
        learning_rate: step size of the optimizer; a number > 0.
        weight_decay: of the optimizer; a number >= 0.
        betas: decay rates of Adam's moments; 2 entries, each a number in [0, 1).
        momentum: of SGD, with Nesterov's form when > 0; a number in [0, 1).
        batch_size: images in a batch; an integer >= 1.
        local_epochs: passes over the training images in a round; an integer >= 1.
        local_steps: so many optimizer steps in a round, the same at every site, in place of ``local_epochs`` (which
            then stays 1): passes in new orders until they are done, the last one cut short. ``None``: whole passes; an
            integer >= 1 or nothing.
        keep_optimizer_state: moments stay at the site between rounds (Fed-LWR's code); else a new optimizer a round;
            true or false.
        max_grad_norm: gradients are clipped to this global norm; ``None``: not; a number > 0 or nothing.
        augment: use the task's training augmentation; true or false.
        criterion: ``"task"`` (the task's own loss), or for classification with the site's class counts
            ``"logit_adjusted"``, ``"balanced_softmax"`` or ``"fedlc"``; one of 'task', 'logit_adjusted',
            'balanced_softmax', 'fedlc'.
        prior_strength: tau of logit adjustment and FedLC; ``None``: the papers' 1 and 0.5; a number >= 0 or nothing.
        schedule: of the learning rate over the rounds: ``"constant"``, or ``"cosine"``, down to ``lowest_rate`` in the
            last one; see ``rate``; one of 'constant', 'cosine'.
        lowest_rate: of the cosine, ``> 0`` and at most ``learning_rate``; ``None``: a thousandth of it; a number > 0 or
            nothing.
        norm_statistics: running means, variances and counters of batch norms: ``"average"`` over the sites (the
            papers); ``"recalibrated"``: measured again after each aggregation, with the new model over all sites'
            training images; or ``"site"``: each site has its own, which stay there. What a norm learns is shared all
            the same. See ``docs/norm_statistics.md``; one of 'average', 'recalibrated', 'site'.
        precision: of training and evaluation: ``"fp32"``, or mixed (``torch.autocast``): ``"bf16"``, ``"fp16"`` (with a
            scaled loss). Weights, updates and losses stay float32. A site's own file goes first; so for the next three;
            one of 'fp32', 'bf16', 'fp16'.
        channels_last: another order of images and kernels in memory, faster for most convolutions; true or false.
        compile: ``torch.compile`` of the network; takes minutes at first; true or false.
        deterministic: on a GPU only operations that give the same bits every time, which are slower; a network that has
            one without such a form is refused by name. On a CPU results are the same bits anyway; true or false.
        mu: strength of the pull. A value that the server sends for this site goes before this one; one that is negative
            or no number counts as 1e-5; a number >= 0 (paper: ``1e-05``).
        use_fair: the fairness term; False: without it (ablation of part A); true or false.
        fair_weight: lambda, the weight of the fairness term; a number >= 0.
        fair_clamp: least gradient factor; ``None``: the literal loss, without any limit; a number >= 0 or nothing.
        fair_max: largest gradient factor; a number > 0.
        fair_mode: ``"batch"``: the factor follows each batch; ``"epoch"``: once a round from the mean loss of the
            received model over the whole training set; one of 'batch', 'epoch'.
        share_entropy: report the entropy of the labels (one number about the site's class balance); False: the server
            uses a neutral value; true or false.
        orientation: of NIfTI and DICOM: ``"canonical"``: the right way up in the plane that they are stored in;
            ``"axial"``, ``"sagittal"``, ``"coronal"``: cut in this plane; ``"stored"``: as it is in the file; one of
            'canonical', 'axial', 'sagittal', 'coronal', 'stored'.
        intensity: what becomes 0 and 1: ``"auto"`` (8-bit pictures: 0 and 255; all else as ``"percentile"``),
            ``"range"`` (the file's minimum and maximum), ``"percentile"`` (minimum and 99th percentile), ``"zscore"``
            (three standard deviations below and above the mean) or ``"window"``; one of 'auto', 'range', 'percentile',
            'window', 'zscore'.
        window: centre and width for ``"window"``, in the file's measured values (Hounsfield units); default: that of
            each DICOM header; 2 entries, each a number or nothing.
        resize: ``"stretch"`` to ``image_size``; ``"pad"``: the whole image in its own proportions, with an edge;
            ``"crop"``: in its own proportions without an edge, what is too long is cut off; one of 'stretch', 'pad',
            'crop'.
        network: ``"resnet18"`` or ``"densenet121"`` (MONAI's); one of 'resnet18', 'densenet121' (paper:
            ``"densenet121"``).
        features: widths of the four stages of the ResNet; 64, 128, 256, 512 is the published one. For
            ``"densenet121"``: ignored; 4 entries, each an integer >= 1.
        max_pool: the ResNet's pooling behind its first convolution (published: yes; images of 48x48 do without); true
            or false (paper: ``False``).
        image_size: height and width that images are resized to, at least 32; 33 with ``max_pool``, 64 for
            ``"densenet121"``, which would otherwise end in one pixel; 2 entries, each an integer >= 1 (paper: ``(224,
            224)``).
        in_channels: 1 (colour images become luminance) or 3 (grey images are repeated); one of 1, 3.
        num_classes: number of classes. Default: the phantom's; an integer >= 2 or nothing.
        class_names: names of the classes for the metrics ``recall_<name>``. Default: the phantom's; of own images those
            of the datalist, or ``class_0``, ; a list, each entry a text or nothing.
        class_groups: ``{"head": [0, 1], ...}``: their mean recalls are reported too. Default: the phantom's; of own
            images those of the datalist; a dict of a text to a list, each entry an integer >= 0, not empty or nothing.
        norm_momentum: share of a new batch in the running statistics of the batch norms (PyTorch: 0.1); a number in (0,
            1].
        initial_weights: checkpoint of the encoder (a plain state dict, torchvision's or MONAI's names, ``.pt``,
            ``.pth`` or ``.safetensors``) that the server starts from, unless its own private file names another; a
            classifier head of another shape is left out; a text or nothing.
        projector_dim: output width of a projection head next to the classifier (Fed-MAS); ``None``: none; an integer >=
            1 or nothing.
        neck_dim: output width of a projection head between encoder and classifier (MOON; its authors: 256); ``None``:
            none; an integer >= 1 or nothing.
        classifier: ``"linear"``, or ``"cosine"``: ``cosine_scale`` times the cosine of features and class vector
            (LDAM); one of 'linear', 'cosine'.
        cosine_scale: see there; a number > 0.
        retrained_head: a second classifier beside it, trained by the server and used in evaluation (CReFF); true or
            false.
        augmentation: ``"flip"``, ``"affine"``, ``"intensity"``: which random changes ``augment=True`` makes; a list,
            each entry one of 'flip', 'affine', 'intensity'.
        phantom: synthetic data, used where a site has none of its own: ``"dermoscopy"``, ``"dermoscopy7"``,
            ``"fundus"`` or ``"endoscopy"``; one of 'dermoscopy', 'dermoscopy7', 'fundus', 'endoscopy'.
        allow_phantom: a site whose file names no data, for itself or for others, trains on synthetic data; False: it is
            refused unless its own file says ``"phantom": true``; true or false.
        phantom_seed: of the synthetic data; an integer >= 0.
        phantom_sites: number of sites that the synthetic data are dealt to; a run whose sites are named or counted sets
            it to their number unless told otherwise; an integer >= 1; default: as many as the run has.
        phantom_samples: synthetic training and validation images of all sites together; an integer >= 1 (paper:
            ``2000``).
        phantom_test: synthetic images of the common test set; an integer >= 1 (paper: ``400``).
        phantom_own_test: synthetic images of each site's own test set; an integer >= 1.
        phantom_min_share: share of ``phantom_samples`` that every class has at least; rarer classes are raised to it,
            and always to four images; a number in [0, 1].
        camera_shift: how much the cameras of the synthetic sites differ, 0 (not at all) to 1.5; a number in [0, 1.5].
        partition: ``"iid"``, ``"dirichlet"``, ``"two_pool"`` or ``"shards"``; see ``fairflare.data.partitions``; one of
            'iid', 'dirichlet', 'two_pool', 'shards'.
        alpha: concentration of the Dirichlet and two-pool partitions; the smaller, the less alike the sites; a number
            in [1e-06, 1e+09].
        eta: of the shard partition; the larger, the more shards of its dominant class a site gets; a number in [0, 1].
        shard_mode: which form of the shard partition; see ``fairflare.data.partitions``; one of 'literal',
            'complement', 'authors'.
        corrupted_sites: so many last sites have images of lower quality; an integer >= 0.
        corruption: ``"gaussian_noise"`` or ``"motion_blur"``; one of 'gaussian_noise', 'motion_blur'.
        severity: of the corruption, from 1 (slight) to 5; an integer in [1, 5].
        label_noise_sites: so many last sites train on labels of which some are wrong; their labels for validation and
            test are right; an integer >= 0.
        label_noise: share of the training labels there that are wrong; a number in [0, 1].
        label_noise_kind: ``"symmetric"``: each other class is as likely; ``"pair"``: always the next class; one of
            'symmetric', 'pair'.
        attributes: split the phantom's common test set by its attribute (skin tone) as well; true or false.

    Raises:
        ValueError: a value of another type or out of range: one line with the setting's name.
    """

    method = "fed_mrl"
    dotted: ClassVar[dict[str, str]] = {
        "mu_policy_action_mode": "mu_policy.action_mode",
        "mu_policy_actions": "mu_policy.actions",
        "mu_policy_agents": "mu_policy.agents",
        "mu_policy_by_site": "mu_policy.by_site",
        "mu_policy_cautious": "mu_policy.cautious",
        "mu_policy_double_q": "mu_policy.double_q",
        "mu_policy_explore": "mu_policy.explore",
        "mu_policy_gamma": "mu_policy.gamma",
        "mu_policy_hidden": "mu_policy.hidden",
        "mu_policy_learning_rate": "mu_policy.learning_rate",
        "mu_policy_seed": "mu_policy.seed",
        "mu_policy_updates": "mu_policy.updates",
        "mu_policy_warmup": "mu_policy.warmup",
        "mu_policy_zeta": "mu_policy.zeta",
        "weighting_epochs": "weighting.epochs",
        "weighting_eta": "weighting.eta",
        "weighting_grid": "weighting.grid",
        "weighting_init": "weighting.init",
        "weighting_kappa": "weighting.kappa",
        "weighting_restart": "weighting.restart",
        "weighting_seed": "weighting.seed",
        "weighting_sigma_0": "weighting.sigma_0",
        "weighting_sigma_min": "weighting.sigma_min",
        "weighting_sigma_w": "weighting.sigma_w",
        "weighting_space": "weighting.space",
    }

    @only_what_is_given
    def __init__(
        self,
        *,
        name: str | None = None,
        packaging: str = "task_file",
        task: str | None = None,
        sites: int | Sequence[str] | None = 0,
        small: bool = True,
        train_like: str | None = None,
        task_file: str | Path | None = None,
        monai_bundle: str | Path | None = None,
        isolate: bool = False,
        max_weight: float | None = None,
        max_samples: int | None = None,
        max_update_norm: float | None = None,
        num_rounds: int = 5,
        min_sites: int = 2,
        seed: int = 0,
        experiment: str = "",
        check_timeout: float = 600.0,
        require_all_sites: bool = True,
        train_timeout: float = 3600.0,
        anchor_timeout: float = 3600.0,
        norms_timeout: float = 3600.0,
        validate_timeout: float = 3600.0,
        straggler_grace: float = 0.0,
        max_missed: int = 2,
        keep_local_models: bool = False,
        initial_ckpt: str = "",
        best_by: Literal["mean", "worst", "mean_minus_std"] = "mean",
        best_lambda: float = 1.0,
        test_last: int = 1,
        bootstrap: int = 0,
        recalibration: Literal["exact", "one_pass"] = "exact",
        anchor_as: Literal["model", "bf16", "difference"] = "model",
        crt_rounds: int = 0,
        crt_epochs: int = 1,
        crt_weights: Literal["samples", "method"] = "samples",
        crt_mask_absent: bool = True,
        settings: Mapping[str, Any] | None = None,
        mu_policy: Literal["fixed", "random", "qmix", "vdn"] = "fixed",
        mu_policy_by_site: Mapping[str, float] | None = None,
        mu_policy_actions: Sequence[float] | None = None,
        mu_policy_seed: int | None = None,
        mu_policy_action_mode: Literal["grid", "critic"] | None = None,
        mu_policy_agents: Literal["auto", "own", "shared"] | None = None,
        mu_policy_zeta: float | None = None,
        mu_policy_gamma: float | None = None,
        mu_policy_learning_rate: float | None = None,
        mu_policy_hidden: int | None = None,
        mu_policy_warmup: int | None = None,
        mu_policy_updates: int | None = None,
        mu_policy_explore: float | None = None,
        mu_policy_cautious: bool | None = None,
        mu_policy_double_q: bool | None = None,
        weighting: Literal["samples", "uniform", "som"] = "som",
        weighting_grid: Sequence[int] | None = None,
        weighting_init: Literal["sample", "uniform"] | None = None,
        weighting_space: Literal["weights", "updates"] | None = None,
        weighting_sigma_0: float | None = None,
        weighting_kappa: float | None = None,
        weighting_sigma_min: float | None = None,
        weighting_eta: float | None = None,
        weighting_epochs: int | None = None,
        weighting_sigma_w: float | None = None,
        weighting_restart: bool | None = None,
        weighting_seed: int | None = None,
        mean_loss: Literal["mean", "weighted", "sum"] = "mean",
        fair_mean: Literal["winsorised", "plain"] = "winsorised",
        optimizer: Literal["adam", "adamw", "sgd", "task"] = "sgd",
        learning_rate: float = 0.01,
        weight_decay: float = 0.0,
        betas: Sequence[float] = (0.9, 0.999),
        momentum: float = 0.0,
        batch_size: int = 32,
        local_epochs: int = 1,
        local_steps: int | None = None,
        keep_optimizer_state: bool = False,
        max_grad_norm: float | None = None,
        augment: bool = False,
        criterion: Literal["task", "logit_adjusted", "balanced_softmax", "fedlc"] = "task",
        prior_strength: float | None = None,
        schedule: Literal["constant", "cosine"] = "constant",
        lowest_rate: float | None = None,
        norm_statistics: Literal["average", "recalibrated", "site"] = "average",
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        channels_last: bool = False,
        compile: bool = False,
        deterministic: bool = False,
        mu: float = 0.1,
        use_fair: bool = True,
        fair_weight: float = 1.0,
        fair_clamp: float | None = 0.0,
        fair_max: float = 10.0,
        fair_mode: Literal["batch", "epoch"] = "batch",
        share_entropy: bool = True,
        orientation: Literal["canonical", "axial", "sagittal", "coronal", "stored"] = "canonical",
        intensity: Literal["auto", "range", "percentile", "window", "zscore"] = "auto",
        window: Sequence[float] | None = None,
        resize: Literal["stretch", "pad", "crop"] = "stretch",
        network: Literal["resnet18", "densenet121"] = "resnet18",
        features: Sequence[int] = (16, 32, 64, 128),
        max_pool: bool = True,
        image_size: Sequence[int] = (48, 48),
        in_channels: Literal[1, 3] = 3,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        class_groups: Mapping[str, Sequence[int]] | None = None,
        norm_momentum: float = 0.1,
        initial_weights: str | None = None,
        projector_dim: int | None = None,
        neck_dim: int | None = None,
        classifier: Literal["linear", "cosine"] = "linear",
        cosine_scale: float = 30.0,
        retrained_head: bool = False,
        augmentation: Sequence[Literal["flip", "affine", "intensity"]] = ("flip", "affine"),
        phantom: Literal["dermoscopy", "dermoscopy7", "fundus", "endoscopy"] = "dermoscopy7",
        allow_phantom: bool = True,
        phantom_seed: int = 0,
        phantom_sites: int | None = None,
        phantom_samples: int = 1500,
        phantom_test: int = 300,
        phantom_own_test: int = 150,
        phantom_min_share: float = 0.0,
        camera_shift: float = 1.0,
        partition: Literal["iid", "dirichlet", "two_pool", "shards"] = "shards",
        alpha: float = 1.0,
        eta: float = 1.0,
        shard_mode: Literal["literal", "complement", "authors"] = "literal",
        corrupted_sites: int = 0,
        corruption: Literal["gaussian_noise", "motion_blur"] = "gaussian_noise",
        severity: int = 3,
        label_noise_sites: int = 0,
        label_noise: float = 0.4,
        label_noise_kind: Literal["symmetric", "pair"] = "symmetric",
        attributes: bool = False,
    ) -> None: ...
