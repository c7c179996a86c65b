"""``python -m fairflare.cli``."""

from fairflare.cli import main

main()
