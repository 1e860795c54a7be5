"""Tests of laplace_debias."""
