"""What the tasks on pictures and on volumes share: settings of a site's file, structures, classes."""
