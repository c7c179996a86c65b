"""TEMPORARY."""


def layers_of(names):
    return {name: name.rpartition(".")[0] for name in names}
