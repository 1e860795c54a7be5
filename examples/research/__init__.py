"""How the methods of this package were found, and what was tried besides and lost."""
