"""``python -m fairflare.cli``."""

from fairflare.cli.commands import main

main()
