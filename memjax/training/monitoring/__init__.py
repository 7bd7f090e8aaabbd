"""Run metrics: speed, utilisation, goodput, reports, and their destinations."""
