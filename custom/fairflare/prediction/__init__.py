"""Predict on new images with a trained model; see :mod:`fairflare.prediction.predictor`."""
