"""Debiased K-FAC Laplace approximations from mini-batches, for laplace-torch."""
