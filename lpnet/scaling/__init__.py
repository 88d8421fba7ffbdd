"""Where a run's time goes, and what it would cost elsewhere."""
