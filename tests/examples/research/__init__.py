"""Tests of the research examples."""
