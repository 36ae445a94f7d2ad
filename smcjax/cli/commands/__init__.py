"""The commands, a file each but for the benchmarks."""
