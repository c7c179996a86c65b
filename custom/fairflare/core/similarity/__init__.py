"""Compute the similarity of two models' features (linear CKA, cosine), layer by layer, over a whole data set.

:func:`layerwise_cka` is exact (every image, every feature) in bounded memory, for two reasons. CKA needs, per layer,
only the n x n Gram matrices K and L of the two models, which are sums over features: features can be stored once,
during the forward passes, and read back some columns at a time. Second, the weights of Fed-LWR depend on 1 - delta,
which may be 1e-4 or less: so the *difference* of the two models' features is stored in place of those of the second
model, and K - L is summed from the difference. Rounding errors are then relative to the difference.
"""

from fairflare.core.features.layers import parameter_layers
from fairflare.core.similarity.formulas import LEAST_SAMPLES, LayerSimilarity, center, hsic_of_centered, linear_cka
from fairflare.core.similarity.layerwise import ESTIMATORS, layerwise_cka, layerwise_cosine

__all__ = [
    "ESTIMATORS", "LEAST_SAMPLES", "LayerSimilarity", "center", "hsic_of_centered", "layerwise_cka",
    "layerwise_cosine", "linear_cka", "parameter_layers",
]  # fmt: skip
