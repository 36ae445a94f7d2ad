"""Sums and gathers over the GPUs of a host through each other's memory."""
