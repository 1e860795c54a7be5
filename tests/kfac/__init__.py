"""Tests of kfac."""
