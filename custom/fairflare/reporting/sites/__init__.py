"""Report figures of single sites: statistics of their images, and clinical figures of classifiers."""
