"""Algorithms, one file each: settings, loss and plan."""
