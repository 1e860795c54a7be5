"""Finished pieces of long runs, and the fingerprints they are recognised by."""
