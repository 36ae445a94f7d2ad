"""The batch on the device: programs, compiled once a shape, and the calls that enqueue them."""
