"""Default sampling parameters of a model: temperature, filters and repetition penalty from `generation_config.json`."""

from pathlib import Path

from dflash_jax.checkpoints.json_files import read_object
from dflash_jax.errors import ConfigError, ParameterError
from dflash_jax.sampling_params import SamplingParams

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> tuple[dict[str, float | int], list[str]]:
    """Values of `SamplingParams` by their names, of a folder's file; and what to say of those that cannot be one.

    `do_sample` alone says nothing: whoever wants greedy texts asks for temperature 0. Where it is true and no temperature stands
    there, that is 1.

    Raises:
      ConfigError: the file is not a JSON object.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}, []
    try:
        values = read_object(path)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}") from error
    found, notices = dict[str, float | int](), list[str]()
    for name in FIELDS:
        if (value := values.get(name)) is None:
            continue
        try:
            found[name] = getattr(SamplingParams(**{name: value}), name)
        except ParameterError as error:
            notices.append(f"{path}: {error}; it is left out")
    if values.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    return found, notices
