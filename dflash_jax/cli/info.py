"""The command `dflash-jax info`: versions, the device, and the models with their sizes. No weight is loaded."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Unpack

import jax

from dflash_jax.checkpoints.converted import Checkpoint, Converted, open_converted
from dflash_jax.checkpoints.pair import drafter_notice, open_pair
from dflash_jax.checkpoints.weights import weight_bytes
from dflash_jax.engine import Engine
from dflash_jax.engine.memory import size
from dflash_jax.engine.planning import as_checkpoint_says, plan_engine, tower_shapes, vision_of
from dflash_jax.engine.verify_policy import Length
from dflash_jax.models import count
from dflash_jax.models.dflash import HEAD_INDEX, SHARED_HEAD
from dflash_jax.options import RELEASED, LoadKeywords, read_options
from dflash_jax.parallel.ranks import held
from dflash_jax.quantization.kv_formats import pool_dtype, value_dtype
from dflash_jax.text.tokenizer import tokenizer_notices

PACKAGES = ("dflash-jax", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "tokenizers", "safetensors")


class Plan(dict[str, Any]):
    """Facts about what `load` would load: versions, device, models, pages, memory, how cycles run. As text they are what
    `dflash-jax info` prints."""

    def __str__(self) -> str:
        return "\n".join(lines(self))


def plan(path: str | Path | None = None, *, hashes: bool = False, **options: Unpack[LoadKeywords]) -> Plan:
    """Plan of `load` for these arguments, without reading a weight: a mapping that prints as `dflash-jax info` does.

    Args:
      path: as `load` takes it.
      hashes: read every file of converted folders and compare it with what its conversion recorded.
      **options: fields of `LoadOptions`.

    Raises:
      CheckpointError: a file is not what was recorded; otherwise what `load` raises before it reads weights.
    """
    return Plan(collect(path, hashes=hashes, **options))


def collect(path: str | Path | None = None, *, hashes: bool = False, **options: Unpack[LoadKeywords]) -> dict[str, Any]:
    """Facts about what `dflash_jax.load` would load with these arguments. Raises what `load` raises before it reads weights.

    Args:
      hashes: read every file of converted folders and compare it with what its conversion recorded.

    Raises:
      CheckpointError: a file is not what was recorded.
    """
    asked = read_options(dict(options), "plan")
    target, drafter = open_pair(path, asked.draft, revision=asked.revision, draft_revision=asked.draft_revision)
    compared = [one for one in (target, drafter) if hashes and isinstance(one, Converted)]
    for one in compared:
        open_converted(one.folder, hashes=True)
    asked = as_checkpoint_says(asked, target)
    engine, memory = plan_engine(target, drafter, asked)
    checkpoints = [target] if drafter is None else [target, drafter]
    tower = vision_of(target, asked)
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    return {
        "versions": {"python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES},
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.local_device_count(),
            "memory_bytes": stats.get("bytes_limit"),
            "shared_by": engine.tp,
        },
        "models": [_model(one, weight_bytes({"": engine.weights[one.family.role]})) for one in checkpoints],
        "vision": None
        if tower is None
        else _tower(tower, weight_bytes({"": tower_shapes(tower, engine.dtype)}))
        | {"attention_dtype": asked.vision_attention_dtype},
        "pages": {
            "dtype": str(engine.dtype),
            "target_dtype": str(pool_dtype(asked.cache_dtype, engine.dtype)),
            "target_value_dtype": str(value_dtype(asked.cache_dtype, engine.dtype)),
            "query_dtype": asked.query_dtype,
            "draft_dtype": str(pool_dtype(asked.draft_cache_dtype, engine.dtype)),
            "layers_left_out": list(asked.cache_dtype_skip_layers),
            "max_model_len": engine.max_model_len,
            "max_batch": engine.max_batch,
            "page_size": engine.page_size,
            "dealt_to": engine.dealt,
            "num_pages": engine.num_pages,
            "pool_bytes": engine.pool_bytes,
            "tokens": int(memory.sequences * engine.buckets.width[-1] * engine.page_size),
            "groups": [
                {
                    "window": pool.group.reach,
                    "target_layers": len(pool.group.target),
                    "draft_layers": len(pool.group.draft),
                    "num_pages": pool.allocator.num_pages,
                    "pages_of_one_request": pool.group.columns,
                }
                for pool in engine.groups
            ],
        },
        "memory": {
            "free_bytes": memory.free,
            "weight_dtype": asked.weight_dtype,
            "attention_output": asked.attention_output,
            "draft_weight_dtype": (asked.draft_weight_dtype or asked.weight_dtype) if drafter is not None else None,
            **{
                key: weight_bytes({"": {name: engine.weights.get("draft", {}).get(name)}})
                for key, name in (("shared_head_bytes", SHARED_HEAD), ("head_index_bytes", HEAD_INDEX))
            },
            "weight_bytes": memory.weights,
            "reading_bytes": memory.reading,
            "workspace_bytes": memory.workspace,
            "state_bytes": memory.states,
            "state_snapshots": memory.state_snapshots,
            "snapshot_bytes": memory.snapshots,
            "pool_bytes": memory.pools,
            "left_bytes": memory.left,
            "pages_for_full_length": memory.full_pages,
        },
        "execution": _execution(engine),
        "exact": {
            "cycle": [engine.max_batch, 1 if engine.draft is None else engine.draft.num_drafts + 1],
            "prompts": [engine.buckets.pieces[-1], engine.buckets.piece],
        }
        if engine.exact
        else None,
        "hashes": sum(len(one.marker["outputs"]) for one in compared) if hashes else None,
        "notices": [
            *(notice for checkpoint in checkpoints for notice in checkpoint.notices),
            *drafter_notice(path, asked.draft, drafter),
            *tokenizer_notices(target.folder),
        ],
    }


def _execution(engine: Engine) -> list[dict[str, Any]]:
    """Execution plans of each model, for a cycle of one sequence and for one of `max_batch`."""
    setup, shapes = engine.setup(mode="greedy", draft=engine.draft is not None).of_rank(), engine.pool_shapes()
    weights = {role: held(table) for role, table in engine.weights.items()} if engine.tp > 1 else engine.weights
    facts: list[dict[str, Any]] = []
    for slots in dict.fromkeys((engine.max_batch if engine.exact else 1, engine.max_batch)):
        plans = setup.plans(weights, slots, engine.buckets.width[-1], shapes)
        block = setup.width if setup.draft is None else setup.draft.block_size
        passes = [("target", (slots, setup.width), plans.target), ("draft", (slots, block), plans.draft)]
        half = engine.verifying(setup, Length(setup.offered // 2, shared=True), slots)
        if half.per_request:  # half of the block on average: tokens of all slots side by side
            shared = half.plans(weights, slots, engine.buckets.width[-1], shapes)
            passes.append(("target", half.verified_shape(slots), shared.target))
        for model, (sequences, tokens), plan in passes:
            if plan is None:
                continue
            facts.append({
                "model": model, "sequences": sequences, "tokens": tokens, "runner": plan.runner, "attention": plan.attention,
                "weight_layout": plan.weight_layout, "workspace": plan.workspace,
                "xla_options": dict(plan.xla_options) if model == "target" else None, "device": plan.device,
                "refused": {one.what: one.reason for one in plan.refusals},
            })  # fmt: skip
    return facts


def _model(checkpoint: Checkpoint, loaded: int) -> dict[str, Any]:
    config, parameters = checkpoint.config, checkpoint.family.parameters(checkpoint.config)
    return {
        "role": checkpoint.family.role,
        "family": checkpoint.family.name,
        "folder": str(checkpoint.folder),
        "parameters": count(parameters),
        "weight_bytes": loaded,
        "stored_dtype": checkpoint.dtype,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "max_position": config.max_position,
    } | checkpoint.family.facts(config)


def _tower(checkpoint: Checkpoint, loaded: int) -> dict[str, Any]:
    config = checkpoint.config
    return {
        "family": checkpoint.family.name,
        "parameters": count(checkpoint.family.parameters(config)),
        "weight_bytes": loaded,
        "layers": config.depth,
        "hidden_size": config.hidden_size,
        "pixels_of_a_token": config.patch_size * config.merge_size,
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def lines(facts: dict[str, Any]) -> list[str]:
    """The facts as aligned text."""
    device, pages, memory = facts["device"], facts["pages"], facts["memory"]
    limit = "" if device["memory_bytes"] is None else f", {size(device['memory_bytes'])}"
    rows = [
        ("versions", ", ".join(f"{name} {number}" for name, number in facts["versions"].items())),
        ("device", f"{device['count']} x {device['kind']} ({device['platform']}{limit})"),
    ]
    if device["shared_by"] > 1:
        rows.append(("", f"{device['shared_by']} of them share the models; sizes are what each of these holds"))
    for model in facts["models"]:
        rows += _model_rows(model)
    dtypes = _page_dtypes(pages, len(facts["models"]))
    rows += [
        *_tower_rows(facts["vision"]),
        (
            "pages",
            f"{size(pages['pool_bytes'])} in {dtypes}: {pages['num_pages']} pages of {pages['page_size']} tokens"
            + (f", each dealt out to {pages['dealt_to']} devices" if pages["dealt_to"] > 1 else ""),
        ),
        ("", f"for {pages['max_batch']} requests of up to {pages['max_model_len']} tokens side by side"),
        *_windows(pages),
        *_shortage(pages, memory),
        (
            "memory",
            f"{size(memory['free_bytes'])} free: {size(memory['weight_bytes'])} weights, {size(memory['workspace_bytes'])} "
            f"workspace (estimated), {_states(memory)}{size(memory['pool_bytes'])} pages, {size(memory['left_bytes'])} left",
        ),
        *_rounding(memory),
        *_measured(facts.get("measured")),
        *_plans(facts["execution"]),
        *_exact(facts["exact"]),
        *_hashes(facts["hashes"]),
        *(("note", notice) for notice in facts["notices"]),
    ]
    return [f"{name:<9} {text}".rstrip() for name, text in rows]


def _model_rows(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Family, sizes and shape of one model."""
    keys = f"{model['kv_heads']} key/value heads of {model['head_dim']}"
    if "full_attention_head_dim" in model:
        full = model["full_attention_kv_heads"], model["full_attention_head_dim"]
        keys += f" ({full[0]} of {full[1]} in layers without a window)"
    if "latent_width" in model:
        keys = f"one latent row of {model['latent_width']}"
    if "index_width" in model:
        keys += f" and, in {model['index_layers']}, an index key of {model['index_width']}"
    shape = (
        f"{model['layers']} layers of {model['hidden_size']} x {model['intermediate_size']}, {model['heads']} heads and "
        f"{keys}, vocabulary {model['vocabulary']}"
    )
    rows = [
        (model["role"], f"{model['family']} from {model['folder']}"),
        (
            "",
            f"{model['parameters']:,} parameters in {model['stored_dtype']}, {size(model['weight_bytes'])} loaded",
        ),
        ("", shape),
    ]
    if "index_topk" in model:
        rows.append(("", f"a token attends to the {model['index_topk']:,} that an indexer scores best"))
    if "compressed_layers" in model:
        chosen = f"{model['compressed_topk']:,} where an indexer chooses"
        rows.append(("", f"{model['compressed_layers']} layers attend to compressed keys as well, to {chosen}"))
    if "experts" in model:
        rows.append(("", f"{model['experts_per_token']} of {model['experts']} experts a token"))
    if "block_size" in model:
        head = "" if model["draft_head"] == "v1" else f", draft head {model['draft_head']}"
        head += f", layers of {model['layers_of']}" if "layers_of" in model else ""
        rows.append(("", f"blocks of {model['block_size']}, reads target layers {model['tapped_layers']}{head}"))
    return rows


def _tower_rows(tower: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Sizes of the vision tower."""
    if tower is None:
        return []
    edge = tower["pixels_of_a_token"]
    return [
        ("vision", f"{tower['family']}, {tower['parameters']:,} parameters, {size(tower['weight_bytes'])} loaded"),
        (
            "",
            f"{tower['layers']} layers of {tower['hidden_size']}, a token for every {edge} x {edge} pixels"
            + ("" if tower["attention_dtype"] is None else ", attention in float8"),
        ),
    ]


def _page_dtypes(pages: dict[str, Any], models: int) -> str:
    """Dtypes of the pages of target and drafter, in words."""
    kept = pages["target_dtype"]
    if pages["target_value_dtype"] != kept:
        kept = f"{kept} for keys and {pages['target_value_dtype']} for values"
    if skipped := pages["layers_left_out"]:
        kept += f" but for layers {', '.join(map(str, skipped))}"
    if kept != pages["dtype"] or pages["draft_dtype"] != kept:
        kept += "" if pages["query_dtype"] is None else ", queries too"
        kept += " (target)" + (f" and {pages['draft_dtype']} (drafter)" if models > 1 else "")
    return kept


def _windows(pages: dict[str, Any]) -> list[tuple[str, str]]:
    """Pages of layers with windows, if they keep fewer than other layers."""
    rows = []
    for group in pages["groups"]:
        if group["window"] is not None:
            layers = group["target_layers"] + group["draft_layers"]
            rows.append(
                (
                    "",
                    f"{layers} layers with a window of {group['window']}: {group['num_pages']} pages, at most "
                    f"{group['pages_of_one_request']} of a request",
                )
            )
    return [*rows, ("", f"{pages['tokens']} tokens of requests of full length fit")] if rows else []


def _states(memory: dict[str, Any]) -> str:
    if not memory["state_bytes"]:
        return ""
    kept = f"{size(memory['snapshot_bytes'])} for {memory['state_snapshots']} of them kept for prompts that begin alike"
    return f"{size(memory['state_bytes'])} states, {kept}, "


def _measured(read: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Measured memory beside the plan."""
    if read is None:
        return []
    rows = [("measured", f"while {read['requests']} requests of {read['tokens']} tokens were served")]
    for name, (planned, found) in read["bytes"].items():
        rows.append(
            ("", f"{name} {size(planned)} planned, {'not told by this device' if found is None else size(found)}")
        )
    return rows


def _rounding(memory: dict[str, Any]) -> list[tuple[str, str]]:
    ours, theirs, head = memory["weight_dtype"], memory["draft_weight_dtype"], memory["shared_head_bytes"]
    if ours is None and theirs is None:
        index = memory["head_index_bytes"]
        return (
            [("", f"{size(index)} of the weights are the target's head in float8, to find proposals")] if index else []
        )
    if ours in RELEASED:
        which = f"experts in {ours}, as they were released"
        which += "" if theirs in (ours, None) else f", the drafter's large matrices in {theirs}"
    else:
        which = f"large matrices in {ours}" if theirs in (ours, None) else f"the drafter's large matrices in {theirs}"
        if ours is not None and theirs not in (ours, None):
            which += f", the target's in {ours}"
        if memory["attention_output"] is not None:
            which += f", what attention gives in {memory['attention_output']}"
    copy = f", {size(head)} for its copy of the target's head" if head else ""
    return [("", f"{which}{copy}, {size(memory['reading_bytes'])} while weights are read")]


def _plans(execution: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Runners of the cycles, with the reasons why earlier runners were refused; calls with the same plan share a line."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for plan in execution:
        how = {key: plan[key] for key in ("runner", "attention", "weight_layout", "refused")}
        alike.setdefault(json.dumps(how), []).append(plan)
    rows = []
    for plans in alike.values():
        plan = plans[0]
        calls = ", ".join(f"{one['model']} {one['sequences']} x {one['tokens']}" for one in plans)
        attention = " with attention in the layer's kernel" if plan["attention"] == "in_layer" else ""
        layout = "blocks of columns" if plan["weight_layout"] == "column_blocks" else "rows"
        rows.append(("" if rows else "execution", f"{calls} tokens: {plan['runner']}{attention}, matrices in {layout}"))
        rows += [("", f"  not {what}: {reason}") for what, reason in plan["refused"].items()]
    return rows


def _exact(shapes: dict[str, list[int]] | None) -> list[tuple[str, str]]:
    """The shapes that all calls have where texts are exact."""
    if shapes is None:
        return []
    cycle, prompts = (" x ".join(map(str, shapes[of])) for of in ("cycle", "prompts"))
    return [("exact", f"every cycle verifies {cycle} tokens, every part of prompts is {prompts}, whoever is served")]


def _hashes(compared: int | None) -> list[tuple[str, str]]:
    if compared is None:
        return []
    none = "none is recorded: only dflash-convert's folders have them"
    return [("hashes", f"{compared} files are what their conversion recorded" if compared else none)]


def _shortage(pages: dict[str, Any], memory: dict[str, Any]) -> list[tuple[str, str]]:
    if pages["num_pages"] >= memory["pages_for_full_length"]:
        return []
    return [("", f"no room for the {memory['pages_for_full_length']} pages that all of them would fill at full length")]
