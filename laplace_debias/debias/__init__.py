"""From factors to a spectrum: directions from some data, curvatures from others."""
