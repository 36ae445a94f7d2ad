"""Kernels over the particles of a population: from log-weights to ESS and ancestors."""
