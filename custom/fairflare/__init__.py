"""FairFlare: fair federated learning for medical images on NVIDIA FLARE."""

__version__ = "0.3.0"
