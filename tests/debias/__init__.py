"""Tests of debias."""
