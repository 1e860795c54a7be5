"""Results in, matplotlib axes out; needs the extra `plots`."""
