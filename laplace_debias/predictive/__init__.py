"""Predictions of the linearised and of sampled networks, for many prior precisions at once."""
