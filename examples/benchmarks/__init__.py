"""What ``make bench`` times; each is a script of its own, and prints ratios within one run."""
