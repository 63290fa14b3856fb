"""Regenerates golden/quantized.safetensors: matrices as other tools pack them, and as they unpack them again.

    python tests/convert/make_quantized_golden.py AUTOGPTQ AUTOAWQ

Needs torch, transformers, compressed-tensors, and the sources of AutoGPTQ and AutoAWQ. test_quantized_formats.py reads the result,
and needs none of these. A matrix is `CASE.weight` and its tensors; `CASE.dequantized` is what the tool makes of them.
"""

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
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


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    autogptq, autoawq = map(Path, sys.argv[1:3])
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
    said = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False, "quant_method": "gptq"}
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
    }
    tensors = {f"{case}.{name}": one.contiguous() for case, (found, _) in cases.items() for name, one in found.items()}
    GOLDEN.mkdir(exist_ok=True)
    save_file(tensors, GOLDEN / "quantized.safetensors")
    (GOLDEN / "quantized.json").write_text(json.dumps({case: one for case, (_, one) in cases.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
