"""Tests of quadratics."""
