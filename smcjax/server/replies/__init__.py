"""What clients get."""
