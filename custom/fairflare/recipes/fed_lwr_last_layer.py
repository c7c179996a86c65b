"""Fed-LWR-v2.

Made by tools/write_recipes.py; change the declarations and run it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fairflare.flare.recipes import MethodRecipe, only_what_is_given


class FedLWRLastLayerRecipe(MethodRecipe):
    """Ablation: CKA of the last encoder layer only, one weight per site.

    Source: Yan et al., MICCAI 2024.

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
        num_rounds: communication rounds; an integer >= 1 (paper: ``200``).
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
        preset: ``"paper"``, ``"authors"`` (clip to [1e-4, 0.99]) or ``"stable"`` (ours); fills the settings below that
            are ``None``, and those of the site half; one of 'paper', 'authors', 'stable'.
        clip_min: bounds of delta before Eq. 5; a number in [0, 1] or nothing.
        clip_max: bounds of delta before Eq. 5; a number in [0, 1] or nothing.
        warmup_rounds: so many first rounds are plain averages (Eq. 1), without a second phase; 0, ``"stable"`` 10; an
            integer >= 0 or nothing.
        mix: share of uniform weights, 0 (none) to 1 (plain averaging, measured all the same); 0, ``"stable"`` 0.75; a
            number in [0, 1] or nothing.
        power: exponent of the weights before they sum to 1 again; below 1 they come closer, 0 makes them uniform; 1; a
            number >= 0 or nothing.
        smooth: share of what was in a moving average of each site's scores over the rounds, in [0, 1); an absent site's
            stays; 0; a number in [0, 1) or nothing.
        layer_granularity: which layers share one weight, from their mean score: ``"leaf"`` (none: every module with
            parameters is a layer), ``"unit"`` (a convolution or linear map and the norms behind it), ``"block"`` (all
            under one top-level child), ``"model"`` (all: one weight a site); one of 'leaf', 'unit', 'block', 'model' or
            nothing.
        only_layer: ablation v2: one weight a site, from this layer's score. A name like ``"down_3"`` means the last
            layer inside that block; a text or nothing.
        optimizer: ``"adam"`` (L2 weight decay, as the papers), ``"adamw"`` or ``"sgd"``; ``"task"``: a MONAI bundle's
            own, of which only the learning rate is set here; one of 'adam', 'adamw', 'sgd', 'task'.
        learning_rate: step size of the optimizer; a number > 0.
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
        similarity: ``"cka"`` (Eq. 3) or ``"cosine"`` (ablation v1); one of 'cka', 'cosine'.
        cka_estimator: ``"full_biased"`` (Eq. 2, all images at once), ``"full_unbiased"`` (HSIC_1 from the same Gram
            matrices: does not favour sites with many images), ``"minibatch_biased"``, ``"minibatch_unbiased"``; one of
            'full_biased', 'full_unbiased', 'minibatch_biased', 'minibatch_unbiased' or nothing.
        cka_split: images: ``"train"`` (paper, D_k) or ``"val"`` (authors); one of 'train', 'val' or nothing.
        cka_batch_size: images a forward pass, and of a batch of the minibatch estimators: there at least 2 (biased) or
            4 (unbiased); what is left of a pass if fewer than these joins its last batch; an integer >= 1.
        cka_passes: passes over the images, re-shuffled each time; matters for the minibatch estimators only. Of up to
            100 images for each of them (500 with five) the features are made once, and kept as for full estimators; an
            integer >= 1 or nothing.
        cka_max_samples: at most so many images, a fixed seeded choice; ``None``: all; an integer >= 2 or nothing.
        cosine_mode: ``"sample"`` (mean over images) or ``"matrix"`` (one cosine of all features); one of 'sample',
            'matrix'.
        cka_memory: bytes that features may take in memory; what is beyond waits in a scratch file; an integer >= 0.
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
        image_size: height and width that images are resized to; multiples of 16, at least 32; 2 entries, each a
            multiple of 16 >= 32 (paper: ``(384, 384)``).
        in_channels: 1 (colour images become luminance) or 3 (grey images are repeated); one of 1, 3 (paper: ``3``).
        num_classes: number of structures, that is of output channels; an integer >= 1.
        labels: for each structure the labels that belong to it, for example ``[[1, 2], [2]]`` for whole cell and
            nucleus of masks with 1 cytoplasm and 2 nucleus. Default: ``[[1], [2], ...]``; a list, each entry a list,
            each entry an integer >= 1, not empty or nothing.
        class_names: names of the structures for the metrics ``dice_<name>``; only with several structures. Default:
            ``class_1``, ``class_2``, ; a list, each entry a text or nothing.
        mask_values: ``{value in the file: label}``, every value that a mask may hold. Default: the labels themselves
            and 0 for background; masks of 0 and 255 are also understood where 1 is the only label. A site whose masks
            are coded otherwise sets the same key in its own file; a dict of an integer to an integer >= 0 or nothing.
        ignore: label of pixels that do not count, in loss and metrics (outside a field of view, not annotated).
            Default: all count; an integer >= 0 or nothing.
        mask_resize: ``"nearest"``: a pixel of the network belongs to a structure or not; ``"area"``: by the share that
            the structure covers, so that what is smaller than a pixel is not lost; one of 'nearest', 'area'.
        evaluate_at: Dice at the size of the ``"network"``, or of the ``"image"``: what is found is brought back to it
            and compared with the mask as it is in the file. The loss is always that of the network's size; one of
            'network', 'image'.
        features: widths of the U-Net, as in ``monai.networks.nets.BasicUNet``; 6 entries, each an integer >= 1 (paper:
            ``(32, 64, 128, 256, 512, 32)``).
        norm_momentum: share of a new batch in the running statistics of the batch norms. With PyTorch's 0.1 they still
            hold a quarter of their initial values after 12 steps, which is all that a small site does in a round, and
            18 layers of it make the first models blind in evaluation; a number in (0, 1] (paper: ``0.1``).
        initial_weights: checkpoint of exactly this network (``.pt``, ``.pth`` or ``.safetensors``; also an
            ``FL_global_model.pt``) that the server starts from, unless the run or its own private file names another; a
            text or nothing.
        augmentation: ``"flip"``, ``"affine"``, ``"intensity"``: which random changes ``augment=True`` makes; a list,
            each entry one of 'flip', 'affine', 'intensity'.
        allow_phantom: a site whose file names no data, for itself or for others, trains on synthetic data; False: it is
            refused unless its own file says ``"phantom": true``; true or false.
        phantom_seed: seed of the synthetic data, used where a site has none of its own; an integer >= 0.
        phantom_cases: factor on the number of synthetic cases; a number in (0, 1000].

    Raises:
        ValueError: a value of another type or out of range: one line with the setting's name.
    """

    method = "fed_lwr_last_layer"

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
        num_rounds: int = 3,
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
        preset: Literal["paper", "authors", "stable"] = "paper",
        clip_min: float | None = None,
        clip_max: float | None = None,
        warmup_rounds: int | None = None,
        mix: float | None = None,
        power: float | None = None,
        smooth: float | None = None,
        layer_granularity: Literal["leaf", "unit", "block", "model"] | None = None,
        only_layer: str | None = "down_3",
        optimizer: Literal["adam", "adamw", "sgd", "task"] = "adam",
        learning_rate: float = 0.001,
        weight_decay: float = 0.0001,
        betas: Sequence[float] = (0.9, 0.99),
        momentum: float = 0.9,
        batch_size: int = 8,
        local_epochs: int = 5,
        local_steps: int | None = None,
        keep_optimizer_state: bool = True,
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
        similarity: Literal["cka", "cosine"] = "cka",
        cka_estimator: str | None = None,
        cka_split: Literal["train", "val"] | None = None,
        cka_batch_size: int = 8,
        cka_passes: int | None = None,
        cka_max_samples: int | None = None,
        cosine_mode: Literal["sample", "matrix"] = "sample",
        cka_memory: int = 1073741824,
        orientation: Literal["canonical", "axial", "sagittal", "coronal", "stored"] = "canonical",
        intensity: Literal["auto", "range", "percentile", "window", "zscore"] = "auto",
        window: Sequence[float] | None = None,
        resize: Literal["stretch", "pad", "crop"] = "stretch",
        image_size: Sequence[int] = (64, 64),
        in_channels: Literal[1, 3] = 1,
        num_classes: int = 1,
        labels: Sequence[Sequence[int]] | None = None,
        class_names: Sequence[str] | None = None,
        mask_values: Mapping[int, int] | None = None,
        ignore: int | None = None,
        mask_resize: Literal["nearest", "area"] = "nearest",
        evaluate_at: Literal["network", "image"] = "network",
        features: Sequence[int] = (16, 16, 32, 64, 128, 16),
        norm_momentum: float = 0.3,
        initial_weights: str | None = None,
        augmentation: Sequence[Literal["flip", "affine", "intensity"]] = ("flip", "affine", "intensity"),
        allow_phantom: bool = True,
        phantom_seed: int = 0,
        phantom_cases: float = 1.0,
    ) -> None: ...
