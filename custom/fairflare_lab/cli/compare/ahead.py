"""Import modules that most runs need, once, in the process from which a comparison's runs are forked."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # each run writes such warnings into its own log

    import fairflare_lab.cli.compare.worker  # noqa: F401
