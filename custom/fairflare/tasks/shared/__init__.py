"""Provide base classes of tasks on images and on volumes: settings of a site's file, structures, classes."""
