"""Tests of the CIFAR example."""
