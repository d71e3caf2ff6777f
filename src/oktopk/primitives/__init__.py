"""What several algorithms are built of: thresholds, regions, exchanges."""
