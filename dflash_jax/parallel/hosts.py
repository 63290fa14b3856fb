"""Several hosts share a model: one process on each, which `start` brings together before anything touches a device.

`python -m dflash_jax.parallel.hosts COMMAND ...` is `dflash-jax COMMAND ...` on all of them, once they are together.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from dflash_jax.errors import DeviceError, ParameterError


def start(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, *, gpus: int | None = None
) -> None:
    """Waits for all processes, one on each host, and joins them. From then on `load(tp=N)` may name all their GPUs together.

    Under SLURM (one task a node) and Open MPI nothing has to be said.

    Args:
      coordinator: "HOST:PORT" of process 0, a port that is free there.
      processes: how many there are.
      process: which one this is, from 0.
      gpus: of this host; None for all that it shows.

    Raises:
      ParameterError: of the first three some are given and some are not.
      DeviceError: the others have not come, or JAX has started its devices already.
    """
    told = {"coordinator": coordinator, "processes": processes, "process": process}
    if (missing := [name for name, value in told.items() if value is None]) and len(missing) < len(told):
        raise ParameterError(
            f"{', '.join(missing)} must be given, too, where one of {', '.join(told)} is; leave all out under SLURM or Open MPI"
        )
    count = _gpus_here() if gpus is None else gpus
    try:
        jax.distributed.initialize(
            coordinator, processes, process, local_device_ids=list(range(count)) if count else None
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DeviceError(
            f"the processes have not come together: {reason:.400}. Call start before anything uses JAX; outside of SLURM and Open "
            "MPI give coordinator, processes and process"
        ) from error


def _gpus_here() -> int:
    """GPUs that this process may use; 0 where there is none to be seen."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    return len([one for one in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", one.name)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command of `dflash-jax` on all processes."""
    parser = argparse.ArgumentParser(prog="python -m dflash_jax.parallel.hosts", description=main.__doc__)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0; not under SLURM or Open MPI")
    parser.add_argument("--processes", type=int, help="how many there are")
    parser.add_argument("--process", type=int, help="which one this is, from 0")
    parser.add_argument("--gpus", type=int, help="of this host (default: all that it shows)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a command of dflash-jax with its options")
    asked = parser.parse_args(arguments)
    start(asked.coordinator, asked.processes, asked.process, gpus=asked.gpus)
    from dflash_jax.cli import main as command  # once devices are those of all

    return command(asked.command)


if __name__ == "__main__":
    sys.exit(main())
