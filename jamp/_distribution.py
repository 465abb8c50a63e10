"""A check, when jamp is imported, for another distribution of nearly the same name."""

import warnings
from importlib.metadata import PackageNotFoundError, version


def warn_of_another() -> None:
    """Warn if the distribution `jamp` is installed. This library is `jamp-jax`."""
    try:
        other = version("jamp")
    except PackageNotFoundError:
        return
    warnings.warn(
        f"The distribution jamp {other} is installed. It is a fork of jmp by another project, and writes into the "
        "folder of jmp. This library is the distribution jamp-jax. If you did not mean to install the other one, run "
        "`pip uninstall jamp`, and if you use jmp, `pip install --force-reinstall jmp`.",
        stacklevel=4,
    )


warn_of_another()
