"""FairFlare: fair federated learning for medical images on NVIDIA FLARE."""

import sys

from fairflare.moved import OldPaths

__version__ = "0.2.0"

sys.meta_path.append(OldPaths())  # behind all others: it is asked only for what is not there
