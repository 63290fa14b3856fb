"""Several hosts share a model: one process on each, which `start` brings together before anything touches a device."""

import os
import re
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
