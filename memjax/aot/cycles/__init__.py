"""Cycles of a program that libtpu compiled, counted from the bundles it scheduled."""
