"""Regenerates golden/quantized.safetensors: matrices as other tools pack them, and as they unpack them again.

    python tests/convert/make_quantized_golden.py AUTOGPTQ AUTOAWQ AUTOROUND

Needs torch, transformers, compressed-tensors, bitsandbytes, nvidia-modelopt, and the sources of AutoGPTQ, AutoAWQ and AutoRound.
test_quantized_formats.py reads the result, and needs none of these. A matrix is `CASE.weight` and its tensors; `CASE.dequantized`
is what the tool makes of them.
"""

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional as bitsandbytes
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

ROWS, WHOLE_ROWS, COLUMNS = 70, 64, 96  # those of AutoGPTQ and AutoAWQ fill words
GOLDEN = Path(__file__).parent / "golden"


def module(name: str, path: Path) -> Any:
    """A file by itself, without the package around it."""
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    loaded = importlib.util.module_from_spec(found)
    found.loader.exec_module(loaded)
    return loaded


def float8_blocks() -> dict[str, torch.Tensor]:
    """transformers takes whole blocks alone."""
    codes = torch.randint(0, 256, (64, 96), dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    weight, scales = codes.view(torch.float8_e4m3fn), torch.rand(4, 3) * 0.01
    made = Fp8Dequantize(None).convert({"weight$": weight, "weight_scale_inv": scales})
    return {"weight": weight, "weight_scale_inv": scales, "dequantized": made["weight"]}


def gptq(tool: Any, bits: int, group: int, *, ordered: bool = False) -> dict[str, torch.Tensor]:
    """Zeros of 1 to the largest; with `ordered` the groups of columns are shuffled."""
    linear, groups = torch.nn.Linear(COLUMNS, WHOLE_ROWS, bias=False), COLUMNS // group
    linear.weight.data = linear.weight.data.half().float()
    scales = (torch.rand(WHOLE_ROWS, groups) * 0.01 + 0.005).half().float()
    zeros = torch.randint(1, 2**bits, (WHOLE_ROWS, groups)).float()
    index = torch.arange(COLUMNS, dtype=torch.int32) // group
    index = index[torch.randperm(COLUMNS)] if ordered else index
    packed = tool.QuantLinear(bits, group, COLUMNS, WHOLE_ROWS, bias=False)
    packed.pack(linear, scales, zeros, index)
    packed.scales = packed.scales.half()  # exact: that is what they were rounded to
    made = packed(torch.eye(COLUMNS, dtype=torch.float16)).T  # products with one number each
    kept = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return {**kept, "dequantized": made}


def awq(tool: Any, unpacking: Any) -> dict[str, torch.Tensor]:
    linear, group = torch.nn.Linear(COLUMNS, 64, bias=False), 32
    scales, zeros = (torch.rand(3, WHOLE_ROWS) * 0.01 + 0.005).half(), torch.randint(0, 16, (3, WHOLE_ROWS))
    whole = torch.randint(0, 16, (COLUMNS, WHOLE_ROWS))
    spread = [one.repeat_interleave(group, 0) for one in (scales.float(), zeros)]
    linear.weight.data = ((whole - spread[1]) * spread[0]).T.contiguous()
    packed = tool.WQLinear_GEMM.from_linear(linear, 4, group, scales=scales, zeros=zeros)
    made = unpacking.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, group)
    return {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales, "dequantized": made.T}


def auto_round(tool: Any, bits: int, group: int, *, symmetric: bool = False) -> dict[str, torch.Tensor]:
    """Zeros of 1 to the largest; symmetric ones are one number for all."""
    linear, shape = torch.nn.Linear(COLUMNS, WHOLE_ROWS, bias=False), (WHOLE_ROWS, COLUMNS // group)
    linear.weight.data *= 0.4
    scales = (torch.rand(shape) * 0.01 + 0.005).half().float()
    zeros = 1 << (bits - 1) if symmetric else torch.randint(1, 1 << bits, shape).float()
    zero = zeros if symmetric else zeros.repeat_interleave(group, 1)
    spread = scales.repeat_interleave(group, 1)
    whole = torch.clamp(torch.round(linear.weight / spread + zero), 0, (1 << bits) - 1)
    linear.weight.data = (whole - zero) * spread  # what its rounding keeps in range
    packed = tool.QuantLinear(bits, group, COLUMNS, WHOLE_ROWS, bias=False)
    packed.device = "cpu"  # one of the two asks for it
    packed.pack(linear, scales, zeros)
    packed.scales = packed.scales.half()
    made = packed(torch.eye(COLUMNS, dtype=torch.float16)).T
    return {**{name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}, "dequantized": made}


def compressed(form: str, dtype: torch.dtype, **weights: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    block = args.block_structure or [1, args.group_size if (args.group_size or -1) > 0 else COLUMNS]
    grid = (-(-ROWS // block[0]), -(-COLUMNS // block[1])) if args.strategy != "tensor" else (1,)
    scales = (torch.rand(grid) * 0.01 + 0.005).to(dtype)
    state = {"weight": torch.randn(ROWS, COLUMNS, dtype=dtype) * 0.4, "weight_scale": scales}
    if not args.symmetric:
        half = 2 ** (args.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, grid, dtype=torch.int8)
    tool = BaseCompressor.get_value_from_registry(form)
    kept = tool.compress(state, scheme)
    made = tool.decompress(kept, scheme)["weight"]
    said = {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }  # fmt: skip
    return {**kept, "dequantized": made}, said


def compressed_e2m1(form: str, **weights: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Codes and scales are drawn: the tool unpacks them, and they come up in every pattern of bits."""
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, type="float", **weights), format=form
    )
    group = weights["group_size"]
    kept = {"weight_packed": torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)}
    if group == 16:
        kept["weight_scale"] = (torch.rand(ROWS, COLUMNS // group) * 400 + 1).to(torch.float8_e4m3fn)
        kept["weight_global_scale"] = torch.tensor([2688 / 1.7])
    else:
        kept["weight_scale"] = torch.randint(100, 127, (ROWS, COLUMNS // group), dtype=torch.uint8)
    made = BaseCompressor.get_value_from_registry(form).decompress(kept, scheme)["weight"]
    said = {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }  # fmt: skip
    return {**kept, "dequantized": made}, said


def nvfp4(*shape: int) -> dict[str, torch.Tensor]:
    """With a scale of scales for each expert where there are some."""
    weight = torch.randn(*shape) * 0.4
    whole = weight.abs().amax((-1, -2)) / (6 * 448)
    shaped = whole[:, None, None] if len(shape) == 3 else whole
    packed, scales, _ = NVFP4QTensor.quantize(weight, 16, None, shaped)
    made = packed.dequantize(torch.bfloat16, scale=scales, double_scale=shaped, block_sizes={-1: 16})
    return {"weight": packed._quantized_data, "weight_scale": scales, "weight_scale_2": whole, "dequantized": made}


def mxfp8() -> dict[str, torch.Tensor]:
    packed, scales = MXFP8QTensor.quantize(torch.randn(ROWS, COLUMNS) * 0.01)
    made = packed.dequantize(torch.bfloat16, scale=scales)
    return {"weight": packed._quantized_data, "weight_scale": scales, "dequantized": made}


def four_bits(
    kind: str, dtype: torch.dtype, shape: tuple[int, int], storage: torch.dtype = torch.uint8, *, nested: bool
) -> dict[str, torch.Tensor]:
    """Its kernel for CPUs has rows begin blocks; where they do not, its function in torch, which GPUs agree with, counts."""
    packed, state = bitsandbytes.quantize_4bit(
        torch.randn(shape, dtype=dtype),
        blocksize=64,
        quant_type=kind,
        compress_statistics=nested,
        quant_storage=storage,
    )
    scales = state.absmax
    if nested:
        scales = bitsandbytes.dequantize_blockwise(state.absmax, state.state2) + state.offset
    codes = packed.contiguous().view(torch.uint8).reshape(-1)
    made = _dequantize_4bit_compute(codes, scales, state.code, 64, shape, dtype)
    if shape[1] % 64 == 0:
        assert torch.equal(made, bitsandbytes.dequantize_4bit(packed, state))
    parts = {f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}
    return {"weight": packed, **parts, "dequantized": made}


def eight_bits() -> dict[str, torch.Tensor]:
    codes, scales, _ = bitsandbytes.int8_vectorwise_quant(torch.randn(ROWS, COLUMNS, dtype=torch.float16))
    made = bitsandbytes.int8_vectorwise_dequant(codes, scales)
    return {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8), "dequantized": made}


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    autogptq, autoawq, autoround = map(Path, sys.argv[1:4])
    layers = autogptq / "auto_gptq" / "nn_modules" / "qlinear"
    old, new = (module(name, layers / f"{name}.py") for name in ("qlinear_cuda_old", "qlinear_cuda"))
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):  # folders without what their __init__ loads
        package = types.ModuleType(name)
        package.__path__ = [str(autoawq / name.replace(".", "/"))]
        sys.modules[name] = package
    gemm, unpacking = (
        importlib.import_module(f"awq.{name}") for name in ("modules.linear.gemm", "utils.packing_utils")
    )
    gemm.get_best_device = lambda: "cpu"
    for name in ("auto_round", "auto_round.utils", "auto_round_extension", "auto_round_extension.torch"):
        package = types.ModuleType(name)
        package.__path__ = [str(autoround / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.modules["auto_round.utils"].get_packing_device = lambda device=None: "cpu"
    less, own = (importlib.import_module(f"auto_round_extension.torch.qlinear_torch{end}") for end in ("_zp", ""))
    rounded = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "autoround_version": "0.9.0"}
    said = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False, "quant_method": "gptq"}
    four = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None,
    }  # fmt: skip
    cases: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
        "float8_blocks": (float8_blocks(), {"quant_method": "fp8", "weight_block_size": [16, 32]}),
        "gptq": (gptq(old, 4, 32), said),
        "gptq_ordered": (gptq(new, 4, 32, ordered=True), said | {"desc_act": True}),
        "gptq_int8": (gptq(old, 8, 96), said | {"bits": 8, "group_size": -1}),
        "awq": (
            awq(gemm, unpacking),
            {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        ),
        "float8_tensor": compressed("float-quantized", torch.bfloat16, num_bits=8, type="float", strategy="tensor"),
        "float8_rows": compressed("float-quantized", torch.float32, num_bits=8, type="float", strategy="channel"),
        "float8_edges": compressed(
            "naive-quantized", torch.bfloat16, num_bits=8, type="float", strategy="block", block_structure=[32, 40]
        ),
        "int8_rows": compressed("int-quantized", torch.bfloat16, num_bits=8, strategy="channel"),
        "int8_zeros": compressed("int-quantized", torch.float16, num_bits=8, strategy="channel", symmetric=False),
        "int4_groups": compressed("pack-quantized", torch.bfloat16, num_bits=4, strategy="group", group_size=32),
        "int4_zeros": compressed(
            "pack-quantized", torch.bfloat16, num_bits=4, strategy="group", group_size=32, symmetric=False
        ),
        "packed_int8": compressed("pack-quantized", torch.bfloat16, num_bits=8, strategy="channel"),
        "packed_int2": compressed("pack-quantized", torch.bfloat16, num_bits=2, strategy="group", group_size=32),
        "int2_zeros": compressed(
            "pack-quantized", torch.bfloat16, num_bits=2, strategy="group", group_size=32, symmetric=False
        ),
        "int4_static_order": compressed(
            "pack-quantized", torch.bfloat16, num_bits=4, strategy="group", group_size=32, actorder="weight"
        ),
        "compressed_nvfp4": compressed_e2m1("nvfp4-pack-quantized", strategy="tensor_group", group_size=16),
        "compressed_mxfp4": compressed_e2m1("mxfp4-pack-quantized", strategy="group", group_size=32),
        "compressed_mxfp8": compressed(
            "mxfp8-quantized",
            torch.bfloat16,
            num_bits=8,
            type="float",
            strategy="group",
            group_size=32,
            scale_dtype="torch.uint8",
        ),
        "gptq_int2": (gptq(old, 2, 32), said | {"bits": 2}),
        "gptq_int3": (gptq(old, 3, 32), said | {"bits": 3}),
        "gptq_int3_ordered": (gptq(new, 3, 32, ordered=True), said | {"bits": 3, "desc_act": True}),
        "gptq_int8_groups": (gptq(new, 8, 32), said | {"bits": 8}),
        "modelopt_nvfp4": (nvfp4(ROWS, COLUMNS), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        "modelopt_experts": (nvfp4(3, ROWS, COLUMNS), {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}),
        "modelopt_mxfp8": (mxfp8(), {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
        "nf4": (four_bits("nf4", torch.bfloat16, (ROWS, 128), nested=False), four),
        "nf4_nested": (four_bits("nf4", torch.bfloat16, (300, 64), nested=True), four),
        "nf4_over_rows": (four_bits("nf4", torch.bfloat16, (ROWS, COLUMNS), nested=True), four),
        "nf4_in_bfloat16": (four_bits("nf4", torch.bfloat16, (ROWS, 128), torch.bfloat16, nested=True), four),
        "fp4": (
            four_bits("fp4", torch.float16, (ROWS, COLUMNS), nested=False),
            four | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
        ),
        "auto_round": (
            auto_round(less, 4, 32, symmetric=True),
            rounded | {"sym": True, "packing_format": "auto_round:auto_gptq"},
        ),
        "auto_round_int3": (auto_round(less, 3, 32), rounded | {"bits": 3, "packing_format": "auto_round:gptq"}),
        "auto_round_zeros": (auto_round(own, 4, 32), rounded | {"packing_format": "auto_round"}),
        "auto_round_int2": (
            auto_round(own, 2, 96),
            rounded | {"packing_format": "auto_round:gptqmodel", "extra_config": {"a": {"bits": 2, "group_size": -1}}},
        ),
        "bitsandbytes_int8": (eight_bits(), {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    }
    tensors = {f"{case}.{name}": one.contiguous() for case, (found, _) in cases.items() for name, one in found.items()}
    GOLDEN.mkdir(exist_ok=True)
    save_file(tensors, GOLDEN / "quantized.safetensors")
    (GOLDEN / "quantized.json").write_text(json.dumps({case: one for case, (_, one) in cases.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
