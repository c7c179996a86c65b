"""Ends every process whose environment has NAME=VALUE, but not this one or those that wait for it: NAME VALUE."""

import sys
import time

import psutil


def marked(name: str, value: str) -> list[psutil.Process]:
    """Live processes with the mark; shell scripts first, since FLARE's restart what they look after."""
    own = {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(name) == value:
                found.append(process)
        except psutil.Error:  # gone meanwhile, or not ours
            continue
    return sorted(found, key=lambda process: "python" in process.name())


def main(name: str, value: str) -> None:
    for _ in range(50):
        left = marked(name, value)
        if not left:
            return
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.2)
    raise SystemExit(f"processes do not end: {[process.pid for process in marked(name, value)]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
