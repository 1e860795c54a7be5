"""Tests of predictive."""
