"""Provide the parts that every other subpackage uses: settings, checks, and the interface of a task."""
