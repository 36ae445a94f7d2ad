"""What clients send, read and checked."""
