"""What a trained model says of new images; see :mod:`fairflare.prediction.predictor`."""
