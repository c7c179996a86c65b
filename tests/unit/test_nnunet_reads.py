"""Let nnU-Net's own predictor read a written model; without nnU-Net (2.8.1) this is skipped, and pytest says so."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest

from fairflare.prediction.export import export
from fairflare.prediction.masks import label_map, labels_of
from fairflare.tasks.volumes.nnunet import NnUNetTask
from tests.unit.test_export import predictor
from tests.unit.test_nnunet_task import plan

pytest.importorskip("nnunetv2", reason="nnU-Net is not installed: pip install nnunetv2==2.8.1")
SCRIPT = """
import sys, torch
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
predictor.initialize_from_trained_model_folder(sys.argv[1], use_folds=("all",))
predictor.predict_from_files_sequential([[name] for name in sys.argv[3:]], sys.argv[2])
"""


@pytest.mark.parametrize(("structures", "output"), [(1, "sigmoid"), (2, "sigmoid"), (2, "softmax")])
def test_masks_of_six_volumes_are_those_of_predict(structures: int, output: str, tmp_path: Path) -> None:
    rng, made = np.random.default_rng(0), copy.deepcopy(plan())
    spacing = made["configurations"]["3d_fullres"]["spacing"]
    network = made["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [4] * len(network["strides"])
    own = predictor(NnUNetTask(plan=made, num_classes=structures, output=output))
    # nnU-Net rounds outputs to 16 bits, where those of a network that was not trained are alike: here they lie apart.
    for name, tensor in own.network.state_dict().items():
        if "seg_layers" in name:
            tensor.mul_(8)
    export(own, "nnunet", tmp_path / "model")
    (tmp_path / "masks").mkdir()
    files = []
    for number in range(6):  # of at most one window: where windows lie and weigh is not as in nnU-Net
        turn = np.diag([1.0, 1, 1, 1] if number % 2 else [-1.0, -1, 1, 1])  # RAS, LPS
        size = [round(0.8 * side) for side in own.task.patch_size[::-1]]
        values = rng.normal(size=size).cumsum(0).cumsum(1).cumsum(2).astype(np.float32)
        values[:3] = 0  # an edge
        affine = turn @ np.diag([*(mm * (1 + 0.04 * number) for mm in spacing[::-1]), 1])
        files.append(tmp_path / f"case{number}_0000.nii.gz")
        nibabel.save(nibabel.Nifti1Image(values, affine), files[-1])
    command = [sys.executable, "-c", SCRIPT, tmp_path / "model", tmp_path / "masks", *files]
    places = dict.fromkeys(("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"), str(tmp_path))
    subprocess.run([*map(str, command)], check=True, env={**os.environ, **places}, timeout=500)
    for file in files:
        (found,) = own(file)
        labels_here = label_map(own.task.decide(found.probabilities), labels_of(own.task), 0.5).numpy().swapaxes(0, 1)
        read = np.asarray(nibabel.load(tmp_path / "masks" / file.name.replace("_0000", "")).dataobj)
        assert len(np.unique(read)) > 1
        assert (read == labels_here).mean() >= 0.999
