"""Define the commands that prepare published data sets, as entries of one table; sources: docs/published_sets.md.

A further data set is an entry here: a layout of :mod:`fairflare_lab.sets.layouts`, names of its classes, and perhaps
a rule for dealing it to sites. A data set that no layout reads has a function in :mod:`fairflare_lab.sets.special`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Literal

from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.options import Preparer, option
from fairflare.data.preparers.writing import Form
from fairflare_lab.sets import special
from fairflare_lab.sets.layouts import (
    add_people,
    arrays,
    check_classes,
    class_folders,
    compare_counts,
    list_table_images,
    pair_images,
    person_of_images,
    public_set,
    tiles,
)  # fmt: skip

# Classes in the order of their numbers, each with its number of images in the published set.
ISIC2018 = {"MEL": 1113, "NV": 6705, "BCC": 514, "AKIEC": 327, "BKL": 1099, "DF": 115, "VASC": 142}
ISIC2019 = {"MEL": 4522, "NV": 12875, "BCC": 3323, "AK": 867, "BKL": 2624, "DF": 239, "VASC": 253, "SCC": 628}
GRADES = {"no-dr": 1017, "mild-dr": 270, "moderate-dr": 347, "severe-dr": 75, "proliferative-dr": 35}
HYPERKVASIR = {
    "bbps-2-3": 1148, "polyps": 1028, "cecum": 1009, "dyed-lifted-polyps": 1002, "pylorus": 999,
    "dyed-resection-margins": 989, "z-line": 932, "retroflex-stomach": 764, "bbps-0-1": 646,
    "ulcerative-colitis-grade-2": 443, "esophagitis-a": 403, "retroflex-rectum": 391, "esophagitis-b-d": 260,
    "ulcerative-colitis-grade-1": 201, "ulcerative-colitis-grade-3": 133, "impacted-stool": 131,
    "barretts-short-segment": 53, "barretts": 41, "ulcerative-colitis-grade-0-1": 35,
    "ulcerative-colitis-grade-2-3": 28, "ulcerative-colitis-grade-1-2": 11, "ileum": 9, "hemorrhoids": 6,
}  # fmt: skip

# Rules for dealing images to sites as in the papers' protocols.
FEDMRL = Dealing(partition="shards", sites=4, eta=1.0, global_test=True, fractions=(0.72, 0.08, 0.2))
FEDISM = Dealing(
    partition="two-pool", sites=20, alpha=1.0, corrupt="gaussian_noise:3", corrupt_sites=4, common_test=True,
    fractions=(0.72, 0.08, 0.2), size=224,
)  # fmt: skip
FED_MAS = Dealing(partition="dirichlet", sites=8, alpha=0.5, folds=5, global_test=True, fractions=(0.72, 0.08, 0.2))

LESIONS_2018 = "ISIC2018_Task3_Training_LesionGroupings.csv"
TRUTH_2018, TRUTH_2019 = "ISIC2018_Task3_Training_GroundTruth", "ISIC_2019_Training_GroundTruth"
INPUT_2019, META_2019 = "ISIC_2019_Training_Input", "ISIC_2019_Training_Metadata.csv"
LESIONS = "Lesions are read from {}, which may lie anywhere below the source"
FORM_2019 = Form(tuple(ISIC2019), stratified=True, keys=LESIONS.replace("{}", META_2019))
# Ages, in years, at which the groups of age are divided.
PEOPLE_2019 = partial(
    add_people, table=META_2019, image="image", columns={"sex": "sex", "age": "age_approx:40,60"}
)  # fmt: skip
KEYS_2019 = partial(person_of_images, table=META_2019, person="lesion_id")
LAYOUT_2019 = partial(
    list_table_images, tables=(f"{TRUTH_2019}.csv", f"{TRUTH_2019}/{TRUTH_2019}.csv"), classes=tuple(ISIC2019),
    folders=(INPUT_2019,), keys=KEYS_2019,
)  # fmt: skip
# FLamby's centres, each with its number of images for training and test together.
CENTRES = {
    "BCN": 12413, "vidir_molemax": 3954, "vidir_modern": 3363, "rosendahl": 2259, "MSK": 819, "vienna_dias": 439,
}  # fmt: skip
RIF_SITES = {
    "Drishti-GS": ("Domain1", "site1"), "RIM-ONE-r3": ("Domain2", "site2"), "REFUGE-train": ("Domain3", "site3"),
    "REFUGE-val": ("Domain4", "site4"),
}  # fmt: skip
NUCLEI = ("fluo256", "fluo360", "fluo520", "histology256x320", "brightfield1024")
WHITE_CELLS = ("JTSC", "CellaVision", "BCCD")
WHITE_CELL_TARGETS: Mapping[str, Mapping[str, int] | None] = {  # labels: 0 background, 1 cytoplasm, 2 nucleus
    "cell": {"0": 0, "1": 1, "2": 1}, "nucleus": {"0": 0, "1": 0, "2": 1}, "both": None,
}  # fmt: skip

PREPARERS: Mapping[str, Preparer] = {entry.name: entry for entry in (
    public_set(
        "prostate-mri", "T2 prostate MRI, six sites", special.prostate,
        options=(
            option("sites", list[str] | None, f"Default: {' '.join(special.PROSTATE_SITES)}.", None, metavar="SITE"),
            option("split_unit", Literal[special.PROSTATE_UNITS], "What stays together.", "patient"),
            option("neighbours", bool, "Three neighbouring slices as channels.", False, "--neighbours"),
            option("window", Literal[special.WINDOWS], "Of what the 99th percentile is.", "volume"),
            option("order", Literal[special.ORDERS], "Of the cases: drawn, or as the files.", "drawn"),
        ),
    ),
    public_set(
        "rif", "optic disc and cup, four sites",
        partial(
            pair_images, sites=RIF_SITES, parts={"train": (), "test": ("test",)},
            images="ROIs/image", masks="ROIs/mask",
            tops=(50, 200), labels=(2, 1, 0),  # ranges of grey values: cup, rim of the disc, background
        ),
        published=partial(
            compare_counts, title="RIF by site and part",
            counts=dict(zip(product(RIF_SITES, ((), ("test",))), (50, 51, 99, 60, 320, 80, 320, 80), strict=True)),
            of=lambda item: (item.site, item.splits),
        ),
        form=Form(
            dealing=Dealing(fractions=(0.8, 0.2, 0.0)),  # of the images that the source does not put into the test
            task={"in_channels": 3, "num_classes": 2, "labels": [[1, 2], [2]], "class_names": ["disc", "cup"]},
        ),
    ),
    public_set(
        "messidor2", "grades of diabetic retinopathy (Messidor-2)",
        partial(
            list_table_images, tables=("messidor_data.csv",), classes=tuple(GRADES),
            keys=partial(person_of_images, table="messidor-2.csv", images=("left", "right")),
            columns=[
                {"image": "image_id", "label": "adjudicated_dr_grade", "usable": "adjudicated_gradable"},
                {"image": "id_code", "label": "diagnosis", "usable": "adjudicated_gradable"},
            ],
        ),
        FEDMRL,
        Form(
            tuple(GRADES), stratified=True,
            keys="Examinations are read from messidor-2.csv (left;right), which may lie anywhere below the source",
        ),
        published=check_classes("Messidor-2", GRADES),
    ),
    public_set(
        "isic2018", "skin lesions, 7 classes (ISIC 2018 task 3)",
        partial(
            list_table_images, tables=(f"{TRUTH_2018}/{TRUTH_2018}.csv", f"{TRUTH_2018}.csv"), classes=tuple(ISIC2018),
            folders=("ISIC2018_Task3_Training_Input",),
            keys=partial(person_of_images, table=LESIONS_2018, person="lesion_id"),
        ),
        FEDMRL, Form(tuple(ISIC2018), stratified=True, keys=LESIONS.replace("{}", LESIONS_2018)),
        people=partial(
            add_people, table="HAM10000_metadata.csv", image="image_id", columns={"sex": "sex", "age": "age:40,60"}
        ),
        published=check_classes("ISIC 2018", ISIC2018),
    ),
    public_set(
        "isic2019", "skin lesions, 8 classes (ISIC 2019)", LAYOUT_2019, FEDISM, FORM_2019, people=PEOPLE_2019,
        published=check_classes("ISIC 2019", ISIC2019),
    ),
    public_set(
        "isic2019-flamby", "ISIC 2019 by FLamby's six centres",
        partial(
            list_table_images, tables=("train_test_split", "train_test_split.csv", "train_test_folds.csv"),
            classes=tuple(ISIC2019), folders=(f"{INPUT_2019}_preprocessed", INPUT_2019), sites=tuple(CENTRES),
            keys=KEYS_2019,
            columns=[{"image": "image", "label": "target", "site": "center", "fold": "fold"}],
        ),
        Dealing(global_test=True, fractions=(0.72, 0.08, 0.2)), FORM_2019, people=PEOPLE_2019,
        published=partial(compare_counts, title="Fed-ISIC2019 by centre", counts=CENTRES, of=lambda item: item.site),
    ),
    public_set(
        "isic2019-tones", "ISIC 2019 by skin tone", partial(special.split_by_tone, LAYOUT_2019),
        Dealing(common_test=True, fractions=(0.7, 0.15, 0.15)), FORM_2019, people=PEOPLE_2019,
        options=(
            option("tones", str, "Columns image, skin_tone (light or dark).", metavar="CSV"),
            option("sites_per_tone", int, "How many.", 2),
        ),
    ),
    public_set(
        "hyperkvasir", "gastrointestinal endoscopy, 23 classes",
        partial(
            class_folders, inside="labeled-images", parts=("lower-gi-tract", "upper-gi-tract"),
            classes=tuple(HYPERKVASIR),
        ),
        FED_MAS, Form(tuple(HYPERKVASIR), stratified=True, keys="The data set does not say whose an image is"),
        published=check_classes("HyperKvasir", HYPERKVASIR),
    ),
    public_set(
        "rsna", "intracranial haemorrhage on CT, five kinds", special.rsna, FEDISM,
        Form(
            special.KINDS, stratified=True,
            keys="DICOM files say whose a slice is, pictures do not; with --split-unit image nobody is asked",
        ),
        options=(
            option("images", int, "So many.", 25_000),
            option("window", tuple[float, float], "Centre and width; of DICOM.", special.BRAIN),
            option("split_unit", Literal[special.RSNA_UNITS], "What stays together.", "patient"),
        ),
    ),
    public_set(
        "nuclei", "nucleus segmentation, five acquisition groups",
        partial(arrays, prefix="nuclei_", sites=NUCLEI, keys=("masks", "ids"), items=partial(tiles, values=(0, 1))),
        options=(
            option("crop", int | None, "Only the middle of each image; default: all of it.", None, metavar="PIXELS"),
        ),
    ),
    public_set(
        "white-cells", "white blood cells, three laboratories",
        partial(
            arrays, prefix="wbc_", sites=WHITE_CELLS, keys=("masks", "ids"), items=partial(tiles, values=(0, 1, 2))
        ),
        options=(option("target", Literal[tuple(WHITE_CELL_TARGETS)], "What is segmented.", "cell"),),
        form=Form(task={"num_classes": 2}), targets=WHITE_CELL_TARGETS,
    ),
    public_set(
        "cell-types", "white blood cells by type, three laboratories",
        partial(arrays, prefix="wbc_", sites=WHITE_CELLS, keys=("labels", "ids"), items=special.cell_types),
        Dealing(), Form(("neutrophil", "lymphocyte", "monocyte", "eosinophil", "basophil")),
    ),
    public_set(
        "red-cells", "red blood cells by type, long-tailed, six blocks of one hospital's smears",
        partial(
            arrays, prefix="rbc12_", sites=("chula",), keys=("labels", "image_no", "site"), items=special.red_cells
        ),
        Dealing(),
        Form((
            "normal", "macrocyte", "microcyte", "spherocyte", "target", "stomatocyte", "ovalocyte", "teardrop", "burr",
            "schistocyte", "hypochromia", "elliptocyte",
        )),
    ),
)}  # fmt: skip
