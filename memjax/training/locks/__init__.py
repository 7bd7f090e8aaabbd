"""Locks on folders of a disk or a bucket."""
