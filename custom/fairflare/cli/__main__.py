"""Run the command line as ``python -m fairflare.cli``."""

from fairflare.cli import main

main()
