"""Tests of posterior."""
