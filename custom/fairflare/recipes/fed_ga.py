"""FedGA.

Made by tools/write_recipes.py; change the declarations and run it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fairflare.flare.recipes import MethodRecipe, only_what_is_given


class FedGARecipe(MethodRecipe):
    """Sites at which the aggregated model loses most against their own gain weight.

    Source: Zhang et al., CVPR 2023.

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
        num_rounds: communication rounds; an integer >= 1 (paper: ``300``).
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
        fedga_mode: ``"fedism"``: d_r = 0.05 / K (T - r) / T; ``"original"``: d_r = 0.2 / K (1 - (r - 1) / T), r from 0
            and no gap in the first round; one of 'fedism', 'original'.
        ga_step: in place of 0.05 or 0.2; a number > 0 or nothing.
        centred: subtract the mean gap (the paper); False: the authors' code; true or false.
        shrinking: False: d_r = 0.05 / K (or 0.2 / K) in every round, also under a stock controller, which does not say
            how many rounds there are; true or false.
        optimizer: ``"adam"`` (L2 weight decay, as the papers), ``"adamw"`` or ``"sgd"``; ``"task"``: a MONAI bundle's
            own, of which only the learning rate is set here; one of 'adam', 'adamw', 'sgd', 'task'.
        learning_rate: step size of the optimizer; a number > 0 (paper: ``0.0003``).
        weight_decay: of the optimizer; a number >= 0.
        betas: decay rates of Adam's moments; 2 entries, each a number in [0, 1).
        momentum: of SGD, with Nesterov's form when > 0; a number in [0, 1).
        batch_size: images in a batch; an integer >= 1.
        local_epochs: passes over the training images in a round; an integer >= 1 (paper: ``1``).
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
        probe_loss: of the report: ``"ce"`` (the task's loss), or ``"la"`` (the criterion); one of 'ce', 'la'.
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
        network: ``"resnet18"`` or ``"densenet121"`` (MONAI's); one of 'resnet18', 'densenet121'.
        features: widths of the four stages of the ResNet; 64, 128, 256, 512 is the published one. For
            ``"densenet121"``: ignored; 4 entries, each an integer >= 1 (paper: ``(64, 128, 256, 512)``).
        max_pool: the ResNet's pooling behind its first convolution (published: yes; images of 48x48 do without); true
            or false.
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
            each entry one of 'flip', 'affine', 'intensity' (paper: ``("flip", "affine")``).
        phantom: synthetic data, used where a site has none of its own: ``"dermoscopy"``, ``"dermoscopy7"``,
            ``"fundus"`` or ``"endoscopy"``; one of 'dermoscopy', 'dermoscopy7', 'fundus', 'endoscopy'.
        allow_phantom: a site whose file names no data, for itself or for others, trains on synthetic data; False: it is
            refused unless its own file says ``"phantom": true``; true or false.
        phantom_seed: of the synthetic data; an integer >= 0.
        phantom_sites: number of sites that the synthetic data are dealt to; a run whose sites are named or counted sets
            it to their number unless told otherwise; an integer >= 1; default: as many as the run has.
        phantom_samples: synthetic training and validation images of all sites together; an integer >= 1.
        phantom_test: synthetic images of the common test set; an integer >= 1.
        phantom_own_test: synthetic images of each site's own test set; an integer >= 1.
        phantom_min_share: share of ``phantom_samples`` that every class has at least; rarer classes are raised to it,
            and always to four images; a number in [0, 1].
        camera_shift: how much the cameras of the synthetic sites differ, 0 (not at all) to 1.5; a number in [0, 1.5]
            (paper: ``0.0``).
        partition: ``"iid"``, ``"dirichlet"``, ``"two_pool"`` or ``"shards"``; see ``fairflare.data.partitions``; one of
            'iid', 'dirichlet', 'two_pool', 'shards'.
        alpha: concentration of the Dirichlet and two-pool partitions; the smaller, the less alike the sites; a number
            in [1e-06, 1e+09].
        eta: of the shard partition; the larger, the more shards of its dominant class a site gets; a number in [0, 1].
        shard_mode: which form of the shard partition; see ``fairflare.data.partitions``; one of 'literal',
            'complement', 'authors'.
        corrupted_sites: so many last sites have images of lower quality; an integer >= 0 (paper: ``4``).
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

    method = "fed_ga"

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
        fedga_mode: Literal["fedism", "original"] = "fedism",
        ga_step: float | None = None,
        centred: bool = True,
        shrinking: bool = True,
        optimizer: Literal["adam", "adamw", "sgd", "task"] = "adam",
        learning_rate: float = 0.001,
        weight_decay: float = 0.0005,
        betas: Sequence[float] = (0.9, 0.999),
        momentum: float = 0.9,
        batch_size: int = 32,
        local_epochs: int = 2,
        local_steps: int | None = None,
        keep_optimizer_state: bool = False,
        max_grad_norm: float | None = None,
        augment: bool = True,
        criterion: Literal["task", "logit_adjusted", "balanced_softmax", "fedlc"] = "logit_adjusted",
        prior_strength: float | None = None,
        schedule: Literal["constant", "cosine"] = "constant",
        lowest_rate: float | None = None,
        norm_statistics: Literal["average", "recalibrated", "site"] = "average",
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        channels_last: bool = False,
        compile: bool = False,
        deterministic: bool = False,
        probe_loss: Literal["ce", "la"] = "ce",
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
        augmentation: Sequence[Literal["flip", "affine", "intensity"]] = ("flip",),
        phantom: Literal["dermoscopy", "dermoscopy7", "fundus", "endoscopy"] = "dermoscopy",
        allow_phantom: bool = True,
        phantom_seed: int = 0,
        phantom_sites: int | None = None,
        phantom_samples: int = 2000,
        phantom_test: int = 400,
        phantom_own_test: int = 150,
        phantom_min_share: float = 0.0,
        camera_shift: float = 1.0,
        partition: Literal["iid", "dirichlet", "two_pool", "shards"] = "two_pool",
        alpha: float = 1.0,
        eta: float = 1.0,
        shard_mode: Literal["literal", "complement", "authors"] = "literal",
        corrupted_sites: int = 1,
        corruption: Literal["gaussian_noise", "motion_blur"] = "gaussian_noise",
        severity: int = 3,
        label_noise_sites: int = 0,
        label_noise: float = 0.4,
        label_noise_kind: Literal["symmetric", "pair"] = "symmetric",
        attributes: bool = False,
    ) -> None: ...
