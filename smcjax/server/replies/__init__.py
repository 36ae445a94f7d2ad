"""Modules here shape what clients get."""
