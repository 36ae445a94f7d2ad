"""Modules here read and check what clients send."""
