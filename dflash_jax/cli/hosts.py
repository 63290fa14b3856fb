"""`python -m dflash_jax.cli.hosts COMMAND ...`: `dflash-jax COMMAND ...` on several hosts, once their processes are together."""

import argparse
import sys
from collections.abc import Sequence

from dflash_jax.cli import main as command
from dflash_jax.errors import DFlashError
from dflash_jax.parallel.hosts import start


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command of `dflash-jax` on all processes."""
    parser = argparse.ArgumentParser(prog="python -m dflash_jax.cli.hosts", description=main.__doc__)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0; not under SLURM or Open MPI")
    parser.add_argument("--processes", type=int, help="how many there are")
    parser.add_argument("--process", type=int, help="which one this is, from 0")
    parser.add_argument("--gpus", type=int, help="of this host (default: all that it shows)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a command of dflash-jax with its options")
    asked = parser.parse_args(arguments)
    try:
        start(asked.coordinator, asked.processes, asked.process, gpus=asked.gpus)
    except DFlashError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return command(asked.command)


if __name__ == "__main__":
    sys.exit(main())
