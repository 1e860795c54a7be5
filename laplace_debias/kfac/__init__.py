"""Kronecker factors of some data, from this package's engine or laplace-torch's backends."""
