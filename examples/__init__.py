"""Examples, run from the repository's root: ``python -m examples.quickstart`` and so on."""
