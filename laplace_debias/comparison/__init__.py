"""Methods against each other, at equal budgets and over many draws."""
