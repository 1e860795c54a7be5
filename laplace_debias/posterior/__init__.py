"""laplace-torch's classes, fitted on few data and debiased."""
