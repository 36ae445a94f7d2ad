"""Holds the batch on the device, compiles its programs once a shape, and enqueues them."""
