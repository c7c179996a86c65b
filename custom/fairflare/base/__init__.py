"""Provide what every other subpackage builds on: settings, checks, and the interface of a task."""
