"""The page for one model."""
