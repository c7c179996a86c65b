"""Import the modules that most runs need, once, in the process that the runs of a comparison are forked from."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a run says it in its own log

    import fairflare_lab.cli.compare.worker  # noqa: F401
