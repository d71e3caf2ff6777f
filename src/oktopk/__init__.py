"""Sparse all-reduce for training neural networks over networks that are slower than the machines."""
