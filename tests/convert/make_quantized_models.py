"""Regenerates golden/released: small random models as transformers and its neighbours write them, and what they stand for.

    python tests/convert/make_quantized_models.py

Needs torch, transformers, accelerate, compressed-tensors, bitsandbytes and nvidia-modelopt. test_quantized_releases.py loads the
folders, and needs none of these. `dequantized.npz` holds each quantized matrix as the tool unpacks it, bfloat16 as its bits.
"""

import copy
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as modelopt
import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

GOLDEN = Path(__file__).parent / "golden" / "released"
SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def made(config: Any, kind: Any) -> torch.nn.Module:
    """A model with weights that say something."""
    config.architectures = [kind.__name__]
    model = kind(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def keep(name: str, source: Path, numbers: dict[str, torch.Tensor]) -> None:
    """A folder of a tool without what is of no use here."""
    folder = GOLDEN / name
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name in ("config.json", "hf_quant_config.json", "model.safetensors"):
            shutil.copyfile(path, folder / path.name)
    bits = {key: one.to(torch.bfloat16).contiguous().view(torch.uint16).numpy() for key, one in numbers.items()}
    np.savez_compressed(folder / "dequantized.npz", **bits)


def by_bitsandbytes(name: str, source: Path, **said: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=BitsAndBytesConfig(**said), device_map="cpu", dtype=torch.bfloat16
    )
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        stored = load_file(Path(scratch) / "model.safetensors")
        again = AutoModelForCausalLM.from_pretrained(scratch, device_map="cpu").dequantize().state_dict()
        chosen = [key for key, one in stored.items() if one.dtype == torch.int8 or f"{key}.absmax" in stored]
        keep(name, Path(scratch), {key: again[key] for key in chosen})


def by_compressed_tensors(name: str, source: Path, preset: str) -> None:
    """Scales from the largest and the smallest numbers of a group."""
    model, scheme = (
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16),
        preset_name_to_scheme(preset, ["Linear"]),
    )
    groups = {"group_0": scheme}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="initialized")
    )
    modules = {key: one for key, one in model.named_modules() if hasattr(one, "quantization_scheme")}
    for module in modules.values():
        weight, args, whole = module.weight.data.float(), scheme.weights, None
        grouped = weight.reshape(len(weight), -1, args.group_size)
        if args.strategy == "tensor_group":
            whole = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
            module.weight_global_scale.data.copy_(whole)
        scales, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, global_scale=whole)
        module.weight_scale.data.copy_(scales)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.fill_(1.0)
    tool = ModelCompressor.from_pretrained_model(model)
    tool.compress_model(model)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        tool.update_config(scratch)
        tool.decompress_model(model)
        keep(name, Path(scratch), {f"{key}.weight": one.weight.data for key, one in modules.items()})


def by_modelopt(name: str, model: torch.nn.Module, preset: dict[str, Any]) -> None:
    modelopt.quantize(model, copy.deepcopy(preset), lambda one: one(torch.randint(0, 48, (8, 32))))
    with tempfile.TemporaryDirectory() as scratch:
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=scratch)
        stored = load_file(Path(scratch) / "model.safetensors")
        numbers = {}
        for key, codes in stored.items():
            parts = [stored.get(f"{key}{end}") for end in ("_scale", "_scale_2", "_weight_scale", "_weight_scale_2")]
            scale, whole = parts[:2] if key.endswith(".weight") else parts[2:]
            if codes.dtype == torch.float8_e4m3fn and not key.endswith("_scale"):
                numbers[key] = codes.float() * scale.float()
            elif codes.dtype == torch.uint8:
                turned = codes.dim() == 3  # gpt-oss has input channels first
                codes, scale = (one.transpose(1, 2).contiguous() if turned else one for one in (codes, scale))
                packed = NVFP4QTensor((*codes.shape[:-1], 2 * codes.shape[-1]), torch.bfloat16, codes)
                number = packed.dequantize(torch.bfloat16, scale=scale, double_scale=whole, block_sizes={-1: 16})
                numbers[key] = number.transpose(1, 2) if turned else number
        keep(name, Path(scratch), numbers)


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    shutil.rmtree(GOLDEN, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        dense = Path(scratch) / "dense"
        made(Qwen3Config(**SIZES), Qwen3ForCausalLM).save_pretrained(dense)
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        by_bitsandbytes("nf4", dense, **four)
        by_bitsandbytes("fp4_in_bfloat16", dense, load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
        by_bitsandbytes("int8", dense, load_in_8bit=True)
        for preset in ("NVFP4", "MXFP4", "MXFP8"):
            by_compressed_tensors(f"compressed_{preset.lower()}", dense, preset)
    experts = made(Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=1, mlp_only_layers=[]), Qwen3MoeForCausalLM)
    by_modelopt("modelopt_nvfp4", copy.deepcopy(experts), modelopt.NVFP4_DEFAULT_CFG)
    by_modelopt("modelopt_fp8", experts, modelopt.FP8_DEFAULT_CFG)
    # A model of its own sizes: rotations of a small one are no question here.
    oss = GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=2)
    by_modelopt("modelopt_gpt_oss", made(oss, GptOssForCausalLM), modelopt.NVFP4_DEFAULT_CFG)
    for folder in GOLDEN.iterdir():
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
