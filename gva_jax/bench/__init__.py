"""Measurements side by side, and what hardware allows at best."""
